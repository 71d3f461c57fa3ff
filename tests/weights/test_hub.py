"""Fetching, with the real clients, from a server on this machine that also fails in many ways."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from loopback import COMMIT, File, Hub, Server, running

from keras_vit.weights import download, known, network
from keras_vit.weights.hub import fetch

ROOT = Path(__file__).parents[2]
DATA = np.random.default_rng(7).bytes(50_021)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    """No waiting between attempts, caches of our own, and the network allowed."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(download, "CHUNK", 4096)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def server():
    with running(Server()) as server:
        server.files["/a/model.npz"] = File(DATA)
        yield server


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub, and huggingface_hub made to use it; what HF_ENDPOINT sets when it is imported."""
    from huggingface_hub import constants

    with running(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield hub


REPO = {"config.json": b'{"a": 1}', "preprocessor_config.json": b"{}", "model.safetensors": DATA}


def left(folder: Path) -> list[str]:
    """What is in a cache, locks apart."""
    return sorted(
        p.name
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".lock" and p.name[0] != "."
    )


def closed_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# -- paths and names


def test_fetch_returns_what_exists(tmp_path, monkeypatch):
    file = tmp_path / "vit_b16.augreg_in21k"  # a path goes before a known name
    file.write_bytes(b"x")
    assert fetch(file) == file
    assert fetch(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch(f"~/{file.name}") == file
    with pytest.raises(ValueError, match="revision must be None"):
        fetch(file, revision="main")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("vit_b16.augreg_in21", "vit_b16.augreg_in21k"),
        ("vit_b14.dinov2", "vit_b14.dinov2_lvd142m_518"),
        ("google/vit-base-patch16-224", "hf://google/vit-base-patch16-224"),
    ],
)
def test_fetch_missing_path_names_what_was_meant(source, hint):
    with pytest.raises(FileNotFoundError, match="does not exist") as error:
        fetch(source)
    assert hint in str(error.value)


def test_fetch_missing_path_guesses_nothing_far():
    with pytest.raises(FileNotFoundError) as error:
        fetch("/no/such/weights.npz")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    ["", "ftp://host/a.npz", "http://example.org/a.npz", "file:///etc/passwd", "https:///a.npz",
     "hf://", "hf://name", "hf://datasets/a/b", "hf://a/b/../c", "https://host/"],
)  # fmt: skip
def test_fetch_refuses_other_sources(source):
    with pytest.raises(ValueError, match="source must") as error:
        fetch(source)
    assert "Received" in str(error.value)


def test_fetch_refuses_pickles_before_they_come(server):
    with pytest.raises(ValueError, match="can run any code.*weights_only=True"):
        fetch(f"{server.url}/a/model.pth")
    with pytest.raises(ValueError, match="get_model.'vit_b_16', weights='IMAGENET1K_V1'"):
        fetch("vit_b16.torchvision_in1k_v1")
    assert not server.requests


# -- addresses


def test_fetch_address_once(server, tmp_path):
    first = fetch(f"{server.url}/a/model.npz")
    assert first.read_bytes() == DATA
    assert first.name == "model.npz" and tmp_path / "keras" in first.parents
    assert fetch(f"{server.url}/a/model.npz") == first
    assert len(server.requests) == 1
    server.files["/b/model.npz"] = File(b"other")  # the same name at another address
    assert fetch(f"{server.url}/b/model.npz").read_bytes() == b"other"
    assert first.read_bytes() == DATA
    elsewhere = fetch(f"{server.url}/a/model.npz", cache_dir=tmp_path / "else")
    assert tmp_path / "else" in elsewhere.parents


def test_fetch_address_goes_on_after_a_cut(server):
    server.files["/a/model.npz"].cut = [20_000, 5_000]
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz") == [None, "bytes=20000-", "bytes=25000-"]


def test_fetch_address_without_ranges_starts_again(server):
    server.files["/a/model.npz"].ranges = False
    server.files["/a/model.npz"].cut = [20_000]
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA


def test_fetch_address_distrusts_another_part(server):
    server.files["/a/model.npz"].shift = 10
    server.files["/a/model.npz"].cut = [20_000]
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz") == [None, "bytes=20000-", None]


def test_fetch_address_keeps_a_part_for_the_next_call(server, tmp_path):
    server.files["/a/model.npz"].cut = [20_000, 0, 0, 0, 0]
    with pytest.raises(ConnectionError, match="20000 bytes are kept: call again"):
        fetch(f"{server.url}/a/model.npz")
    (part,) = left(tmp_path / "keras")
    assert part.endswith(".part")  # nothing under the final name
    server.files["/a/model.npz"].cut = []
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz")[-1] == "bytes=20000-"
    assert left(tmp_path / "keras") == ["model.npz"]


def test_fetch_address_takes_a_whole_part(server, tmp_path):
    """What a process leaves that is killed between the last byte and the final name."""
    server.files["/a/model.npz"].cut = [20_000, 0]
    with pytest.raises(ConnectionError):
        fetch(f"{server.url}/a/model.npz")
    next((tmp_path / "keras").rglob("*.part")).write_bytes(DATA)
    before = len(server.requests)
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert len(server.requests) == before


@pytest.mark.parametrize("other", [DATA[::-1], DATA + b"more", DATA[:100]])
def test_fetch_address_never_joins_two_versions(server, tmp_path, other):
    server.files["/a/model.npz"].cut = [20_000, 0]
    with pytest.raises(ConnectionError):
        fetch(f"{server.url}/a/model.npz")
    server.files["/a/model.npz"] = File(other, etag='"2"')
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == other
    assert left(tmp_path / "keras") == ["model.npz"]


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_fetch_address_does_not_resume_without_a_version(server, tmp_path, etag):
    server.files["/a/model.npz"].etag = etag
    server.files["/a/model.npz"].cut = [20_000] * 9
    with pytest.raises(ConnectionError, match="ended after"):
        fetch(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert set(server.ranges("/a/model.npz")) == {None}
    server.files["/a/model.npz"].cut = []
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA


def test_fetch_address_checks_the_hash(server, tmp_path):
    url = f"{server.url}/a/model.npz"
    with pytest.raises(ValueError, match=f"sha256 must be {'0' * 64}. Received: sha256={SHA256}"):
        fetch(f"{url}#sha256={'0' * 64}")
    assert left(tmp_path / "keras") == []
    path = fetch(f"{url}#sha256={SHA256.upper()}")
    path.write_bytes(b"altered in the cache")
    assert fetch(url).read_bytes() == b"altered in the cache"  # nobody asked
    assert fetch(f"{url}#sha256={SHA256}").read_bytes() == DATA
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        fetch(f"{url}#sha256=12ab")


def test_fetch_address_of_a_longer_file(server, tmp_path):
    """HTTP ends where the header says, so only a hash can tell that there was more."""
    server.files["/a/model.npz"].length = 40_000
    with pytest.raises(ValueError, match="sha256 must be"):
        fetch(f"{server.url}/a/model.npz#sha256={SHA256}")
    assert left(tmp_path / "keras") == []
    assert fetch(f"{server.url}/a/model.npz").read_bytes() == DATA[:40_000]


def test_fetch_address_of_unknown_length(server, tmp_path):
    server.files["/a/model.npz"].length = -1
    with pytest.raises(ConnectionError, match="does not say how long"):
        fetch(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert fetch(f"{server.url}/a/model.npz#sha256={SHA256}").read_bytes() == DATA


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, FileNotFoundError),
        (401, PermissionError),
        (403, PermissionError),
        (503, ConnectionError),
    ],
)
def test_fetch_address_refused(server, tmp_path, status, kind):
    server.files["/a/model.npz"].status = status
    with pytest.raises(kind, match=f"Cannot fetch {server.url}/a/model.npz: .*{status}"):
        fetch(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"Content-Type": "text/html; charset=utf-8"}, "a web page came"),
        ({"Content-Encoding": "gzip"}, "a gzip stream came"),
    ],
)
def test_fetch_address_refuses_what_is_not_the_file(server, tmp_path, headers, said):
    server.files["/a/model.npz"].headers = headers
    with pytest.raises(ConnectionError, match=said):
        fetch(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []


def test_fetch_address_at_the_same_time_comes_once(server):
    server.files["/a/model.npz"].pause, server.files["/a/model.npz"].piece = 0.02, 5000
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch, [f"{server.url}/a/model.npz"] * 3))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == DATA
    assert len(server.requests) == 1


def test_fetch_address_follows_only_safe_redirects(server, tmp_path):
    location = {"Location": f"http://localhost:{server.port}/a/model.npz"}
    server.files["/moved.npz"] = File(b"", status=302, headers=location)
    assert fetch(f"{server.url}/moved.npz").read_bytes() == DATA
    server.files["/away.npz"] = File(b"", status=302, headers={"Location": "http://example.org/a"})
    with pytest.raises(ValueError, match="must be an https:// address"):
        fetch(f"{server.url}/away.npz")


def test_fetch_address_nobody_there(tmp_path):
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="refused.*Check the network"):
        fetch(f"http://127.0.0.1:{closed_port()}/model.npz")
    assert time.monotonic() - start < 3
    assert left(tmp_path) == []


def test_fetch_address_silent_server(server, monkeypatch):
    monkeypatch.setattr(network, "TIMEOUT", 0.3)
    server.files["/a/model.npz"].silent = True
    with pytest.raises(ConnectionError, match="no answer within 0.3 seconds"):
        fetch(f"{server.url}/a/model.npz")


def test_fetch_address_without_room(server, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=f"{len(DATA)} bytes are to come.* room for 1000"):
        fetch(f"{server.url}/a/model.npz")
    assert left(tmp_path) == []


def test_fetch_address_offline(server, monkeypatch):
    path = fetch(f"{server.url}/a/model.npz")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(f"{server.url}/a/model.npz") == path
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
        fetch(f"{server.url}/b/model.npz")
    assert len(server.requests) == 1


def test_fetch_address_into_a_file(server, tmp_path):
    (tmp_path / "keras").write_text("in the way")
    with pytest.raises(OSError, match="cache_dir must be a folder"):
        fetch(f"{server.url}/a/model.npz")


def test_fetch_address_killed_goes_on(server, tmp_path):
    """SIGKILL in the middle of a transfer: nothing under the final name, and no byte twice."""
    server.files["/a/model.npz"].pause, server.files["/a/model.npz"].piece = 0.02, 1000
    url = f"{server.url}/a/model.npz"
    # The package alone: importing Keras would take longer than the test.
    code = (
        "import sys, types; sys.modules['keras_vit'] = p = types.ModuleType('keras_vit'); "
        f"p.__path__ = [{str(ROOT / 'keras_vit')!r}]; "
        f"from keras_vit.weights.download import download; download({url!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not any(p.stat().st_size > 9000 for p in (tmp_path / "keras").rglob("*.part")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not download.cached_path(url).exists()
    server.files["/a/model.npz"].pause = 0
    assert fetch(url).read_bytes() == DATA
    first, second = server.ranges("/a/model.npz")
    assert first is None and int(second[6:-1]) > 9000


# -- the Hub


def test_fetch_repository_takes_only_what_is_needed(hub, tmp_path):
    extra = {
        "pytorch_model.bin": b"p",
        "tf_model.h5": b"t",
        "README.md": b"r",
        "sub/config.json": b"{}",
    }
    hub.put("org/vit", REPO | extra)
    folder = fetch("hf://org/vit")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == REPO
    assert tmp_path / "hub" in folder.parents
    before = len(hub.requests)
    assert fetch("hf://org/vit") == folder
    assert len(hub.requests) == before + 1  # it asks for the commit, and fetches nothing
    assert fetch(f"hf://org/vit@{COMMIT}") == folder
    assert len(hub.requests) == before + 1  # a commit never changes


def test_fetch_repository_with_shards(hub):
    files = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": DATA,
        "model-00002-of-00002.safetensors": DATA[:99],
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        ).encode(),
        "other.safetensors": b"o",
    }
    hub.put("org/big", files)
    folder = fetch("hf://org/big")
    del files["other.safetensors"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def test_fetch_repository_file_folder_and_revision(hub, tmp_path):
    hub.put("org/vit", {"a/x.npz": DATA, "b/model.safetensors": b"w", "b/config.json": b"{}"}, "v2")
    with pytest.raises(FileNotFoundError, match="the Hub has no org/vit"):
        fetch("hf://org/vit/a/x.npz")
    file = fetch("hf://org/vit@v2/a/x.npz")
    assert file.read_bytes() == DATA and file.parts[-2:] == ("a", "x.npz")
    folder = fetch("hf://org/vit/b", revision="v2")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert fetch("hf://org/vit/b/model.safetensors", revision="v2").parent == folder
    with pytest.raises(FileNotFoundError, match="no such file.*a/x.npz"):
        fetch("hf://org/vit@v2/c")
    with pytest.raises(ValueError, match="revision must be the one"):
        fetch("hf://org/vit@v2", revision="v3")


def test_fetch_known_name(hub):
    hub.put("timm/vit_base_patch16_224.augreg_in21k", REPO)
    folder = fetch("vit_b16.augreg_in21k")
    assert (folder / "model.safetensors").read_bytes() == DATA
    assert fetch("vit_base_patch16_224.augreg_in21k") == folder  # timm's name for it
    assert known.KNOWN["vit_b16.augreg_in21k"].source.startswith("hf://timm/")


@pytest.mark.parametrize(
    ("files", "kind", "said"),
    [
        ({"pytorch_model.bin": b"p", "config.json": b"{}"}, ValueError,
         "can run any code.*hf download org/vit .*pytorch_model.bin.*weights_only=True"),
        ({"B_16.npz": b"n", "README.md": b"r"}, FileNotFoundError, "hf://org/vit/B_16.npz"),
        ({"tf_model.h5": b"t"}, FileNotFoundError, "no model.safetensors. It has tf_model.h5"),
    ],
)  # fmt: skip
def test_fetch_repository_without_safetensors(hub, files, kind, said):
    hub.put("org/vit", files)
    with pytest.raises(kind, match=said):
        fetch("hf://org/vit")
    assert len(hub.requests) == 1


def test_fetch_repository_refuses_a_pickle_by_name(hub):
    hub.put("org/vit", REPO | {"a.pth": b"p"})
    with pytest.raises(ValueError, match="can run any code"):
        fetch("hf://org/vit/a.pth")


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "RepoNotFound", FileNotFoundError, "the Hub has no org/vit"),
        (404, "RevisionNotFound", FileNotFoundError, "no revision 'main'"),
        (403, "GatedRepo", PermissionError, "Accept its terms at https://huggingface.co/org/vit"),
        (401, "", PermissionError, "Log in"),
        (500, "", ConnectionError, "answers 500"),
    ],
)
def test_fetch_repository_refused(hub, tmp_path, status, code, kind, said):
    hub.refuse("org/vit", status, code)
    start = time.monotonic()
    with pytest.raises(kind, match=said) as error:
        fetch("hf://org/vit")
    assert str(error.value).startswith("Cannot fetch hf://org/vit: ")
    assert time.monotonic() - start < 3
    assert left(tmp_path / "hub") == []


def test_fetch_repository_file_gone(hub):
    hub.put("org/vit", REPO)
    del hub.files["/org/vit/resolve/main/model.safetensors"]
    with pytest.raises(FileNotFoundError, match="hf://org/vit/model.safetensors: it is not there"):
        fetch("hf://org/vit")


def test_fetch_repository_changed_in_between(hub):
    hub.put("org/vit", REPO)
    hub.files["/org/vit/resolve/main/model.safetensors"].headers["X-Repo-Commit"] = "d" * 40
    with pytest.raises(ConnectionError, match="changed while it was being fetched"):
        fetch("hf://org/vit")


def test_fetch_repository_checks_the_hash(hub, tmp_path):
    """The same size, other bytes: huggingface_hub takes them, we do not."""
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].data = DATA[::-1]
    with pytest.raises(ValueError, match=f"sha256 must be {SHA256}.*deleted"):
        fetch("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")
    assert SHA256 not in left(tmp_path / "hub")
    hub.files["/cdn/org/vit/model.safetensors"].data = DATA
    assert (fetch("hf://org/vit") / "model.safetensors").read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA + b"longer", DATA[:-1]])
def test_fetch_repository_checks_the_size(hub, tmp_path, data):
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].data = data
    with pytest.raises(ConnectionError, match="size"):
        fetch("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")


def test_fetch_repository_goes_on_after_a_cut(hub):
    big = DATA * 300  # more than the client takes at once
    hub.put("org/vit", REPO | {"model.safetensors": big})
    hub.files["/cdn/org/vit/model.safetensors"].cut = [12_000_000]
    assert (fetch("hf://org/vit") / "model.safetensors").read_bytes() == big
    first, second = hub.ranges("/cdn/org/vit/model.safetensors")
    assert first is None and second.startswith("bytes=1")


def test_fetch_repository_killed_transfer(hub, tmp_path):
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].cut = [20_000] * 99
    with pytest.raises(ConnectionError, match="Cannot fetch hf://org/vit/model.safetensors"):
        fetch("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")
    assert not any(name.endswith(".incomplete") for name in left(tmp_path / "hub"))
    hub.files["/cdn/org/vit/model.safetensors"].cut = []
    assert (fetch("hf://org/vit") / "model.safetensors").read_bytes() == DATA


def test_fetch_repository_nobody_there(hub, monkeypatch, tmp_path):
    from huggingface_hub import constants

    hub.put("org/vit", REPO)
    folder = fetch("hf://org/vit")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert fetch("hf://org/vit") == folder  # from the cache
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="Cannot fetch hf://org/other: .*Check the network"):
        fetch("hf://org/other")
    assert time.monotonic() - start < 3


def test_fetch_repository_silent_hub(hub, monkeypatch):
    monkeypatch.setattr(network, "TIMEOUT", 0.3)
    hub.put("org/vit", REPO)
    hub.files["/api/models/org/vit/revision/main"].silent = True
    with pytest.raises(ConnectionError, match="timed out"):
        fetch("hf://org/vit")


def test_fetch_repository_offline(hub, monkeypatch, caplog):
    shard = "model-00001-of-00001.safetensors"
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    hub.put("org/vit", REPO)
    hub.put("org/big", {shard: DATA, "model.safetensors.index.json": index})
    folder, big = fetch("hf://org/vit"), fetch("hf://org/big")
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("hf://org/vit") == folder
    assert fetch("hf://org/vit/config.json") == folder / "config.json"
    assert fetch("hf://org/big") == big
    (big / shard).unlink()
    (folder / "config.json").unlink()
    assert fetch("hf://org/vit") == folder
    assert "no config.json" in caplog.text
    for missing in ("hf://org/big", "hf://org/other", "hf://org/vit/a.npz", "hf://org/vit@v2"):
        with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
            fetch(missing)
    assert len(hub.requests) == before


def test_fetch_repository_reads_the_environment(hub, tmp_path):
    """HF_ENDPOINT and HF_HOME, as a user sets them, in a process of its own."""
    hub.put("org/vit", REPO)
    code = (
        "import sys, types; sys.modules['keras_vit'] = p = types.ModuleType('keras_vit'); "
        f"p.__path__ = [{str(ROOT / 'keras_vit')!r}]; "
        "from keras_vit.weights.hub import fetch; print(fetch('hf://org/vit'))"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(run.stdout.strip())
    assert tmp_path / "home" in folder.parents
    assert (folder / "model.safetensors").read_bytes() == DATA

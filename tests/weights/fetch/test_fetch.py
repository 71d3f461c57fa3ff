"""Fetching paths and URLs, from a local server that also fails in many ways."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from loopback import DATA, ROOT, SHA256, File, closed_port, left

import keras_vit
from keras_vit.weights import fetch
from keras_vit.weights.fetch import fetch_weights, https, network
from keras_vit.weights.load import inspect

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("quick_downloads")]


# -- paths and names


def test_fetch_returns_what_exists(tmp_path, monkeypatch):
    file = tmp_path / "vit_b16.augreg_in21k"  # a path takes precedence over a known name
    file.write_bytes(b"x")
    assert fetch_weights(file) == file
    assert fetch_weights(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch_weights(f"~/{file.name}") == file
    with pytest.raises(ValueError, match="revision must be None"):
        fetch_weights(file, revision="main")


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
        fetch_weights(source)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("source", "near", "meant"),
    [
        ("a/b", [], " Did you mean hf://a/b on the Hugging Face Hub?"),
        ("a", ["x"], " Did you mean the known name x?"),
        ("a", ["x", "y"], " Did you mean one of the known names x, y?"),
        ("a/b", ["x"], " Did you mean hf://a/b on the Hugging Face Hub, or the known name x?"),
        ("a", [], ""),
    ],
)
def test_fetch_missing_path_asks_in_whole_sentences(monkeypatch, source, near, meant):
    monkeypatch.setattr(fetch.known, "nearest", lambda name: near)
    with pytest.raises(FileNotFoundError) as error:
        fetch_weights(source)
    assert str(error.value).partition("which does not exist.")[2] == meant


def test_fetch_missing_path_in_a_folder_is_no_organization(monkeypatch, tmp_path):
    (tmp_path / "runs" / "flowers").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for source, meant in (("runs/flower", " Did you mean the path runs/flowers?"), ("runs/x", "")):
        with pytest.raises(FileNotFoundError) as error:
            fetch_weights(source)
        assert str(error.value).partition("which does not exist.")[2] == meant


def test_weights_of_keras_applications_are_answered_by_our_tags():
    with pytest.raises(FileNotFoundError, match="weights must be .* augreg_in21k_ft_in1k, .*or a"):
        keras_vit.vit_ti16(weights="imagenet")
    with pytest.raises(FileNotFoundError, match="there is none for this variant"):
        keras_vit.vit_gigantic14(weights="imagenet")


@pytest.mark.parametrize("source", [None, 3, b"..", "", ["a"]])
def test_fetch_and_its_callers_name_the_argument_that_is_no_path(source):
    for function in (fetch_weights, keras_vit.from_pretrained):
        with pytest.raises(ValueError, match="source must be a path, a known name") as error:
            function(source)
        assert str(error.value).endswith(f"Received: source={source!r}")
    with pytest.raises(ValueError, match="path must be a path: a str or an os.PathLike. Received"):
        keras_vit.runtime.open(source)
    with pytest.raises(ValueError, match="path must be a path: "):
        inspect(source)
    if source is not None:
        with pytest.raises(ValueError, match="weights must be a path: "):
            keras_vit.vit_b16(weights=source)


def test_fetch_missing_path_guesses_nothing_far():
    with pytest.raises(FileNotFoundError) as error:
        fetch_weights("/no/such/weights.npz")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    ["", "ftp://host/a.npz", "http://example.org/a.npz", "file:///etc/passwd", "https:///a.npz",
     "hf://", "hf://name", "hf://datasets/a/b", "hf://a/b/../c", "https://host/"],
)  # fmt: skip
def test_fetch_refuses_other_sources(source):
    with pytest.raises(ValueError, match="source must") as error:
        fetch_weights(source)
    assert "Received" in str(error.value)


def test_fetch_refuses_pickles_before_they_come(server):
    with pytest.raises(ValueError, match="can run arbitrary code.*weights_only=True"):
        fetch_weights(f"{server.url}/a/model.pth")
    with pytest.raises(ValueError, match="get_model.'vit_b_16', weights='IMAGENET1K_V1'"):
        fetch_weights("vit_b16.torchvision_in1k_v1")
    assert not server.requests


# -- addresses


def test_fetch_address_once(server, tmp_path):
    first = fetch_weights(f"{server.url}/a/model.npz")
    assert first.read_bytes() == DATA
    assert first.name == "model.npz" and tmp_path / "keras" in first.parents
    assert fetch_weights(f"{server.url}/a/model.npz") == first
    assert len(server.requests) == 1
    server.files["/b/model.npz"] = File(b"other")  # the same name at another address
    assert fetch_weights(f"{server.url}/b/model.npz").read_bytes() == b"other"
    assert first.read_bytes() == DATA
    elsewhere = fetch_weights(f"{server.url}/a/model.npz", cache_dir=tmp_path / "else")
    assert tmp_path / "else" in elsewhere.parents


def test_fetch_address_goes_on_after_a_cut(server):
    server.files["/a/model.npz"].cut = [20_000, 5_000]
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz") == [None, "bytes=20000-", "bytes=25000-"]


def test_fetch_address_without_ranges_starts_again(server):
    server.files["/a/model.npz"].ranges = False
    server.files["/a/model.npz"].cut = [20_000]
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA


def test_fetch_address_distrusts_another_part(server):
    server.files["/a/model.npz"].shift = 10
    server.files["/a/model.npz"].cut = [20_000]
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz") == [None, "bytes=20000-", None]


def test_fetch_address_keeps_a_part_for_the_next_call(server, tmp_path):
    server.files["/a/model.npz"].cut = [20_000, 0, 0, 0, 0]
    with pytest.raises(ConnectionError, match="20000 bytes are kept: call again"):
        fetch_weights(f"{server.url}/a/model.npz")
    (part,) = left(tmp_path / "keras")
    assert part.endswith(".part")  # nothing under the final name
    server.files["/a/model.npz"].cut = []
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert server.ranges("/a/model.npz")[-1] == "bytes=20000-"
    assert left(tmp_path / "keras") == ["model.npz"]


def test_fetch_address_takes_a_whole_part(server, tmp_path):
    """The file of a process that was killed before the rename."""
    server.files["/a/model.npz"].cut = [20_000, 0]
    with pytest.raises(ConnectionError):
        fetch_weights(f"{server.url}/a/model.npz")
    next((tmp_path / "keras").rglob("*.part")).write_bytes(DATA)
    before = len(server.requests)
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA
    assert len(server.requests) == before


@pytest.mark.parametrize("other", [DATA[::-1], DATA + b"more", DATA[:100]])
def test_fetch_address_never_joins_two_versions(server, tmp_path, other):
    server.files["/a/model.npz"].cut = [20_000, 0]
    with pytest.raises(ConnectionError):
        fetch_weights(f"{server.url}/a/model.npz")
    server.files["/a/model.npz"] = File(other, etag='"2"')
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == other
    assert left(tmp_path / "keras") == ["model.npz"]


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_fetch_address_does_not_resume_without_a_version(server, tmp_path, etag):
    server.files["/a/model.npz"].etag = etag
    server.files["/a/model.npz"].cut = [20_000] * 9
    with pytest.raises(ConnectionError, match="ended after"):
        fetch_weights(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert set(server.ranges("/a/model.npz")) == {None}
    server.files["/a/model.npz"].cut = []
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA


def test_fetch_address_checks_the_hash(server, tmp_path):
    url = f"{server.url}/a/model.npz"
    with pytest.raises(ValueError, match=f"sha256 must be {'0' * 64}. Received: sha256={SHA256}"):
        fetch_weights(f"{url}#sha256={'0' * 64}")
    assert left(tmp_path / "keras") == []
    path = fetch_weights(f"{url}#sha256={SHA256.upper()}")
    path.write_bytes(b"altered in the cache")
    assert fetch_weights(url).read_bytes() == b"altered in the cache"  # nobody asked
    assert fetch_weights(f"{url}#sha256={SHA256}").read_bytes() == DATA
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        fetch_weights(f"{url}#sha256=12ab")


def test_fetch_address_of_a_longer_file(server, tmp_path):
    """HTTP ends at the stated length, so only a hash shows that bytes are missing."""
    server.files["/a/model.npz"].length = 40_000
    with pytest.raises(ValueError, match="sha256 must be"):
        fetch_weights(f"{server.url}/a/model.npz#sha256={SHA256}")
    assert left(tmp_path / "keras") == []
    assert fetch_weights(f"{server.url}/a/model.npz").read_bytes() == DATA[:40_000]


def test_fetch_address_of_unknown_length(server, tmp_path):
    server.files["/a/model.npz"].length = -1
    with pytest.raises(ConnectionError, match="does not state the file"):
        fetch_weights(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert fetch_weights(f"{server.url}/a/model.npz#sha256={SHA256}").read_bytes() == DATA


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
        fetch_weights(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"Content-Type": "text/html; charset=utf-8"}, "a web page was sent"),
        ({"Content-Encoding": "gzip"}, "a gzip stream was sent"),
    ],
)
def test_fetch_address_refuses_what_is_not_the_file(server, tmp_path, headers, said):
    server.files["/a/model.npz"].headers = headers
    with pytest.raises(ConnectionError, match=said):
        fetch_weights(f"{server.url}/a/model.npz")
    assert left(tmp_path / "keras") == []


def test_fetch_address_at_the_same_time_comes_once(server):
    server.files["/a/model.npz"].pause, server.files["/a/model.npz"].piece = 0.02, 5000
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch_weights, [f"{server.url}/a/model.npz"] * 3))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == DATA
    assert len(server.requests) == 1


def test_fetch_address_follows_only_safe_redirects(server, tmp_path):
    location = {"Location": f"http://localhost:{server.port}/a/model.npz"}
    server.files["/moved.npz"] = File(b"", status=302, headers=location)
    assert fetch_weights(f"{server.url}/moved.npz").read_bytes() == DATA
    server.files["/away.npz"] = File(b"", status=302, headers={"Location": "http://example.org/a"})
    with pytest.raises(ValueError, match="must be an https:// URL"):
        fetch_weights(f"{server.url}/away.npz")


def test_fetch_address_nobody_there(tmp_path):
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="refused.*Check the network"):
        fetch_weights(f"http://127.0.0.1:{closed_port()}/model.npz")
    assert time.monotonic() - start < 3
    assert left(tmp_path) == []


def test_fetch_address_silent_server(server, monkeypatch):
    monkeypatch.setattr(network, "TIMEOUT", 0.3)
    server.files["/a/model.npz"].silent = True
    with pytest.raises(ConnectionError, match="no answer within 0.3 seconds"):
        fetch_weights(f"{server.url}/a/model.npz")


def test_fetch_address_without_room(server, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(https.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=f"it needs {len(DATA)} bytes, .* has 1000 free"):
        fetch_weights(f"{server.url}/a/model.npz")
    assert left(tmp_path) == []


def test_fetch_address_offline(server, monkeypatch):
    path = fetch_weights(f"{server.url}/a/model.npz")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_weights(f"{server.url}/a/model.npz") == path
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
        fetch_weights(f"{server.url}/b/model.npz")
    assert len(server.requests) == 1


def test_fetch_address_into_a_file(server, tmp_path):
    (tmp_path / "keras").write_text("in the way")
    with pytest.raises(OSError, match="cache_dir must be a writable folder"):
        fetch_weights(f"{server.url}/a/model.npz")


def test_fetch_address_killed_goes_on(server, tmp_path):
    """SIGKILL during a download: nothing under the final name, and no byte is sent twice."""
    server.files["/a/model.npz"].pause, server.files["/a/model.npz"].piece = 0.02, 1000
    url = f"{server.url}/a/model.npz"
    # Only the subpackage: importing Keras would take longer than the test.
    code = (
        "import sys, types; sys.modules['keras_vit'] = p = types.ModuleType('keras_vit'); "
        f"p.__path__ = [{str(ROOT / 'keras_vit')!r}]; "
        f"from keras_vit.weights.fetch.https import download; download({url!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not any(p.stat().st_size > 9000 for p in (tmp_path / "keras").rglob("*.part")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not https.cached_path(url).exists()
    server.files["/a/model.npz"].pause = 0
    assert fetch_weights(url).read_bytes() == DATA
    first, second = server.ranges("/a/model.npz")
    assert first is None and int(second[6:-1]) > 9000

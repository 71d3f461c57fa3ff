"""Fetching with the real Hub client, from a local Hub that also fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import COMMIT, DATA, REPO, ROOT, SHA256, closed_port, left

from keras_vit.weights.fetch import fetch_weights, known, network

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("quick_downloads")]


def test_fetch_repository_takes_only_what_is_needed(hub, tmp_path):
    extra = {
        "pytorch_model.bin": b"p",
        "tf_model.h5": b"t",
        "README.md": b"r",
        "sub/config.json": b"{}",
    }
    hub.put("org/vit", REPO | extra)
    folder = fetch_weights("hf://org/vit")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == REPO
    assert tmp_path / "hub" in folder.parents
    before = len(hub.requests)
    assert fetch_weights("hf://org/vit") == folder
    assert len(hub.requests) == before + 1  # it asks for the commit, and fetches nothing
    assert fetch_weights(f"hf://org/vit@{COMMIT}") == folder
    assert len(hub.requests) == before + 1  # a commit never changes


def test_fetch_repository_with_shards(hub):
    files = {
        "config.json": b"{}",
        "processor_config.json": b"{}",
        "model-00001-of-00002.safetensors": DATA,
        "model-00002-of-00002.safetensors": DATA[:99],
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        ).encode(),
        "other.safetensors": b"o",
    }
    hub.put("org/big", files)
    folder = fetch_weights("hf://org/big")
    del files["other.safetensors"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def test_fetch_repository_file_folder_and_revision(hub, tmp_path):
    hub.put("org/vit", {"a/x.npz": DATA, "b/model.safetensors": b"w", "b/config.json": b"{}"}, "v2")
    with pytest.raises(FileNotFoundError, match="the Hub has no org/vit"):
        fetch_weights("hf://org/vit/a/x.npz")
    file = fetch_weights("hf://org/vit@v2/a/x.npz")
    assert file.read_bytes() == DATA and file.parts[-2:] == ("a", "x.npz")
    folder = fetch_weights("hf://org/vit/b", revision="v2")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert fetch_weights("hf://org/vit/b/model.safetensors", revision="v2").parent == folder
    with pytest.raises(FileNotFoundError, match="no such file.*a/x.npz"):
        fetch_weights("hf://org/vit@v2/c")
    with pytest.raises(ValueError, match="revision must be the one"):
        fetch_weights("hf://org/vit@v2", revision="v3")


def test_fetch_known_name(hub):
    hub.put("timm/vit_base_patch16_224.augreg_in21k", REPO)
    folder = fetch_weights("vit_b16.augreg_in21k")
    assert (folder / "model.safetensors").read_bytes() == DATA
    assert fetch_weights("vit_base_patch16_224.augreg_in21k") == folder  # timm's name for it
    assert known.KNOWN["vit_b16.augreg_in21k"].source.startswith("hf://timm/")


@pytest.mark.parametrize(
    ("files", "kind", "said"),
    [
        ({"pytorch_model.bin": b"p", "config.json": b"{}"}, ValueError,
         "can run arbitrary code.*hf download org/vit .*pytorch_model.bin.*weights_only=True"),
        ({"B_16.npz": b"n", "README.md": b"r"}, FileNotFoundError, "hf://org/vit/B_16.npz"),
        ({"tf_model.h5": b"t"}, FileNotFoundError, "no model.safetensors. It has tf_model.h5"),
    ],
)  # fmt: skip
def test_fetch_repository_without_safetensors(hub, files, kind, said):
    hub.put("org/vit", files)
    with pytest.raises(kind, match=said):
        fetch_weights("hf://org/vit")
    assert len(hub.requests) == 1


def test_fetch_repository_refuses_a_pickle_by_name(hub):
    hub.put("org/vit", REPO | {"a.pth": b"p"})
    with pytest.raises(ValueError, match="can run arbitrary code"):
        fetch_weights("hf://org/vit/a.pth")


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "RepoNotFound", FileNotFoundError, "the Hub has no org/vit"),
        (404, "RevisionNotFound", FileNotFoundError, "no revision 'main'"),
        (403, "GatedRepo", PermissionError, "Accept its terms at https://huggingface.co/org/vit"),
        (401, "", PermissionError, "log in"),
        (500, "", ConnectionError, "answered 500"),
    ],
)
def test_fetch_repository_refused(hub, tmp_path, status, code, kind, said):
    hub.refuse("org/vit", status, code)
    with pytest.raises(kind, match=said) as error:
        fetch_weights("hf://org/vit")
    assert str(error.value).startswith("Cannot fetch hf://org/vit: ")
    assert left(tmp_path / "hub") == []


def test_fetch_repository_file_gone(hub):
    hub.put("org/vit", REPO)
    del hub.files["/org/vit/resolve/main/model.safetensors"]
    with pytest.raises(
        FileNotFoundError, match="hf://org/vit/model.safetensors: it does not exist"
    ):
        fetch_weights("hf://org/vit")


def test_fetch_repository_changed_in_between(hub):
    hub.put("org/vit", REPO)
    hub.files["/org/vit/resolve/main/model.safetensors"].headers["X-Repo-Commit"] = "d" * 40
    with pytest.raises(ConnectionError, match="changed during the download"):
        fetch_weights("hf://org/vit")


def test_fetch_repository_checks_the_hash(hub, tmp_path):
    """The same size, other bytes: huggingface_hub accepts them, we do not."""
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].data = DATA[::-1]
    with pytest.raises(ValueError, match=f"sha256 must be {SHA256}.*deleted"):
        fetch_weights("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")
    assert SHA256 not in left(tmp_path / "hub")
    hub.files["/cdn/org/vit/model.safetensors"].data = DATA
    assert (fetch_weights("hf://org/vit") / "model.safetensors").read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA + b"longer", DATA[:-1]])
def test_fetch_repository_checks_the_size(hub, tmp_path, data):
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].data = data
    with pytest.raises(ConnectionError, match="size"):
        fetch_weights("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")


def test_fetch_repository_goes_on_after_a_cut(hub):
    big = DATA * 300  # more than the client takes at once
    hub.put("org/vit", REPO | {"model.safetensors": big})
    hub.files["/cdn/org/vit/model.safetensors"].cut = [12_000_000]
    assert (fetch_weights("hf://org/vit") / "model.safetensors").read_bytes() == big
    first, second = hub.ranges("/cdn/org/vit/model.safetensors")
    assert first is None and second.startswith("bytes=1")


def test_fetch_repository_killed_transfer(hub, tmp_path):
    hub.put("org/vit", REPO)
    hub.files["/cdn/org/vit/model.safetensors"].cut = [20_000] * 99
    with pytest.raises(ConnectionError, match="Cannot fetch hf://org/vit/model.safetensors"):
        fetch_weights("hf://org/vit")
    assert "model.safetensors" not in left(tmp_path / "hub")
    assert not any(name.endswith(".incomplete") for name in left(tmp_path / "hub"))
    hub.files["/cdn/org/vit/model.safetensors"].cut = []
    assert (fetch_weights("hf://org/vit") / "model.safetensors").read_bytes() == DATA


def test_fetch_repository_nobody_there(hub, monkeypatch, tmp_path):
    from huggingface_hub import constants

    hub.put("org/vit", REPO)
    folder = fetch_weights("hf://org/vit")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert fetch_weights("hf://org/vit") == folder  # from the cache
    with pytest.raises(ConnectionError, match="Cannot fetch hf://org/other: .*Check the network"):
        fetch_weights("hf://org/other")


def test_fetch_repository_silent_hub(hub, monkeypatch):
    monkeypatch.setattr(network, "TIMEOUT", 0.3)
    hub.put("org/vit", REPO)
    hub.files["/api/models/org/vit/revision/main"].silent = True
    with pytest.raises(ConnectionError, match="timed out"):
        fetch_weights("hf://org/vit")


def test_fetch_repository_offline(hub, monkeypatch, caplog):
    shard = "model-00001-of-00001.safetensors"
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    hub.put("org/vit", REPO)
    hub.put("org/big", {shard: DATA, "model.safetensors.index.json": index})
    folder, big = fetch_weights("hf://org/vit"), fetch_weights("hf://org/big")
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_weights("hf://org/vit") == folder
    assert fetch_weights("hf://org/vit/config.json") == folder / "config.json"
    assert fetch_weights("hf://org/big") == big
    (big / shard).unlink()
    (folder / "config.json").unlink()
    assert fetch_weights("hf://org/vit") == folder
    assert "no config.json" in caplog.text
    for missing in ("hf://org/big", "hf://org/other", "hf://org/vit/a.npz", "hf://org/vit@v2"):
        with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
            fetch_weights(missing)
    assert len(hub.requests) == before


def test_fetch_repository_reads_the_environment(hub, tmp_path):
    """HF_ENDPOINT and HF_HOME from the environment, in a separate process."""
    hub.put("org/vit", REPO)
    code = (
        "import sys, types; sys.modules['keras_vit'] = p = types.ModuleType('keras_vit'); "
        f"p.__path__ = [{str(ROOT / 'keras_vit')!r}]; "
        "from keras_vit.weights.fetch import fetch_weights; print(fetch_weights('hf://org/vit'))"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(run.stdout.strip())
    assert tmp_path / "home" in folder.parents
    assert (folder / "model.safetensors").read_bytes() == DATA

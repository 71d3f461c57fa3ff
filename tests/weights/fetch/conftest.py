"""Fixtures: servers with faults, and quick retries."""

import time
from types import SimpleNamespace

import pytest
from loopback import DATA, File, Hub, Server, running

from keras_vit.weights.fetch import https


@pytest.fixture
def quick_downloads(monkeypatch, tmp_path):
    """No pause between attempts, temporary caches, and the network allowed."""
    monkeypatch.setattr(https, "PAUSE", 0.0)
    monkeypatch.setattr(https, "CHUNK", 4096)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def server():
    with running(Server()) as server:
        server.files["/a/model.npz"] = File(DATA)
        yield server


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local Hub that huggingface_hub uses, with the settings that HF_ENDPOINT makes on import."""
    from huggingface_hub import constants

    with running(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        time_without_pauses = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.file_download.time", time_without_pauses)
        yield hub

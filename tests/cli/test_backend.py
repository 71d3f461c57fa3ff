"""The backend that the command chooses before it imports Keras."""

import json
import os
import subprocess
import sys

import pytest

from keras_vit_cli import backend

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize(
    ("installed", "chosen", "settings", "prefer", "expected"),
    [
        (("tensorflow", "jax"), None, None, None, None),  # Keras' own default
        (("jax", "torch"), None, None, None, "jax"),
        (("torch",), None, None, None, "torch"),
        (("torch",), "jax", None, "torch", "jax"),  # the user's choice is kept
        (("tensorflow", "jax"), None, "jax", None, None),
        (("tensorflow",), None, "jax", None, "tensorflow"),
        (("tensorflow", "jax"), None, "jax", "tensorflow", "tensorflow"),
        (("jax",), None, "jax", "tensorflow", None),
    ],
)
def test_chosen_backend_is_installed(
    monkeypatch, tmp_path, caplog, installed, chosen, settings, prefer, expected
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", chosen or "")
    if settings:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": settings}))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name in installed or None)
    backend.choose(prefer)
    assert (os.environ["KERAS_BACKEND"] or None) == expected
    assert bool(caplog.messages) == (expected not in (None, chosen, prefer))


def test_missing_backend_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'keras3-vit\[jax\]'"):
        backend.choose()


def test_missing_tensorflow_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'keras3-vit\[train\]'"):
        backend.load_library(datasets=True)


GREETED = """
import os, sys
from keras_vit_cli.backend import without_greetings
try:
    with without_greetings():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called ...\\n")
        os.write(2, b"I0000 00:00:1795125245.191166   29780 port.cc:153] oneDNN is on\\n")
        os.write(2, b"a warning of another library\\n")
        print("of Python", file=sys.stderr)
        raise ValueError("an error")
finally:
    print("after", file=sys.stderr)
"""


def test_greetings_are_hidden_and_nothing_else():
    done = subprocess.run([sys.executable, "-c", GREETED], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[:3] == ["a warning of another library", "of Python", "after"]
    assert lines[-1] == "ValueError: an error" and "absl" not in done.stderr

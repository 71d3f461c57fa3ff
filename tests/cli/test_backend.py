"""The backend that the command chooses before it imports Keras."""

import json
import os

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

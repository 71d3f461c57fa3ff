"""Chooses the backend of Keras, then imports `keras_vit`."""

import importlib
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")

log = logging.getLogger("keras_vit")


def load_library(prefer: str | None = None) -> Any:
    """Imports `keras_vit`, and with it Keras, on a backend that is installed.

    Args:
        prefer: The backend to use if it is installed and KERAS_BACKEND is not set.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings
    choose(prefer)
    return importlib.import_module("keras_vit")


def choose(prefer: str | None = None) -> None:
    """Sets KERAS_BACKEND if Keras would otherwise take a backend that is not installed.

    Must be called before Keras is imported. If KERAS_BACKEND is set, it is kept.

    Args:
        prefer: The backend to use, if it is installed, instead of the one in Keras' settings.
    """
    if os.environ.get("KERAS_BACKEND"):
        return
    found = [name for name in BACKENDS if importlib.util.find_spec(name)]
    if not found:
        commands = " or ".join(f"pip install 'keras3-vit[{name}]'" for name in BACKENDS)
        raise ModuleNotFoundError(f"A backend of Keras must be installed: {commands}")
    if prefer in found:
        os.environ["KERAS_BACKEND"] = prefer
        return
    configured = _configured()
    if configured not in found:
        log.warning("%s is not installed and KERAS_BACKEND not set: using %s", configured, found[0])
        os.environ["KERAS_BACKEND"] = found[0]


def _configured() -> str:
    """The backend in Keras' settings file, which Keras uses if KERAS_BACKEND is not set."""
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    try:
        settings = json.loads(Path(home, "keras.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras ignores a broken file, too
        settings = {}
    return settings.get("backend", "tensorflow")

"""Which backend the command line runs on where its user has not said."""

import importlib.util
import json
import logging
import os
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")

log = logging.getLogger("keras_vit")


def choose() -> None:
    """Sets KERAS_BACKEND if the backend that Keras would take is not installed and another is.

    To be called before Keras is imported; what the user has chosen stays.
    """
    if os.environ.get("KERAS_BACKEND"):
        return
    wanted = _configured()
    found = [name for name in BACKENDS if importlib.util.find_spec(name)]
    if not found:
        commands = " or ".join(f"pip install 'keras3-vit[{name}]'" for name in BACKENDS)
        raise ModuleNotFoundError(f"A backend of Keras must be installed: {commands}")
    if wanted not in found:
        log.warning("%s is not installed and KERAS_BACKEND not set: using %s", wanted, found[0])
        os.environ["KERAS_BACKEND"] = found[0]


def _configured() -> str:
    """The backend of Keras' own settings, which hold where KERAS_BACKEND is not set."""
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    try:
        settings = json.loads(Path(home, "keras.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras goes on without them, too
        settings = {}
    return settings.get("backend", "tensorflow")

"""Chooses the backend of Keras, then imports `keras_vit`."""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")

GREETINGS = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|[IWE]\d{4} \d+:\d+:\d+\.\d+ |"
    rb"To enable the following instructions:"
)
"""What TensorFlow prints when it is imported."""

log = logging.getLogger("keras_vit")


def load_library(
    prefer: str | None = None, *, tensorflow: bool = False, datasets: bool = False
) -> Any:
    """Imports `keras_vit`, and with it Keras, on a backend that is installed.

    Args:
        prefer: The backend to use if it is installed and KERAS_BACKEND is not set.
        tensorflow: Whether the command uses TensorFlow, if it is installed, on another backend too.
            It is then imported here, where its greetings are hidden.
        datasets: Whether the command reads training and test images, which needs TensorFlow.
    """
    if datasets and not importlib.util.find_spec("tensorflow"):
        raise ModuleNotFoundError(
            "tensorflow must be installed to read training and test images, whatever the backend: "
            "pip install 'keras3-vit[train]'"
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # raised errors tell as much
    choose(prefer)
    with without_greetings():
        library = importlib.import_module("keras_vit")
        if datasets or (tensorflow and importlib.util.find_spec("tensorflow")):
            importlib.import_module("tensorflow")
            # TensorFlow Datasets warns about its own use of old names.
            logging.getLogger("absl").setLevel(logging.ERROR)
    return library


@contextlib.contextmanager
def without_greetings() -> Iterator[None]:
    """Hides what TensorFlow's C++ prints on stderr while it is imported.

    TF_CPP_MIN_LOG_LEVEL is read only after these lines are printed. Everything else on stderr
    appears when the block ends, also if it raises.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
                file.seek(0)
                os.write(2, b"".join(line for line in file if not GREETINGS.match(line)))
    finally:
        os.close(kept)


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

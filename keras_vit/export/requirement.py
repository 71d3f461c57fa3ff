"""What an export needs beside Keras. It imports nothing: the command asks before it loads Keras."""

import importlib.util


def check_tensorflow() -> None:
    """Raises where TensorFlow is not installed, without importing it."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "tensorflow must be installed to export, whatever the backend: "
            "pip install 'keras3-vit[export]'"
        )

"""What an export needs besides Keras, for the command to check before it imports Keras."""

import importlib.util


def check_tensorflow() -> None:
    """Raises `ImportError` if TensorFlow is not installed, without importing it."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "tensorflow must be installed to export, whatever the backend: "
            "pip install 'keras3-vit[export]'"
        )

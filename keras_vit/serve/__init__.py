"""A server of models with TensorFlow Serving's REST API, for any model that `runtime` opens.

The command is `keras-vit serve`. It needs `pip install 'keras3-vit[serve]'`.
"""

from keras_vit.serve.batching import Limits
from keras_vit.serve.server import Server, Settings

__all__ = ["Limits", "Server", "Settings"]

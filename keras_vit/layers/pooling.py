"""From tokens to one vector per image: the pooling of Eq. 4."""

import keras
from keras import ops

MODES = ("token", "mean", "mean_all")


@keras.saving.register_keras_serializable("keras_vit")
class Pooling(keras.layers.Layer):
    """Returns the first token, or the mean of tokens.

    Shapes: B batch, T tokens, D width.

    `y = z_L^0` ("token"), the mean of the patch tokens ("mean"), or the mean of all tokens
    ("mean_all"). Means are computed in at least float32.

    Args:
        mode: "token", "mean" or "mean_all".
        num_prefix_tokens: Tokens before the patches, which "mean" ignores.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.

    Returns:
        `(B, D)`.

    Reference:
        arXiv 2010.11929, Eq. 4 and Appendix D.3.

    Example:

    >>> Pooling("mean", num_prefix_tokens=1)(keras.ops.ones((2, 5, 8))).shape
    (2, 8)
    """

    def __init__(self, mode="token", num_prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}. Received: mode={mode!r}")
        self.mode = mode
        self.num_prefix_tokens = num_prefix_tokens

    def call(self, x):
        if self.mode == "token":
            return x[:, 0]  # (B, D)
        if self.mode == "mean":
            x = x[:, self.num_prefix_tokens :]  # (B, N, D)
        exact = keras.backend.result_type(x.dtype, "float32")
        return ops.cast(ops.mean(ops.cast(x, exact), axis=1), x.dtype)  # (B, D)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "mode": self.mode,
            "num_prefix_tokens": self.num_prefix_tokens,
        }

"""From tokens to one vector per image: the pooling of Eq. 4."""

import keras
from keras import ops

MODES = ("token", "token_pair", "token_mean", "mean", "mean_all")


@keras.saving.register_keras_serializable("keras_vit")
class Pooling(keras.layers.Layer):
    """Returns the first tokens, or the mean of tokens.

    Shapes: B batch, T tokens, D width.

    `y = z_L^0` ("token"), `y = [z_L^0, z_L^1]` ("token_pair"), `y = [z_L^0, mean of the patches]`
    ("token_mean"), the mean of the patch tokens ("mean"), or the mean of all tokens ("mean_all").
    Means are computed in at least float32. With `TokenMerging`, each token counts as many times in
    them as its size.

    Args:
        mode: "token", "token_pair", "token_mean", "mean" or "mean_all".
        num_prefix_tokens: Tokens before the patches, which are not part of their mean.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.
        token_sizes: How many patches each token stands for, ints `(B, T)`: its weight in means.
            None means one.

    Returns:
        `(B, D)`, or `(B, 2 D)` for "token_pair" and "token_mean".

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

    def call(self, x, token_sizes=None):
        if self.mode == "token":
            return x[:, 0]  # (B, D)
        if self.mode == "token_pair":
            return ops.concatenate([x[:, 0], x[:, 1]], axis=-1)  # (B, 2 D)
        start = 0 if self.mode == "mean_all" else self.num_prefix_tokens
        exact = keras.backend.result_type(x.dtype, "float32")
        z = ops.cast(x[:, start:], exact)  # (B, N, D)
        if token_sizes is None:
            z = ops.mean(z, axis=1)  # (B, D)
        else:
            weights = ops.cast(token_sizes[:, start:], exact)[:, :, None]  # (B, N, 1)
            z = ops.divide(ops.sum(z * weights, axis=1), ops.sum(weights, axis=1))  # (B, D)
        z = ops.cast(z, x.dtype)
        if self.mode == "token_mean":
            return ops.concatenate([x[:, 0], z], axis=-1)  # (B, 2 D)
        return z

    def compute_output_spec(self, x, token_sizes=None):
        batch, _, width = x.shape
        shape = (batch, 2 * width if self.mode in ("token_pair", "token_mean") else width)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "mode": self.mode,
            "num_prefix_tokens": self.num_prefix_tokens,
        }

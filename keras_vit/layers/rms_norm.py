"""RMSNorm: a LayerNorm that neither centers nor shifts."""

import keras
from keras import ops

from keras_vit.layers.layer_norm import LayerNormalization


@keras.saving.register_keras_serializable("keras_vit")
class RMSNormalization(keras.layers.Layer):
    """Divides each token by its root mean square.

    Shapes: B batch, T tokens, D width.

    `x / sqrt(mean(x^2) + epsilon) * gamma`, in at least float32.

    Args:
        epsilon: Added to the mean square.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(B, T, D)`.

    Returns:
        `(B, T, D)`.

    Reference:
        arXiv 1910.07467, Eq. 4.

    Example:

    >>> RMSNormalization(epsilon=1e-5)(keras.ops.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(self, epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape):
        self.gamma = self.add_weight(name="gamma", shape=(input_shape[-1],), initializer="ones")
        self.built = True

    def call(self, x):
        exact = keras.backend.result_type(x.dtype, "float32")
        z = ops.cast(x, exact)
        square = ops.mean(ops.square(z), axis=-1, keepdims=True)  # (B, T, 1)
        z = ops.multiply(z, ops.rsqrt(ops.add(square, self.epsilon)))
        return ops.cast(ops.multiply(z, ops.cast(self.gamma, exact)), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


NORMS = {"layer": LayerNormalization, "rms": RMSNormalization}
"""The layer of each kind of norm."""


def norm_class(kind):
    """The layer of a kind of norm."""
    if kind not in NORMS:
        known = ", ".join(map(repr, NORMS))
        raise ValueError(f"norm_kind must be one of {known}. Received: norm_kind={kind!r}")
    return NORMS[kind]

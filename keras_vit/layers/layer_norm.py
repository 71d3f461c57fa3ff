"""LayerNorm: Keras' layer, faster to train on TensorFlow."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization`, with fewer passes over the tokens on TensorFlow.

    Shapes: B batch, T tokens, D width.

    `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, in at least float32; `x - mean` is
    computed once. On other backends, whose kernels or compilers fuse it, Keras' code runs.

    Args:
        **kwargs: Arguments of `keras.layers.LayerNormalization`.

    Call arguments:
        inputs: `(B, T, D)`.

    Returns:
        `(B, T, D)`.

    Reference:
        arXiv 1607.06450, Eq. 3.

    Example:

    >>> LayerNormalization(epsilon=1e-6)(keras.ops.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def call(self, inputs):
        plain = self.axis in (-1, len(inputs.shape) - 1, [-1], [len(inputs.shape) - 1])
        if keras.backend.backend() != "tensorflow" or not (plain and self.scale and self.center):
            return super().call(inputs)
        exact = keras.backend.result_type(inputs.dtype, "float32")
        x = ops.cast(inputs, exact)
        x = ops.subtract(x, ops.mean(x, axis=-1, keepdims=True))
        variance = ops.mean(ops.square(x), axis=-1, keepdims=True)
        x = ops.multiply(x, ops.rsqrt(ops.add(variance, self.epsilon)))
        x = ops.add(ops.multiply(x, ops.cast(self.gamma, exact)), ops.cast(self.beta, exact))
        return ops.cast(x, self.compute_dtype)

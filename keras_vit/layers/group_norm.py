"""GroupNorm: Keras' layer, with a variance that keeps its digits."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` of feature maps, centered before it is squared.

    Shapes: B batch, H x W cells, C channels, g groups.

    `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, in at least float32, where an image's
    mean and variance are those of C / g neighboring channels at all cells. Keras computes the
    variance as `E[x^2] - E[x]^2`, which loses digits where the mean is large.

    Args:
        **kwargs: Arguments of `keras.layers.GroupNormalization`.

    Call arguments:
        inputs: `(B, H, W, C)`; inputs with other axes are normalized by Keras' code.

    Returns:
        `(B, H, W, C)`.

    Reference:
        arXiv 1803.08494, Eq. 1 and 7.

    Example:

    >>> GroupNormalization(groups=4)(keras.ops.ones((2, 3, 5, 8))).shape
    (2, 3, 5, 8)
    """

    def call(self, inputs):
        if self.axis != -1 or len(inputs.shape) != 4 or not (self.scale and self.center):
            return super().call(inputs)
        exact = keras.backend.result_type(inputs.dtype, "float32")
        if keras.backend.backend() == "torch" and self.compute_dtype in ("bfloat16", "float16"):
            return self._with_kernel(inputs)
        _, rows, columns, channels = shape = ops.shape(inputs)
        parts = (self.groups, channels // self.groups)
        x = ops.reshape(ops.cast(inputs, exact), (-1, rows * columns, *parts))  # (B, HW, g, C / g)
        x = ops.subtract(x, ops.mean(x, axis=(1, 3), keepdims=True))
        variance = ops.mean(ops.square(x), axis=(1, 3), keepdims=True)  # (B, 1, g, 1)
        gain = ops.multiply(
            ops.rsqrt(ops.add(variance, self.epsilon)),
            ops.reshape(ops.cast(self.gamma, exact), parts),
        )  # (B, 1, g, C / g)
        x = ops.add(ops.multiply(x, gain), ops.reshape(ops.cast(self.beta, exact), parts))
        return ops.cast(ops.reshape(x, (-1, *shape[1:])), self.compute_dtype)  # (B, H, W, C)

    def _with_kernel(self, inputs):
        """The kernel of torch, which sums in float32 and trains about seven times as fast.

        Its variance is Keras', too. What that loses is less than half precision has lost before.
        """
        import torch

        x = ops.transpose(ops.cast(inputs, self.compute_dtype), (0, 3, 1, 2))  # (B, C, H, W)
        # On a CPU the gradient takes the statistics in the dtype of the weights.
        exact = "float32" if x.device.type == "cpu" else x.dtype
        gamma, beta = (ops.cast(weight, exact) for weight in (self.gamma, self.beta))
        x = torch.nn.functional.group_norm(x, self.groups, gamma, beta, self.epsilon)
        return ops.transpose(x, (0, 2, 3, 1))  # (B, H, W, C)

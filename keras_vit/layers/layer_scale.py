"""LayerScale: a learned gain per channel on a residual branch."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class LayerScale(keras.layers.Layer):
    """Multiplies each channel by a learned gain.

    Shapes: B batch, T tokens, D width.

    `z + diag(gamma) f(z)`: deep models train better when their branches start near zero.

    Args:
        initial_value: Initial value of the gains.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(B, T, D)`.

    Returns:
        `(B, T, D)`.

    Reference:
        arXiv 2103.17239, Eq. 4.

    Example:

    >>> LayerScale(0.5)(keras.ops.ones((1, 1, 2)))
    [[[0.5, 0.5]]]
    """

    def __init__(self, initial_value=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.initial_value = initial_value

    def build(self, input_shape):
        self.gamma = self.add_weight(
            name="gamma",
            shape=(input_shape[-1],),
            initializer=keras.initializers.Constant(self.initial_value),
        )
        self.built = True

    def call(self, x):
        return ops.multiply(x, ops.cast(self.gamma, x.dtype))  # (B, T, D)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {**super().get_config(), "initial_value": self.initial_value}

"""The head of a distilled DeiT: two classifiers, whose logits are averaged."""

import keras
from keras import ops

from keras_vit.layers.composite import Composite


@keras.saving.register_keras_serializable("keras_vit")
class DistilledHead(Composite):
    """One linear classifier for the class token, and one for the distillation token.

    Shapes: B batch, D width, K classes.

    y_class = x_class W_1 + b_1
    y_dist  = x_dist W_2 + b_2
    y = (y_class + y_dist) / 2

    In training with a teacher, y_class learns the labels and y_dist what the teacher says.

    Args:
        units: K.
        activation: Activation of y; None returns logits.
        use_bias: Whether the classifiers have a bias.
        kernel_initializer: Initializer of both kernels.
        bias_initializer: Initializer of both biases.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Class and distillation token, one behind the other, `(B, 2 D)`.
        separate: Whether to return [y_class, y_dist] instead of y, without the activation.

    Returns:
        `(B, K)`, or `(B, 2, K)` with `separate=True`. It is one tensor, because Keras' functional
        models expect as many from each call of a layer.

    Reference:
        arXiv 2012.12877, Section 4.

    Example:

    >>> features = model.features()
    >>> logits = model.get_layer("head")(features.output, separate=True)
    >>> both = keras.Model(features.input, logits)
    """

    def __init__(
        self,
        units,
        activation=None,
        use_bias=True,
        kernel_initializer="zeros",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not isinstance(units, int) or units < 1:
            raise ValueError(f"units must be a positive int. Received: units={units!r}")
        self.units = units
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.class_dense = self._dense("class")
        self.distillation_dense = self._dense("distillation")

    def _dense(self, name):
        kernel, bias = (
            initializer.__class__.from_config(initializer.get_config())
            for initializer in (self.kernel_initializer, self.bias_initializer)
        )
        return keras.layers.Dense(
            self.units,
            use_bias=self.use_bias,
            kernel_initializer=kernel,
            bias_initializer=bias,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape):
        if input_shape[-1] % 2:
            raise ValueError(
                "x must hold two tokens on its last axis. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        shape = (*input_shape[:-1], input_shape[-1] // 2)
        self.class_dense.build(shape)
        self.distillation_dense.build(shape)
        self.built = True
        self._restore_trainable()

    def call(self, x, separate=False):
        if separate:
            return ops.stack(self._both(x), axis=-2)  # (B, 2, K)
        return self.activation(self.logits(x))  # (B, K)

    def logits(self, x):
        """Y without the activation, `(B, K)`."""
        return ops.multiply(ops.add(*self._both(x)), 0.5)

    def _both(self, x):
        width = x.shape[-1] // 2
        return self.class_dense(x[..., :width]), self.distillation_dense(x[..., width:])

    def compute_output_spec(self, x, separate=False):
        shape = (*x.shape[:-1], 2, self.units) if separate else (*x.shape[:-1], self.units)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }

"""DINO's projection head."""

from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_int, require


@keras.saving.register_keras_serializable("keras_vit")
class DINOHead(keras.layers.Layer):
    """Projects features onto the prototypes that DINO's student and teacher agree on.

    y = MLP(x) / |MLP(x)|,    logits_k = g_k y . v_k / |v_k|

    The MLP has GELU between its layers and none after the last. Each prototype v_k counts by its
    direction alone; its gain g_k is 1, unless it is trained.

    Shapes: B batch, D width of the features, K prototypes.

    Args:
        num_prototypes: K.
        hidden_dim: Width of the MLP's hidden layers.
        bottleneck_dim: Width of its output.
        num_layers: Layers of the MLP.
        norm_last_layer: Whether every gain stays 1. The authors train the gains of S/16 only.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        features: `(..., D)`.
        frozen: Whether the prototypes get no gradient; a bool or a scalar tensor.

    Returns:
        float32 logits `(..., K)`.

    Reference:
        arXiv 2104.14294, Section 3.1 and Appendix C; weight normalization is arXiv 1602.07868.
    """

    def __init__(
        self,
        num_prototypes: int = 65536,
        *,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
        norm_last_layer: bool = True,
        **kwargs: Any,
    ):
        sizes = (num_prototypes, hidden_dim, bottleneck_dim, num_layers)
        names = ("num_prototypes", "hidden_dim", "bottleneck_dim", "num_layers")
        for name, size in zip(names, sizes, strict=True):
            require(is_int(size) and size > 0, name, "be a positive int", size)
        rule = "be a bool"
        require(isinstance(norm_last_layer, bool), "norm_last_layer", rule, norm_last_layer)
        super().__init__(**kwargs)
        self.num_prototypes, self.hidden_dim, self.bottleneck_dim, self.num_layers = sizes
        self.norm_last_layer = norm_last_layer
        self.mlp = [
            keras.layers.Dense(
                bottleneck_dim if i == num_layers - 1 else hidden_dim,
                kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
                dtype=self.dtype_policy,
                name=f"dense_{i}",
            )
            for i in range(num_layers)
        ]

    def build(self, input_shape):
        shape = tuple(input_shape)
        for dense in self.mlp:
            dense.build(shape)
            shape = (*shape[:-1], dense.units)
        limit = self.bottleneck_dim**-0.5  # that of torch's linear layers
        self.kernel = self.add_weight(
            shape=(self.bottleneck_dim, self.num_prototypes),
            initializer=keras.initializers.RandomUniform(-limit, limit),
            name="kernel",
        )
        self.gain = self.add_weight(
            shape=(self.num_prototypes,),
            initializer="ones",
            trainable=not self.norm_last_layer,
            autocast=False,
            name="gain",
        )
        self.built = True

    def call(self, features, frozen=False):
        x = features  # (..., D)
        for i, dense in enumerate(self.mlp):
            x = ops.gelu(x, approximate=False) if i else x
            x = dense(x)  # (..., bottleneck)
        x = ops.cast(x, self.gain.dtype)
        x = x / _norm(x, axis=-1)
        kernel, gain = ops.convert_to_tensor(self.kernel), ops.convert_to_tensor(self.gain)
        if frozen is not False:
            kernel = ops.where(frozen, ops.stop_gradient(kernel), kernel)
            gain = ops.where(frozen, ops.stop_gradient(gain), gain)
        # The product with v comes before its norm divides: K numbers instead of K columns.
        logits = ops.cast(ops.matmul(ops.cast(x, kernel.dtype), kernel), gain.dtype)
        norms = _norm(ops.cast(kernel, gain.dtype), axis=0)  # (1, K)
        return logits * (gain / ops.squeeze(norms, 0))  # (..., K)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.num_prototypes)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_prototypes": self.num_prototypes,
            "hidden_dim": self.hidden_dim,
            "bottleneck_dim": self.bottleneck_dim,
            "num_layers": self.num_layers,
            "norm_last_layer": self.norm_last_layer,
        }


def _norm(x, axis):
    """The Euclidean norm, at least 1e-12; its gradient at zero is zero."""
    return ops.sqrt(ops.maximum(ops.sum(ops.square(x), axis=axis, keepdims=True), 1e-24))

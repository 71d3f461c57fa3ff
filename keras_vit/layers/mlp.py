"""The MLP of Eq. 3."""

import math

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.rms_norm import norm_class


@keras.saving.register_keras_serializable("keras_vit")
class MLP(Composite):
    """Two Dense layers with a GELU between them, or a gated pair of them, applied to each token.

    Shapes: B batch, T tokens, D width, M hidden size.

    `MLP(z) = GELU(z W_1 + b_1) W_2 + b_2`, or with `kind="swiglu"`
    `MLP(z) = (SiLU(z W_g + b_g) * (z W_1 + b_1)) W_2 + b_2`. With `inner_norm`, a LayerNorm
    precedes W_2. Tokens are flattened to (B * T, D), where TensorFlow fuses bias and GELU into the
    matrix product.

    The gate is initialized as the other two Dense layers are, as in DINOv2. (timm starts it as the
    constant SiLU(1), so that the MLP is linear at first.)

    Args:
        hidden_dim: M, units of the first Dense, and of the gate.
        width: D, units of the second.
        kind: "mlp" or "swiglu".
        gelu: "exact" (erf), "tanh", or "quick" (x sigmoid(1.702 x)). Ignored by "swiglu".
        inner_norm: Whether a LayerNorm is applied to the M hidden values (EVA-02, BEiT-3).
        norm_epsilon: Epsilon of this norm.
        norm_kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        use_bias: Whether the Dense layers have a bias.
        dropout: Dropout rate after each Dense.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(B, T, D)`.
        training: Whether to apply dropout.

    Returns:
        `(B, T, D)`.

    Reference:
        arXiv 2010.11929, Eq. 3; arXiv 2002.05202, Eq. 6.

    Example:

    >>> MLP(hidden_dim=16, width=8)(keras.ops.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    QUICK = 1.702
    """The number in QuickGELU."""

    def __init__(
        self,
        hidden_dim,
        width,
        kind="mlp",
        gelu="exact",
        inner_norm=False,
        norm_epsilon=1e-6,
        norm_kind="layer",
        use_bias=True,
        dropout=0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if kind not in ("mlp", "swiglu"):
            raise ValueError(f"kind must be 'mlp' or 'swiglu'. Received: kind={kind!r}")
        if gelu not in ("exact", "tanh", "quick"):
            raise ValueError(f"gelu must be 'exact', 'tanh' or 'quick'. Received: gelu={gelu!r}")
        self.hidden_dim = hidden_dim
        self.width = width
        self.kind = kind
        self.gelu = gelu
        self.inner_norm = inner_norm
        self.norm_epsilon = norm_epsilon
        self.norm_kind = norm_kind
        self.use_bias = use_bias
        self.dropout = dropout
        if kind == "swiglu":
            self.gate = self._dense(hidden_dim, "gate")
        self.dense_1 = self._dense(hidden_dim, "dense_1")
        if inner_norm:
            self.norm = norm_class(norm_kind)(
                epsilon=norm_epsilon, dtype=self.dtype_policy, name="inner_norm"
            )
        self.dense_2 = self._dense(width, "dense_2")
        self.dropout_1 = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="dropout_1")
        self.dropout_2 = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="dropout_2")

    def _dense(self, units, name):
        return keras.layers.Dense(
            units,
            kernel_initializer="glorot_uniform",
            use_bias=self.use_bias,
            bias_initializer=keras.initializers.RandomNormal(stddev=1e-6),
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape):
        if self.kind == "swiglu":
            self.gate.build((None, input_shape[-1]))
        self.dense_1.build((None, input_shape[-1]))
        if self.inner_norm:
            self.norm.build((None, self.hidden_dim))
        self.dense_2.build((None, self.hidden_dim))
        self.built = True
        self._restore_trainable()

    def call(self, x, training=None):
        shape = ops.shape(x)
        x = ops.reshape(x, (-1, shape[-1]))  # (B * T, D)
        x = self._hidden(x, training)  # (B * T, M)
        x = self.dropout_1(x, training=training)
        x = self.norm(x) if self.inner_norm else x
        x = self.dropout_2(self.dense_2(x), training=training)  # (B * T, D)
        return ops.reshape(x, (-1, *shape[1:-1], self.width))  # (B, T, D)

    def _hidden(self, x, training):
        if self.kind == "swiglu":
            return ops.multiply(ops.silu(self.gate(x)), self.dense_1(x))
        return self._gelu(self.dense_1(x), training)

    def _gelu(self, x, training):
        if self.gelu == "quick":
            return ops.multiply(x, ops.sigmoid(ops.multiply(x, self.QUICK)))
        # In training TensorFlow does not fuse the GELU, and its exact GELU is slow.
        if training and self.gelu == "exact" and keras.backend.backend() == "tensorflow":
            exact = keras.backend.result_type(x.dtype, "float32")
            z = ops.cast(x, exact)
            return ops.cast(0.5 * z * (1 + ops.erf(z * math.sqrt(0.5))), x.dtype)
        return keras.activations.gelu(x, approximate=self.gelu == "tanh")

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.width)

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "width": self.width,
            "kind": self.kind,
            "gelu": self.gelu,
            "inner_norm": self.inner_norm,
            "norm_epsilon": self.norm_epsilon,
            "norm_kind": self.norm_kind,
            "use_bias": self.use_bias,
            "dropout": self.dropout,
        }

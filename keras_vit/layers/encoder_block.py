"""One block of the Transformer encoder: Eq. 2 and 3."""

import math

import keras
from keras import ops

from keras_vit.layers.attention import MultiHeadAttention
from keras_vit.layers.composite import Composite
from keras_vit.layers.layer_scale import LayerScale
from keras_vit.layers.mlp import MLP
from keras_vit.layers.rms_norm import norm_class
from keras_vit.layers.token_merging import TokenMerging


@keras.saving.register_keras_serializable("keras_vit")
class EncoderBlock(Composite):
    """Self-attention and an MLP, each with a LayerNorm and a residual connection.

    Shapes: B batch, T tokens, D width, h heads.

    With `block_norm="pre"`, the paper's:

    z' = MSA(LN(z)) + z     (2)
    z  = MLP(LN(z')) + z'   (3)

    With "post", the original Transformer's (arXiv 1706.03762): `z' = LN(z + MSA(z))` and
    `z = LN(z' + MLP(z'))`. With "res_post", Swin v2's (arXiv 2111.09883): `z' = z + LN(MSA(z))` and
    `z = z' + LN(MLP(z'))`.

    Args:
        width: D.
        num_heads: h.
        mlp_dim: Hidden size of the MLP.
        key_dim: Size of a head; None means D / h.
        block_norm: "pre", "post" or "res_post".
        qkv_bias: Whether query, key and value projections have a bias.
        key_bias: Whether the key projection has a bias too, where `qkv_bias` is True.
        qk_norm: Whether to normalize queries and keys.
        rope: Arguments of a `RotaryEmbedding` as a dict, or None.
        relative: Arguments of a `RelativePositions` as a dict, or None.
        score_scale: "fixed" (1 / sqrt(d)) or "learned", one for each head.
        score_diagonal: Whether a token attends to itself too.
        attention_inner_norm: Whether to normalize the concatenated heads.
        mlp: "mlp" or "swiglu", a gated one.
        mlp_inner_norm: Whether a LayerNorm is applied inside the MLP, before its last Dense.
        gelu: "exact", "tanh" or "quick".
        dense_bias: Whether the other Dense layers have a bias: attention's output and the MLP.
        norm_kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        norm_epsilon: Epsilon of the norms.
        layer_scale: Initial value of LayerScale on both branches; None means no LayerScale.
        dropout: Dropout rate after attention and after each Dense of the MLP.
        attention_dropout: Dropout rate of the attention weights.
        drop_path: Probability that an image skips a branch in training.
        token_merging: How many tokens a `TokenMerging` merges between attention and MLP; None means
            that there is none.
        num_prefix_tokens: Tokens in front, which it does not merge.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.
        training: Whether to apply dropout.
        return_attention_scores: Whether to return the attention weights too.
        rope_scale: The factor of a `RotaryRescale`, or None.
        token_sizes: How many patches each token stands for, ints `(B, T)`, or None.

    Returns:
        `(B, T, D)`, and if requested the attention weights `(B, h, T, T)`, whose rows sum to 1.
        With `token_merging=r`, `(B, T - r, D)`, the sizes `(B, T - r)`, and then the weights.

    Reference:
        arXiv 2010.11929, Eq. 2 and 3.

    Example:

    >>> EncoderBlock(width=8, num_heads=2, mlp_dim=16)(keras.ops.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        width,
        num_heads,
        mlp_dim,
        key_dim=None,
        block_norm="pre",
        qkv_bias=True,
        key_bias=True,
        qk_norm=False,
        rope=None,
        attention_inner_norm=False,
        mlp="mlp",
        mlp_inner_norm=False,
        relative=None,
        score_scale="fixed",
        score_diagonal=True,
        gelu="exact",
        dense_bias=True,
        norm_kind="layer",
        norm_epsilon=1e-6,
        layer_scale=None,
        dropout=0.0,
        attention_dropout=0.0,
        drop_path=0.0,
        token_merging=None,
        num_prefix_tokens=0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if key_dim is None and width % num_heads:
            raise ValueError(
                f"num_heads must divide width={width} unless key_dim is given. "
                f"Received: num_heads={num_heads}"
            )
        if block_norm not in ("pre", "post", "res_post"):
            raise ValueError(
                "block_norm must be 'pre', 'post' or 'res_post'. "
                f"Received: block_norm={block_norm!r}"
            )
        self.width = width
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.key_dim = key_dim
        self.block_norm = block_norm
        self.qkv_bias = qkv_bias
        self.key_bias = key_bias
        self.qk_norm = qk_norm
        self.rope = rope
        self.attention_inner_norm = attention_inner_norm
        self.mlp_kind = mlp
        self.mlp_inner_norm = mlp_inner_norm
        self.relative = relative
        self.score_scale = score_scale
        self.score_diagonal = score_diagonal
        self.gelu = gelu
        self.dense_bias = dense_bias
        self.norm_kind = norm_kind
        self.norm_epsilon = norm_epsilon
        self.layer_scale = layer_scale
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.drop_path = drop_path
        self.token_merging = token_merging
        self.num_prefix_tokens = num_prefix_tokens

        head_dim = key_dim or width // num_heads
        # Glorot's limit for the (D, h * d) matrix. Keras would treat the kernel's three axes as
        # those of a convolution, and draw much smaller values.
        limit = math.sqrt(6 / (width + num_heads * head_dim))
        policy = self.dtype_policy
        self.attention_norm = self._norm("attention_norm")
        self.attention = MultiHeadAttention(
            num_heads,
            head_dim,
            qk_norm=qk_norm,
            relative=relative,
            score_scale=score_scale,
            score_diagonal=score_diagonal,
            inner_norm=attention_inner_norm,
            norm_epsilon=norm_epsilon,
            rope=rope,
            norm_kind=norm_kind,
            dropout=attention_dropout,
            kernel_initializer=keras.initializers.RandomUniform(-limit, limit),
            use_bias=qkv_bias,
            key_bias=key_bias,
            output_bias=dense_bias,
            dtype=policy,
            name="attention",
        )
        self.attention_dropout_layer = keras.layers.Dropout(dropout, dtype=policy, name="dropout")
        self.mlp_norm = self._norm("mlp_norm")
        self.mlp = MLP(
            mlp_dim,
            width,
            kind=mlp,
            gelu=gelu,
            inner_norm=mlp_inner_norm,
            norm_epsilon=norm_epsilon,
            norm_kind=norm_kind,
            use_bias=dense_bias,
            dropout=dropout,
            dtype=policy,
            name="mlp",
        )
        self.attention_scale = self._scale("attention_scale")
        self.mlp_scale = self._scale("mlp_scale")
        # A Dropout with one mask entry per image is stochastic depth.
        self.attention_drop_path = self._drop_path("attention_drop_path")
        self.mlp_drop_path = self._drop_path("mlp_drop_path")
        self.merging = None
        if token_merging is not None:
            self.merging = TokenMerging(
                token_merging, num_prefix_tokens, dtype=policy, name="token_merging"
            )
        # The LayerNorms are applied before each branch, after each sum or after each branch.
        self._before, self._after, self._behind = (
            _normed if block_norm == place else _skipped for place in ("pre", "post", "res_post")
        )

    def _norm(self, name):
        cls = norm_class(self.norm_kind)
        return cls(epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name)

    def _scale(self, name):
        if self.layer_scale is None:
            return _unscaled
        return LayerScale(self.layer_scale, dtype=self.dtype_policy, name=name)

    def _drop_path(self, name):
        return keras.layers.Dropout(
            self.drop_path, noise_shape=(None, 1, 1), dtype=self.dtype_policy, name=name
        )

    def build(self, input_shape):
        if input_shape[-1] != self.width:
            raise ValueError(
                f"x must have width={self.width} on its last axis. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        self.attention.build(input_shape, input_shape)
        for layer in (self.attention_norm, self.mlp_norm, self.mlp):
            layer.build(input_shape)
        if self.layer_scale is not None:
            self.attention_scale.build(input_shape)
            self.mlp_scale.build(input_shape)
        self.built = True
        self._restore_trainable()

    def call(
        self,
        x,
        training=None,
        return_attention_scores=False,
        rope_scale=None,
        token_sizes=None,
    ):
        merging = self.merging is not None
        z = self._before(self.attention_norm, x)  # (B, T, D)
        outputs = self.attention(
            z,
            z,
            training=training,
            return_attention_scores=return_attention_scores,
            rope_scale=rope_scale,
            token_sizes=token_sizes,
            return_keys=merging,
        )
        z, *others = outputs if merging or return_attention_scores else (outputs,)
        z = self._behind(self.attention_norm, self.attention_dropout_layer(z, training=training))
        z = self.attention_scale(z)
        x = ops.add(x, self.attention_drop_path(z, training=training))  # Eq. 2
        x = self._after(self.attention_norm, x)
        if merging:
            x, sizes = self.merging(x, others.pop(), sizes=token_sizes)  # (B, T - r, D)
            others.insert(0, sizes)

        z = self.mlp(self._before(self.mlp_norm, x), training=training)  # (B, T, D)
        z = self.mlp_scale(self._behind(self.mlp_norm, z))
        x = ops.add(x, self.mlp_drop_path(z, training=training))  # Eq. 3
        x = self._after(self.mlp_norm, x)
        return (x, *others) if others else x

    def compute_output_spec(
        self,
        x,
        training=None,
        return_attention_scores=False,
        rope_scale=None,
        token_sizes=None,
    ):
        batch, length, _ = x.shape
        outputs = [keras.KerasTensor(x.shape, dtype=self.compute_dtype)]
        if self.merging is not None:
            keys = keras.KerasTensor((batch, length, self.num_heads, None))
            outputs = [*self.merging.compute_output_spec(outputs[0], keys)]
        if return_attention_scores:
            shape = (batch, self.num_heads, length, length)
            outputs.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "key_dim": self.key_dim,
            "block_norm": self.block_norm,
            "qkv_bias": self.qkv_bias,
            "key_bias": self.key_bias,
            "qk_norm": self.qk_norm,
            "rope": self.rope and dict(self.rope),
            "attention_inner_norm": self.attention_inner_norm,
            "mlp": self.mlp_kind,
            "mlp_inner_norm": self.mlp_inner_norm,
            "relative": self.relative and dict(self.relative),
            "score_scale": self.score_scale,
            "score_diagonal": self.score_diagonal,
            "gelu": self.gelu,
            "dense_bias": self.dense_bias,
            "norm_kind": self.norm_kind,
            "norm_epsilon": self.norm_epsilon,
            "layer_scale": self.layer_scale,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "drop_path": self.drop_path,
            "token_merging": self.token_merging,
            "num_prefix_tokens": self.num_prefix_tokens,
        }


def _normed(norm, x):
    return norm(x)


def _skipped(norm, x):
    return x


def _unscaled(z):
    return z

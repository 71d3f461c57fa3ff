"""Attention pooling, the MAP head of SigLIP: from tokens to one vector per image."""

import math

import keras
from keras import ops

from keras_vit.layers.attention import MultiHeadAttention
from keras_vit.layers.composite import Composite
from keras_vit.layers.layer_norm import LayerNormalization
from keras_vit.layers.mlp import MLP


@keras.saving.register_keras_serializable("keras_vit")
class AttentionPooling(Composite):
    """Pools tokens by the attention of a learned query, the probe, and an MLP.

    Shapes: B batch, T tokens, k ignored tokens, D width, h heads.

    z = MHA(probe; x, x)    with the probe as query, the tokens as keys and values
    y = z + MLP(LN(z))

    There is no residual connection around the attention.

    Args:
        width: D.
        num_heads: h, which divides D.
        mlp_dim: Hidden size of the MLP.
        num_ignored_tokens: k, how many of the first tokens are left out.
        gelu: "exact" or "tanh".
        norm_epsilon: Epsilon of the LayerNorm.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.
        training: Whether the layer is called in training.
        return_attention_scores: Whether to return the attention weights too.

    Returns:
        `(B, D)`, and if requested the attention weights `(B, h, T - k)`, which sum to 1.

    Reference:
        arXiv 1810.00825, Eq. 11 (pooling by multi-head attention); arXiv 2106.04560, Section 3.3.

    Example:

    >>> AttentionPooling(width=8, num_heads=2, mlp_dim=16)(keras.ops.ones((2, 5, 8))).shape
    (2, 8)
    """

    def __init__(
        self,
        width,
        num_heads,
        mlp_dim,
        num_ignored_tokens=0,
        gelu="exact",
        norm_epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if width % num_heads:
            raise ValueError(
                f"num_heads must divide width={width}. Received: num_heads={num_heads}"
            )
        self.width = width
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.num_ignored_tokens = num_ignored_tokens
        self.gelu = gelu
        self.norm_epsilon = norm_epsilon
        policy = self.dtype_policy
        limit = math.sqrt(3 / width)  # Glorot's for a (D, D) matrix, as in `EncoderBlock`
        self.attention = MultiHeadAttention(
            num_heads,
            width // num_heads,
            kernel_initializer=keras.initializers.RandomUniform(-limit, limit),
            dtype=policy,
            name="attention",
        )
        self.norm = LayerNormalization(epsilon=norm_epsilon, dtype=policy, name="norm")
        self.mlp = MLP(mlp_dim, width, gelu=gelu, dtype=policy, name="mlp")

    def build(self, input_shape):
        if input_shape[-1] != self.width:
            raise ValueError(
                f"x must have width={self.width} on its last axis. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        query_shape = (input_shape[0], 1, self.width)
        self.probe = self.add_weight(
            name="probe", shape=(1, 1, self.width), initializer="glorot_uniform"
        )
        self.attention.build(query_shape, input_shape)
        self.norm.build(query_shape)
        self.mlp.build(query_shape)
        self.built = True
        self._restore_trainable()

    def call(self, x, training=None, return_attention_scores=False):
        x = x[:, self.num_ignored_tokens :]  # (B, T - k, D)
        probe = ops.broadcast_to(self.probe, (ops.shape(x)[0], 1, self.width))
        probe = ops.cast(probe, self.compute_dtype)  # (B, 1, D)
        z = self.attention(
            probe, x, training=training, return_attention_scores=return_attention_scores
        )  # (B, 1, D)
        z, scores = z if return_attention_scores else (z, None)
        y = ops.add(z, self.mlp(self.norm(z), training=training))[:, 0]  # (B, D)
        return y if scores is None else (y, scores[:, :, 0])

    def compute_output_spec(self, x, training=None, return_attention_scores=False):
        batch, length, _ = x.shape
        pooled = keras.KerasTensor((batch, self.width), dtype=self.compute_dtype)
        if not return_attention_scores:
            return pooled
        left = None if length is None else length - self.num_ignored_tokens
        shape = (batch, self.num_heads, left)
        return pooled, keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "num_ignored_tokens": self.num_ignored_tokens,
            "gelu": self.gelu,
            "norm_epsilon": self.norm_epsilon,
        }

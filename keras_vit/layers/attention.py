"""Multi-head attention, Eq. 5 to 8: Keras' layer with faster products."""

import math

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.layer_norm import LayerNormalization


@keras.saving.register_keras_serializable("keras_vit")
class MultiHeadAttention(Composite, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with faster products, a float32 softmax and q/k norms.

    Shapes: B batch, T tokens, D width, h heads, d key_dim.

    [q, k, v] = z U_qkv                      (5)
    A = softmax(q k^T / sqrt(d))             (6)
    SA(z) = A v                              (7)
    MSA(z) = [SA_1(z); ...; SA_h(z)] U_msa   (8)

    Weights, names, config and sub-layers are those of the Keras layer, so LoRA, int8 quantization,
    sharding maps and `return_attention_scores` work as Keras documents. The differences:

    - Without a mask, tokens are flattened to (B * T, D) and then projected, where backends fuse
      product and bias. Quantized layers, masks and a `key` of its own use Keras' implementation.
    - The softmax is in at least float32, and attention dropout costs nothing outside training.
    - `qk_norm` applies a LayerNorm to each head's queries and keys (arXiv 2302.05442).
    - `output_bias` sets the bias of the output projection alone.

    Args:
        num_heads: h.
        key_dim: d.
        qk_norm: Whether to normalize queries and keys.
        norm_epsilon: Epsilon of these LayerNorms.
        output_bias: Whether the output projection has a bias; None means `use_bias`.
        **kwargs: Arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        Those of `keras.layers.MultiHeadAttention`; `query` and `value` are `(B, T, D)`.

    Returns:
        `(B, T, D)`, and with `return_attention_scores=True` also the weights `(B, h, T, T)`.

    Reference:
        arXiv 2010.11929, Appendix A, Eq. 5-8.

    Example:

    >>> x = keras.ops.ones((2, 5, 8))
    >>> MultiHeadAttention(num_heads=2, key_dim=4)(x, x).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        qk_norm=False,
        norm_epsilon=1e-6,
        output_bias=None,
        **kwargs,
    ):
        super().__init__(num_heads=num_heads, key_dim=key_dim, **kwargs)
        self.output_bias = output_bias
        self.qk_norm = qk_norm
        self.norm_epsilon = norm_epsilon
        if qk_norm:
            self.query_norm = self._norm("query_norm")
            self.key_norm = self._norm("key_norm")

    def _norm(self, name):
        return LayerNormalization(epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name)

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if self.qk_norm:
            self.query_norm.build((None, None, self.num_heads, self.key_dim))
            self.key_norm.build((None, None, self.num_heads, self.key_dim))
        self._restore_trainable()

    def _make_output_dense(self, query_shape, common_kwargs, name=None):
        if self.output_bias is None:
            return super()._make_output_dense(query_shape, common_kwargs, name)
        free = "abc"[: len(query_shape) - 1]  # the axes before the heads
        return keras.layers.EinsumDense(
            f"{free}hd,hdo->{free}o",
            output_shape=(*[None] * (len(free) - 1), query_shape[-1]),
            bias_axes="o" if self.output_bias else None,
            name=name,
            **common_kwargs,
        )

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        masks = (query_mask, value_mask, key_mask, attention_mask)
        if (
            (key is not None and key is not value)
            or any(mask is not None for mask in masks)
            or use_causal_mask
            or not self._is_plain()
            or not len(query.shape) == len(value.shape) == 3
        ):
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        _, length, width = ops.shape(query)
        flat = ops.reshape(query, (-1, width))  # (B * T, D)
        heads = (-1, length, self.num_heads, self.key_dim)
        q = ops.reshape(_product(flat, self.query_dense, 1), heads)  # (B, T, h, d)
        if value is not query:  # cross-attention, where T may differ
            _, tokens, columns = ops.shape(value)
            flat = ops.reshape(value, (-1, columns))  # (B * T, D)
            heads = (-1, tokens, self.num_heads, self.key_dim)
        k = ops.reshape(_product(flat, self.key_dense, 1), heads)  # (B, T, h, d)
        v = ops.reshape(_product(flat, self.value_dense, 1), heads)  # (B, T, h, d)
        x, scores = self._compute_attention(
            q, k, v, training=training, return_attention_scores=return_attention_scores
        )
        x = ops.reshape(x, (-1, self.num_heads * self.key_dim))  # (B * T, h * d)
        x = ops.reshape(_product(x, self.output_dense, 2), (-1, length, width))  # (B, T, D)
        return (x, scores) if return_attention_scores else x

    def _is_plain(self):
        """Whether the layer computes Eq. 5 to 8 from the kernels and biases alone."""
        projections = (self.query_dense, self.key_dense, self.value_dense, self.output_dense)
        return (
            not self._use_gate
            and self._sliding_window is None
            and self._output_shape is None
            and self.value_dim == self.key_dim
            and all(dense.quantization_mode is None for dense in projections)
        )

    def _has_kernel(self, dtype):
        """Whether the backend has a fast attention kernel with a float32 softmax."""
        # TensorFlow has none; JAX has none for float16 on CPU.
        backend = keras.backend.backend()
        float16 = keras.backend.standardize_dtype(dtype) == "float16"
        return backend == "torch" or (backend == "jax" and not float16)

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        **kwargs,
    ):
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        dropped = bool(training) and self.dropout > 0
        if attention_mask is not None or kwargs:
            return super()._compute_attention(
                query,
                key,
                value,
                attention_mask=attention_mask,
                training=training,
                return_attention_scores=return_attention_scores,
                **kwargs,
            )
        if self._has_kernel(query.dtype) and not (dropped or return_attention_scores):
            return ops.dot_product_attention(
                query, key, value, scale=self.key_dim**-0.5, flash_attention=self._flash_attention
            ), None
        q = ops.transpose(ops.multiply(query, self.key_dim**-0.5), (0, 2, 1, 3))  # (B, h, T, d)
        k = ops.transpose(key, (0, 2, 3, 1))  # (B, h, d, T)
        v = ops.transpose(value, (0, 2, 1, 3))  # (B, h, T, d)
        scores = ops.matmul(q, k)  # (B, h, T, T)
        exact = keras.backend.result_type(scores.dtype, "float32")
        scores = ops.softmax(ops.cast(scores, exact), axis=-1)
        scores = ops.cast(scores, query.dtype)
        weights = self._dropout_layer(scores, training=training) if dropped else scores
        x = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))  # (B, T, h, d)
        return x, scores

    def get_config(self):
        return {
            **super().get_config(),
            "qk_norm": self.qk_norm,
            "norm_epsilon": self.norm_epsilon,
            "output_bias": self.output_bias,
        }


def _product(x, dense, split):
    """Computes an EinsumDense as a matrix product.

    The kernel's axes before `split` become rows, the others columns. `dense.kernel` includes the
    LoRA delta.
    """
    rows = math.prod(dense.kernel.shape[:split])
    x = ops.matmul(x, ops.reshape(dense.kernel, (rows, -1)))
    return x if dense.bias is None else ops.add(x, ops.reshape(dense.bias, (-1,)))

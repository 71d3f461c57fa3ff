"""Multi-head attention, Eq. 5 to 8: Keras' layer with faster products."""

import functools
import math

import keras
from keras import ops

from keras_vit.layers.attention_blocks import LONG, attend_in_blocks
from keras_vit.layers.composite import Composite
from keras_vit.layers.relative_positions import RelativePositions
from keras_vit.layers.rms_norm import norm_class
from keras_vit.layers.rotary import RotaryEmbedding

SCORE_SCALES = ("fixed", "learned")
MASKED = -1e30
"""Added to scores that do not count."""
SHORT = 200
"""Tokens up to which torch trains faster on a CPU, in half precision, without its kernel."""


@keras.saving.register_keras_serializable("keras_vit")
class MultiHeadAttention(Composite, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with faster products, a float32 softmax and q/k norms.

    Shapes: B batch, T tokens, D width, h heads, d key_dim.

    [q, k, v] = z U_qkv                      (5)
    A = softmax(q k^T / sqrt(d) + S)         (6)    S: see `RelativePositions`; 0 without
    SA(z) = A v                              (7)
    MSA(z) = [SA_1(z); ...; SA_h(z)] U_msa   (8)

    Weights, names, config and sub-layers are those of the Keras layer, so LoRA, int8 quantization,
    sharding maps and `return_attention_scores` work as Keras documents. The differences:

    - Without a mask, tokens are flattened to (B * T, D) and then projected, where backends fuse
      product and bias. Quantized layers, masks and a `key` of its own use Keras' implementation.
    - The softmax is in at least float32, and attention dropout costs nothing outside training.
    - `qk_norm` applies a LayerNorm to each head's queries and keys (arXiv 2302.05442).
    - `inner_norm` applies a LayerNorm to [SA_1(z); ...; SA_h(z)] (arXiv 2210.06423).
    - `output_bias` sets the bias of the output projection alone, and `key_bias=False` removes that
      of the keys.
    - `token_sizes` adds the logarithm of a token's size to its scores, as if it were there so many
      times (proportional attention, arXiv 2210.09461).
    - `rope` rotates each head's queries and keys by their patch's position (`RotaryEmbedding`).
    - `score_scale="learned"` replaces the 1 / sqrt(d) of Eq. 6 by a weight of each head, which
      starts there. `score_diagonal=False` masks A_ii: no token attends to itself. Both together are
      locality self-attention, which makes attention sharper (arXiv 2112.13492).

    Args:
        num_heads: h.
        key_dim: d.
        qk_norm: Whether to normalize queries and keys.
        inner_norm: Whether to normalize the concatenated heads.
        norm_epsilon: Epsilon of these norms.
        norm_kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        output_bias: Whether the output projection has a bias; None means `use_bias`.
        rope: Arguments of a `RotaryEmbedding` as a dict, or None.
        key_bias: Whether the key projection has a bias too, where `use_bias` is True.
        relative: Arguments of a `RelativePositions` as a dict, or None.
        score_scale: "fixed" (1 / sqrt(d)) or "learned", one for each head.
        score_diagonal: Whether a token attends to itself too.
        **kwargs: Arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        Those of `keras.layers.MultiHeadAttention`; `query` and `value` are `(B, T, D)`. And
        `rope_scale`, the factor of a `RotaryRescale`, or None; `token_sizes`, ints `(B, T)`: how
        many tokens each one counts for, or None; and `return_keys`.

    Returns:
        `(B, T, D)`, with `return_attention_scores=True` also the weights `(B, h, T, T)`, and with
        `return_keys=True` also the keys `(B, T, h, d)`, normalized and rotated.

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
        inner_norm=False,
        norm_epsilon=1e-6,
        norm_kind="layer",
        output_bias=None,
        rope=None,
        key_bias=True,
        relative=None,
        score_scale="fixed",
        score_diagonal=True,
        **kwargs,
    ):
        super().__init__(num_heads=num_heads, key_dim=key_dim, **kwargs)
        if score_scale not in SCORE_SCALES:
            raise ValueError(
                f"score_scale must be 'fixed' or 'learned'. Received: score_scale={score_scale!r}"
            )
        self.score_scale = score_scale
        self.score_diagonal = score_diagonal
        self.output_bias = output_bias
        self.key_bias = key_bias
        self.qk_norm = qk_norm
        self.inner_norm = inner_norm
        self.norm_epsilon = norm_epsilon
        self.norm_kind = norm_kind
        if qk_norm:
            self.query_norm = self._norm("query_norm")
            self.key_norm = self._norm("key_norm")
        self.rope = None if rope is None else dict(rope)
        self._rope_scale = None
        self._token_sizes = self._keys = None
        self._keeps_keys = False
        if rope is not None:
            self.rotary = RotaryEmbedding(**rope, dtype=self.dtype_policy, name="rotary")
        self.relative = None if relative is None else dict(relative)
        if relative is not None:
            self.relative_positions = RelativePositions(
                **relative, dtype=self.dtype_policy, name="relative_positions"
            )
        if inner_norm:
            self.heads_norm = self._norm("inner_norm")

    def _norm(self, name):
        cls = norm_class(self.norm_kind)
        return cls(epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name)

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if not self.key_bias and self.key_dense.bias is not None:
            # Keras' layer has one argument for all biases.
            self.key_dense._untrack_variable(self.key_dense.bias)
            self.key_dense.bias = self.key_dense.bias_axes = None
        if self.score_scale == "learned":
            self.scale = self.add_weight(
                name="score_scale",
                shape=(self.num_heads,),
                initializer=keras.initializers.Constant(self.key_dim**-0.5),
            )
        if self.qk_norm:
            self.query_norm.build((None, None, self.num_heads, self.key_dim))
            self.key_norm.build((None, None, self.num_heads, self.key_dim))
        if self.rope is not None:
            self.rotary.build((None, query_shape[1], self.num_heads, self.key_dim))
        if self.relative is not None:
            heads = (self.num_heads, self.key_dim)
            self.relative_positions.build((*query_shape[:2], *heads))
        if self.inner_norm:
            self.heads_norm.build((None, None, self.num_heads * self.value_dim))
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
        rope_scale=None,
        token_sizes=None,
        return_keys=False,
    ):
        # Keras' `call` does not pass them on.
        self._rope_scale, self._token_sizes, self._keeps_keys = (
            rope_scale,
            token_sizes,
            return_keys,
        )
        masks = (query_mask, value_mask, key_mask, attention_mask)
        if (
            (key is not None and key is not value)
            or any(mask is not None for mask in masks)
            or use_causal_mask
            or not self._is_plain()
            or not len(query.shape) == len(value.shape) == 3
        ):
            outputs = super().call(
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
            return self._with_keys(outputs, return_attention_scores) if return_keys else outputs
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
        outputs = (x, scores) if return_attention_scores else x
        return self._with_keys(outputs, return_attention_scores) if return_keys else outputs

    def _with_keys(self, outputs, with_scores):
        keys, self._keys = self._keys, None
        return (*outputs, keys) if with_scores else (outputs, keys)

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

    def _has_kernel(self, query, training):
        """Whether the backend has a fast attention kernel with a float32 softmax.

        Two products and a softmax are often faster on a CPU (`benchmarks/attention.py`).
        """
        backend = keras.backend.backend()
        dtype = keras.backend.standardize_dtype(query.dtype)
        if backend == "torch":
            short = query.shape[1] <= SHORT and dtype in ("bfloat16", "float16")
            return not (training and short and query.device.type == "cpu")
        if backend == "jax":
            return dtype != "float16" and not keras.distribution.list_devices()[0].startswith("cpu")
        return False

    def _compute_attention(self, *args, **kwargs):
        x, scores = self._weighted_values(*args, **kwargs)
        if self.inner_norm:
            _, length, heads, size = ops.shape(x)
            x = self.heads_norm(ops.reshape(x, (-1, length, heads * size)))  # (B, T, h * d)
            x = ops.reshape(x, (-1, length, heads, size))  # (B, T, h, d)
        return x, scores

    def _weighted_values(
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
        if self.rope is not None:
            scale, self._rope_scale = self._rope_scale, None
            query, key = self.rotary(query, scale), self.rotary(key, scale)
        if self._keeps_keys:
            self._keys, self._keeps_keys = key, False
        dropped = bool(training) and self.dropout > 0
        sizes, self._token_sizes = self._token_sizes, None
        as_in_keras = self.relative is None and self.score_scale == "fixed" and self.score_diagonal
        as_in_keras = as_in_keras and sizes is None
        if (attention_mask is not None or kwargs) and as_in_keras:
            return super()._compute_attention(
                query,
                key,
                value,
                attention_mask=attention_mask,
                training=training,
                return_attention_scores=return_attention_scores,
                **kwargs,
            )
        mask = self._mask(query, key, attention_mask, **kwargs)  # (1 or B, 1 or h, T, T) or None
        bias = None
        if self.relative is not None:
            bias, mask = self._bias(query, mask), None
        if sizes is not None:
            sizes = ops.log(ops.cast(sizes, "float32"))[:, None, None]  # (B, 1, 1, T)
            bias = sizes if bias is None else ops.add(bias, sizes)
            bias, mask = bias if mask is None else ops.where(mask, bias, MASKED), None
        # The kernels add the bias in the dtype of the query.
        exact = bias is None or bias.dtype == query.dtype
        if self._has_kernel(query, training) and exact and not (dropped or return_attention_scores):
            fixed = self.score_scale == "fixed"
            return ops.dot_product_attention(
                query if fixed else self._scaled(query),
                key,
                value,
                bias,
                mask,
                scale=self.key_dim**-0.5 if fixed else 1.0,
                flash_attention=self._flash_attention,
            ), None
        bias = bias if mask is None else ops.where(mask, 0.0, MASKED)
        q = ops.transpose(self._scaled(query), (0, 2, 1, 3))  # (B, h, T, d)
        k = ops.transpose(key, (0, 2, 3, 1))  # (B, h, d, T)
        v = ops.transpose(value, (0, 2, 1, 3))  # (B, h, T, d)
        least = LONG.get(keras.backend.backend())
        long = least is not None and isinstance(key.shape[1], int) and key.shape[1] >= least
        if long and bias is None and not (dropped or return_attention_scores):
            return ops.transpose(attend_in_blocks(q, k, v), (0, 2, 1, 3)), None
        scores = ops.matmul(q, k)  # (B, h, T, T)
        exact = keras.backend.result_type(scores.dtype, "float32")
        scores = ops.cast(scores, exact)
        scores = ops.softmax(scores if bias is None else ops.add(scores, bias), axis=-1)
        scores = ops.cast(scores, query.dtype)
        weights = self._dropout_layer(scores, training=training) if dropped else scores
        x = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))  # (B, T, h, d)
        return x, scores

    def _scaled(self, query):
        """Queries times the scale of the scores, `(B, T, h, d)`."""
        fixed = self.score_scale == "fixed"
        scale = self.key_dim**-0.5 if fixed else ops.expand_dims(self.scale, -1)  # (h, 1)
        return ops.multiply(query, scale)

    def _mask(self, query, key, mask, use_causal_mask=False):
        """Which scores count, of the caller's mask and the diagonal; None if all do."""
        if not (self.relative is None and self.score_diagonal) and query.shape[1] != key.shape[1]:
            raise ValueError(
                "value must have as many tokens as query for relative positions and without the "
                f"diagonal. Received: {key.shape[1]} for {query.shape[1]} tokens"
            )
        masks = [] if mask is None else [ops.cast(mask, "bool")]
        if use_causal_mask:
            masks.append(self._compute_causal_mask(query))  # (1, T, T)
        if not self.score_diagonal:
            masks.append(ops.logical_not(ops.eye(ops.shape(query)[1], dtype="bool"))[None])
        if not masks:
            return None
        masks = [mask if len(mask.shape) == 4 else ops.expand_dims(mask, 1) for mask in masks]
        return functools.reduce(ops.logical_and, masks)

    def _bias(self, query, mask):
        """The relative positions, and a large negative number where a mask is False."""
        bias = self.relative_positions(self._scaled(query))  # (h, T, T) or (B, h, T, T)
        bias = ops.expand_dims(bias, 0) if len(bias.shape) == 3 else bias
        return bias if mask is None else ops.where(mask, bias, MASKED)

    def get_config(self):
        return {
            **super().get_config(),
            "qk_norm": self.qk_norm,
            "inner_norm": self.inner_norm,
            "norm_epsilon": self.norm_epsilon,
            "norm_kind": self.norm_kind,
            "output_bias": self.output_bias,
            "rope": self.rope and dict(self.rope),
            "relative": self.relative and dict(self.relative),
            "key_bias": self.key_bias,
            "score_scale": self.score_scale,
            "score_diagonal": self.score_diagonal,
        }


def _product(x, dense, split):
    """Computes an EinsumDense as a matrix product.

    The kernel's axes before `split` become rows, the others columns. `dense.kernel` includes the
    LoRA delta.
    """
    rows = math.prod(dense.kernel.shape[:split])
    x = ops.matmul(x, ops.reshape(dense.kernel, (rows, -1)))
    return x if dense.bias is None else ops.add(x, ops.reshape(dense.bias, (-1,)))

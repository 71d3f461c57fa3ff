"""Token merging (ToMe): fewer tokens from block to block."""

import keras
import numpy as np
from keras import ops

LEAST_SQUARE = 1e-30
"""Below it, a vector counts as 0: it has no direction."""


@keras.saving.register_keras_serializable("keras_vit")
class TokenMerging(keras.layers.Layer):
    """Merges the r most similar pairs of tokens of each image.

    Shapes: B batch, T tokens, k prefix tokens, D width, h heads, d size of a head, r merged tokens.

    1. Tokens at even places are set a, those at odd places set b; prefix tokens are in neither.
    2. Each token of a chooses the most similar of b. The similarity of two tokens is the cosine of
       their keys, averaged over the heads.
    3. The r tokens of a with the most similar choice are merged into it: x = (sum of s_i x_i) / s,
       s = sum of s_i, where s_i is the number of patches that a token stands for.
    4. What is left follows in the order prefix, a, b.

    Half of the patch tokens can be merged at most. Which are, is a choice without a gradient, in
    float32; the mean has one.

    Args:
        num_merged: r.
        num_prefix_tokens: k, tokens in front that are not merged.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.
        keys: Their keys in the attention before, `(B, T, h, d)`.
        sizes: How many patches each token stands for, ints `(B, T)`; None means one.

    Returns:
        `(B, T - r, D)`, and the sizes, int32 `(B, T - r)`.

    Reference:
        arXiv 2210.09461, Section 3.

    Example:

    >>> x = keras.ops.ones((2, 9, 8))
    >>> x, sizes = TokenMerging(3, num_prefix_tokens=1)(x, keras.random.normal((2, 9, 2, 4)))
    >>> x.shape, sizes.shape
    ((2, 6, 8), (2, 6))
    """

    def __init__(self, num_merged, num_prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        for name, value in (("num_merged", num_merged), ("num_prefix_tokens", num_prefix_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an int >= 0. Received: {name}={value!r}")
        self.num_merged = num_merged
        self.num_prefix_tokens = num_prefix_tokens

    def call(self, x, keys, sizes=None):
        batch, tokens = ops.shape(x)[0], x.shape[1]
        sizes = ops.ones((batch, tokens), "int32") if sizes is None else sizes
        count = self._count(tokens)
        if not count:
            return x, sizes
        order, target = self._matched(keys, count)
        a, b = halves(self.num_prefix_tokens, tokens)
        rest = ops.take(a, ops.sort(order[:, count:], axis=-1))  # (B, |a| - r)
        source = ops.take(a, order[:, :count])  # (B, r)
        fixed = np.arange(self.num_prefix_tokens, dtype="int32"), b
        front, back = (ops.tile(part[None], (batch, 1)) for part in fixed)
        kept = ops.concatenate([front, rest, back], axis=1)  # (B, T - r)
        left = tokens - count
        y = ops.take_along_axis(x, kept[:, :, None], axis=1)  # (B, T - r, D)
        z = ops.take_along_axis(x, source[:, :, None], axis=1)  # (B, r, D)
        own = ops.take_along_axis(sizes, kept, axis=1)  # (B, T - r)
        more = ops.take_along_axis(sizes, source, axis=1)  # (B, r)
        places = ops.arange(left, dtype="int32")[:, None]
        into = ops.equal(places, target[:, None] + (left - len(b)))  # (B, T - r, r)
        weights = ops.where(into, more[:, None], 0)
        sizes = ops.add(own, ops.sum(weights, axis=-1))  # (B, T - r)
        shares = ops.cast(sizes, "float32")[:, :, None]
        own = ops.cast(ops.cast(own, "float32")[:, :, None] / shares, x.dtype)
        weights = ops.cast(ops.cast(weights, "float32") / shares, x.dtype)
        return ops.add(ops.multiply(y, own), ops.matmul(weights, z)), sizes  # (B, T - r, D)

    def margins(self, keys):
        """How clear the choice is for each image, `(B,)`: the least difference of cosines in it.

        A change of the cosines by less than half of it merges the same tokens.
        """
        count = self._count(keys.shape[1])
        if not count:
            return ops.full((ops.shape(keys)[0],), np.inf)
        scores = self._scores(keys)  # (B, |a|, |b|)
        best = ops.flip(ops.sort(ops.max(scores, axis=-1), axis=-1), axis=-1)  # (B, |a|)
        margin = ops.full((ops.shape(keys)[0],), np.inf)
        if count < best.shape[1]:
            margin = best[:, count - 1] - best[:, count]
        if scores.shape[-1] == 1:
            return margin
        ordered = ops.sort(scores, axis=-1)
        lead = ordered[:, :, -1] - ordered[:, :, -2]  # of each token's choice before its second
        merged = ordered[:, :, -1] >= best[:, count - 1][:, None]
        return ops.minimum(margin, ops.min(ops.where(merged, lead, np.inf), axis=-1))

    def _count(self, tokens):
        return min(self.num_merged, max(0, tokens - self.num_prefix_tokens) // 2)

    def _scores(self, keys):
        """The cosine of each token in a with each in b, `(B, |a|, |b|)`."""
        keys = ops.cast(ops.stop_gradient(keys), "float32")
        m = ops.mean(keys, axis=2)  # (B, T, d)
        m *= ops.rsqrt(ops.maximum(ops.sum(m * m, axis=-1, keepdims=True), LEAST_SQUARE))
        a, b = halves(self.num_prefix_tokens, m.shape[1])
        a, b = ops.take(m, a, axis=1), ops.take(m, b, axis=1)
        return ops.matmul(a, ops.transpose(b, (0, 2, 1)))

    def _matched(self, keys, count):
        """The numbers in a, those that merge first, `(B, |a|)`; and in b, where these go."""
        scores = self._scores(keys)
        order = ops.argsort(ops.negative(ops.max(scores, axis=-1)), axis=-1)  # (B, |a|)
        order = ops.cast(order, "int32")
        target = ops.cast(ops.argmax(scores, axis=-1), "int32")  # (B, |a|)
        return order, ops.take_along_axis(target, order[:, :count], axis=1)

    def compute_output_spec(self, x, keys, sizes=None):
        batch, tokens, width = x.shape
        left = None if tokens is None else tokens - self._count(tokens)
        x = keras.KerasTensor((batch, left, width), dtype=x.dtype)
        return x, keras.KerasTensor((batch, left), dtype="int32")

    def get_config(self):
        return {
            **super().get_config(),
            "num_merged": self.num_merged,
            "num_prefix_tokens": self.num_prefix_tokens,
        }


def halves(start, tokens):
    """The places of the sets a and b, of even and of odd places from `start` on."""
    places = np.arange(start, tokens, dtype="int32")
    return places[places % 2 == 0], places[places % 2 == 1]

"""Relative positions: what attention adds to its scores for the offset between two tokens."""

import functools

import keras
import numpy as np
from keras import ops

KINDS = ("relative", "relative_bias", "relative_mlp")


@keras.saving.register_keras_serializable("keras_vit")
class RelativePositions(keras.layers.Layer):
    """Scores for pairs of tokens, by how far they are apart.

    Shapes: B batch, T = k + N tokens, the k prefix tokens first, h heads, d size of a head, M the
    MLP's width, (gh, gw) the grid.

    `A = softmax(q k^T / sqrt(d) + S)`, where S is one of:

    - "relative": `S_ij = q_i . r_(i - j) / sqrt(d)`, with a learned key r for each of the 2 T - 1
      offsets in the sequence, for each head (Appendix D.4).
    - "relative_bias": `S_ij = b_(i - j)`, with a learned number for each of the
      (2 gh - 1) (2 gw - 1) offsets in the grid, for each head. With a class token there are three
      more: from it to patches, from patches to it, and to itself (BEiT).
    - "relative_mlp": the b are the outputs of an MLP,
      `b_(y, x) = relu([f(y), f(x)] W_1 + c_1) W_2 + c_2`, `f(a) = sign(a) log(1 + |a|)`; they are 0
      for prefix tokens (timm).

    Args:
        kind: "relative", "relative_bias" or "relative_mlp".
        grid: Rows and columns of patches.
        num_prefix_tokens: k; at most 1 for "relative_bias".
        mlp_dim: M.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        query: Queries, already divided by sqrt(d), `(B, T, h, d)`.

    Returns:
        S in at least float32, `(h, T, T)`, or for "relative" `(B, h, T, T)`.

    Reference:
        arXiv 2010.11929, Appendix D.4; arXiv 2106.08254; arXiv 2111.09883.

    Example:

    >>> RelativePositions("relative_bias", grid=(2, 3))(keras.ops.ones((2, 6, 4, 8))).shape
    (4, 6, 6)
    """

    def __init__(self, kind, grid, num_prefix_tokens=0, mlp_dim=128, **kwargs):
        super().__init__(**kwargs)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}. Received: kind={kind!r}")
        if len(tuple(grid)) != 2 or not all(isinstance(g, int) and g > 0 for g in grid):
            raise ValueError(f"grid must be two positive ints. Received: grid={grid!r}")
        if not isinstance(num_prefix_tokens, int) or not (
            0 <= num_prefix_tokens <= (1 if kind == "relative_bias" else num_prefix_tokens)
        ):
            rule = "0 or 1 for kind='relative_bias'" if kind == "relative_bias" else "an int >= 0"
            raise ValueError(
                f"num_prefix_tokens must be {rule}. Received: num_prefix_tokens={num_prefix_tokens}"
            )
        self.kind = kind
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.mlp_dim = mlp_dim

    def build(self, query_shape):
        _, length, heads, size = query_shape
        rows, columns = self.grid
        tokens = self.num_prefix_tokens + rows * columns
        if length is not None and length != tokens:
            raise ValueError(
                f"query must have {tokens} tokens for grid={self.grid}, "
                f"num_prefix_tokens={self.num_prefix_tokens}. "
                f"Received: query with shape {tuple(query_shape)}"
            )
        if self.kind == "relative":
            normal = keras.initializers.RandomNormal(stddev=0.02)
            shape = (2 * tokens - 1, heads, size)
            self.keys = self.add_weight(name="keys", shape=shape, initializer=normal)
        elif self.kind == "relative_bias":
            count = (2 * rows - 1) * (2 * columns - 1) + 3 * self.num_prefix_tokens
            self.table = self._exact("table", (count, heads), "zeros")
        else:
            self.hidden_kernel = self._exact("hidden_kernel", (2, self.mlp_dim), "glorot_uniform")
            self.hidden_bias = self._exact("hidden_bias", (self.mlp_dim,), "zeros")
            self.bias_kernel = self._exact("bias_kernel", (self.mlp_dim, heads), "glorot_uniform")
            self.bias_bias = self._exact("bias_bias", (heads,), "zeros")
        self.built = True

    def _exact(self, name, shape, initializer):
        """A weight that stays in float32 in mixed precision."""
        return self.add_weight(name=name, shape=shape, initializer=initializer, autocast=False)

    def call(self, query):
        if self.kind != "relative":
            return self.bias()
        scores = ops.einsum("bthd,ohd->bhto", query, self.offset_keys(query.dtype))  # (B, h, T, 2T)
        exact = keras.backend.result_type(query.dtype, "float32")
        return ops.cast(skewed(scores), exact)  # (B, h, T, T)

    def offset_keys(self, dtype):
        """The keys by j - i, from 1 - T to T - 1, and a zero at the end: `(2 T, h, d)`."""
        keys = ops.flip(ops.convert_to_tensor(self.keys), axis=0)
        return ops.cast(ops.pad(keys, ((0, 1), (0, 0), (0, 0))), dtype)

    def bias(self):
        """S of "relative_bias" and "relative_mlp", `(h, T, T)`."""
        index, offsets = pairs(self.grid, self.num_prefix_tokens)
        if self.kind == "relative_bias":
            table = ops.convert_to_tensor(self.table)
        else:
            hidden = ops.relu(ops.matmul(offsets, self.hidden_kernel) + self.hidden_bias)
            table = ops.matmul(hidden, self.bias_kernel) + self.bias_bias
            # Prefix tokens have none; their entries come last.
            table = ops.pad(table, ((0, 3), (0, 0)))
        return ops.transpose(ops.take(table, index, axis=0), (2, 0, 1))  # (h, T, T)

    def compute_output_spec(self, query):
        batch, tokens, heads, _ = query.shape
        exact = keras.backend.result_type(self.compute_dtype, "float32")
        shape = (heads, tokens, tokens)
        shape = (batch, *shape) if self.kind == "relative" else shape
        return keras.KerasTensor(shape, dtype=exact)

    def get_config(self):
        return {
            **super().get_config(),
            "kind": self.kind,
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
            "mlp_dim": self.mlp_dim,
        }


def skewed(scores):
    """Row i of each matrix, from column T - 1 - i on.

    Read as rows of one number less, each row starts one column later.

    Args:
        scores: `(B, h, T, 2 T)`: in the row of query i, the column of key j is T - 1 + j - i.

    Returns:
        `(B, h, T, T)`.
    """
    _, heads, tokens, columns = scores.shape
    line = ops.reshape(scores, (-1, heads, tokens * columns))
    line = line[:, :, tokens - 1 : tokens - 1 + tokens * (columns - 1)]
    return ops.reshape(line, (-1, heads, tokens, columns - 1))[:, :, :, :tokens]


@functools.lru_cache(maxsize=8)  # all blocks of a model have the same
def pairs(grid, num_prefix_tokens):
    """Which offset each pair of tokens has.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: k, tokens before the patches.

    Returns:
        int32 array `(T, T)`: for each query and key, the number of its offset: row by row, from
        (1 - rows, 1 - columns) on. After the last offset come prefix to patch, patch to prefix, and
        prefix to prefix. And the f of the offsets, a float32 array `(P, 2)`.
    """
    rows, columns = grid
    k, count = num_prefix_tokens, (2 * rows - 1) * (2 * columns - 1)
    y, x = (a.reshape(-1).astype("int32") for a in np.indices(grid))  # (N,)
    down, right = y[:, None] - y, x[:, None] - x  # (N, N)
    index = np.empty((k + len(y), k + len(y)), "int32")
    index[k:, k:] = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
    index[:k, k:], index[k:, :k], index[:k, :k] = count, count + 1, count + 2
    down, right = np.mgrid[1 - rows : rows, 1 - columns : columns].reshape(2, -1)  # (P,)
    offsets = np.stack([down, right], axis=-1).astype("float32")
    return index, np.sign(offsets) * np.log1p(np.abs(offsets))

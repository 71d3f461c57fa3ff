"""Position embeddings: E_pos of Eq. 1, learned or fixed."""

import keras
import numpy as np
from keras import ops

KINDS = ("learned", "learned_2d", "sincos_2d")


@keras.saving.register_keras_serializable("keras_vit")
class PositionEmbedding(keras.layers.Layer):
    """Adds a vector to each token that encodes its position.

    Shapes: B batch, N patches, T = N (+ 1 with a class row) tokens, D width, (gh, gw) the grid.

    `z_0 = [x_class; x_1 E; ...; x_N E] + E_pos`. The kinds: one learned vector per position
    ("learned"); one learned half per row of the grid and one per column ("learned_2d", Appendix
    D.4); fixed sines and cosines of row and column ("sincos_2d", arXiv 2205.01580).

    Args:
        grid: Rows and columns of patches.
        kind: "learned", "learned_2d" or "sincos_2d".
        class_row: Whether the first token is a class token, which gets its own learned row; 2 if a
            distillation token with a row follows.
        initializer: Initializer of the learned arrays.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.

    Returns:
        `(B, T, D)`.

    Reference:
        arXiv 2010.11929, Eq. 1 and Appendix D.4.

    Example:

    >>> PositionEmbedding(grid=(2, 3), class_row=True)(keras.ops.ones((2, 7, 8))).shape
    (2, 7, 8)
    """

    def __init__(
        self, grid, kind="learned", class_row: bool | int = False, initializer=None, **kwargs
    ):
        super().__init__(**kwargs)
        if len(tuple(grid)) != 2 or not all(isinstance(g, int) and g > 0 for g in grid):
            raise ValueError(f"grid must be two positive ints. Received: grid={grid!r}")
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}. Received: kind={kind!r}")
        if class_row and kind == "sincos_2d":
            raise ValueError(
                "class_row must be False for kind='sincos_2d', which is not learned. "
                f"Received: class_row={class_row!r}"
            )
        if class_row not in (0, 1, 2):
            raise ValueError(
                f"class_row must be True, False or 2. Received: class_row={class_row!r}"
            )
        self.grid = tuple(grid)
        self.kind = kind
        self.class_row = class_row
        if initializer is None:
            initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape):
        rows, columns = self.grid
        length, width = input_shape[1:]
        expected = rows * columns + int(self.class_row)
        if length is not None and length != expected:
            raise ValueError(
                f"x must have {expected} tokens for grid={self.grid}, class_row={self.class_row}. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        if self.kind == "learned":
            self.table = self._weight("table", (expected, width))
        elif self.kind == "learned_2d":
            _check_width(width, 2, self.kind)
            self.rows = self._weight("rows", (rows, width // 2))
            self.columns = self._weight("columns", (columns, width // 2))
            if self.class_row:
                self.row_0 = self._weight("class_row", (int(self.class_row), width))
        else:
            _check_width(width, 4, self.kind)
            self._fixed = sincos_2d(self.grid, width)
        self.built = True

    def _weight(self, name, shape):
        fresh = self.initializer.__class__.from_config(self.initializer.get_config())
        return self.add_weight(name=name, shape=shape, initializer=fresh)

    def call(self, x):
        return ops.add(x, ops.cast(self._table(), x.dtype))  # (B, T, D)

    def _table(self):
        if self.kind == "learned":
            return self.table  # (T, D)
        if self.kind == "sincos_2d":
            return ops.convert_to_tensor(self._fixed, dtype=self.compute_dtype)  # (N, D)
        (gh, gw), half = self.grid, self.rows.shape[-1]
        rows = ops.broadcast_to(ops.expand_dims(self.rows, 1), (gh, gw, half))
        columns = ops.broadcast_to(ops.expand_dims(self.columns, 0), (gh, gw, half))
        table = ops.concatenate([rows, columns], axis=-1)  # (gh, gw, D)
        table = ops.reshape(table, (gh * gw, 2 * half))  # (N, D)
        return ops.concatenate([self.row_0, table], axis=0) if self.class_row else table

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "grid": self.grid,
            "kind": self.kind,
            "class_row": self.class_row,
            "initializer": keras.initializers.serialize(self.initializer),
        }


def sincos_2d(grid, width, temperature=10_000.0, endpoint=True):
    """The table of "Better plain ViT baselines": a quarter each of sin x, cos x, sin y and cos y.

    Args:
        grid: Rows and columns of patches.
        width: D, a multiple of 4.
        temperature: The longest wavelength, in patches, divided by 2 pi.
        endpoint: Whether this wavelength is the last one. False: the one after the last (MAE).

    Returns:
        float32 array `(rows * columns, width)`.

    Reference:
        arXiv 2205.01580, whose exponents are multiples of 1 / (D/4 - 1). Those of MAE (arXiv
        2111.06377) are multiples of 1 / (D/4).
    """
    height, columns = grid
    quarter = width // 4
    omega = temperature ** -(np.arange(quarter) / max(quarter - bool(endpoint), 1))
    # Each row and column is computed once, in float64, and broadcast over the grid.
    x, y = (np.arange(n, dtype="float64")[:, None] * omega for n in (columns, height))
    table = np.empty((height, columns, 4, quarter), "float32")
    table[:, :, 0], table[:, :, 1] = np.sin(x), np.cos(x)
    table[:, :, 2], table[:, :, 3] = np.sin(y)[:, None], np.cos(y)[:, None]
    return table.reshape(height * columns, width)  # (N, D)


def _check_width(width, divisor, kind):
    if width % divisor:
        raise ValueError(
            f"width must be a multiple of {divisor} for kind={kind!r}. Received: width={width}"
        )

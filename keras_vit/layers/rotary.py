"""Rotary positions (RoPE): attention that sees how far apart two patches are."""

import functools
import math

import keras
import numpy as np
from keras import ops

COORDINATES = ("centered", "index")
ORDERS = ("rows_first", "columns_first")
PAIRS = ("halves", "neighbors")


@keras.saving.register_keras_serializable("keras_vit")
class RotaryEmbedding(keras.layers.Layer):
    """Rotates pairs of a query's or key's numbers by angles that the patch's position sets.

    Shapes: B batch, k prefix tokens, N patches, T = k + N tokens, h heads, d head size.

    `(a, b) -> (a cos t - b sin t, a sin t + b cos t)`, so that a product of query and key depends
    on their positions only by the difference of the angles t. With fixed frequencies
    `f_j = base^(-4j / d)`, half of the pairs have `t = f_j row` and half `t = f_j column`. Learned
    frequencies are two for each head and pair: `t = f row + g column` (arXiv 2403.13298). Tokens
    before the patches are not rotated.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: k, tokens before the patches.
        learned: Whether the frequencies are learned.
        base: Quotient of the highest and the lowest frequency.
        coordinates: "index" (0, 1, 2, ...), or "centered": patch centers in [-1, 1], times 2 pi.
        order: Which coordinate has the first frequencies: "rows_first" or "columns_first".
        pairs: Which numbers are rotated together: "halves" (i and i + d/2) or "neighbors" (2i and
            2i + 1).
        offset: Added to the number of each row and column.
        reference_grid: Rows and columns onto which "index" coordinates are scaled, or None.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Queries or keys, `(B, T, h, d)`.
        scale: A factor of all coordinates, of shape `(1,)`, or None.

    Returns:
        `(B, T, h, d)`, rotated in at least float32.

    Reference:
        arXiv 2104.09864; for images arXiv 2403.13298 and 2508.10104.

    Example:

    >>> RotaryEmbedding(grid=(2, 3), num_prefix_tokens=1)(keras.ops.ones((2, 7, 5, 8))).shape
    (2, 7, 5, 8)
    """

    def __init__(
        self,
        grid,
        num_prefix_tokens=0,
        learned=False,
        base=100.0,
        coordinates="centered",
        order="rows_first",
        pairs="halves",
        offset=0.0,
        reference_grid=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        for name, value, known in (
            ("coordinates", coordinates, COORDINATES),
            ("order", order, ORDERS),
            ("pairs", pairs, PAIRS),
        ):
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}. Received: {name}={value!r}"
                )
        if reference_grid is not None and coordinates == "centered":
            raise ValueError(
                "reference_grid must be None for coordinates='centered'. "
                f"Received: reference_grid={reference_grid!r}"
            )
        self.grid = _grid("grid", grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.learned = learned
        self.base = base
        self.coordinates = coordinates
        self.order = order
        self.pairs = pairs
        self.offset = offset
        self.reference_grid = reference_grid and _grid("reference_grid", reference_grid)

    def build(self, input_shape):
        _, length, heads, size = input_shape
        expected = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        if length is not None and length != expected:
            raise ValueError(
                f"x must have {expected} tokens for grid={self.grid}, "
                f"num_prefix_tokens={self.num_prefix_tokens}. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        if size % 4:
            raise ValueError(
                "x must have a multiple of 4 on its last axis. "
                f"Received: x with shape {tuple(input_shape)}"
            )
        places = (
            self.grid,
            self.num_prefix_tokens,
            self.coordinates,
            self.order,
            self.offset,
            self.reference_grid,
        )
        if self.learned:
            self._coordinates = rotary_coordinates(*places).astype("float32")
            self.frequencies = self.add_weight(
                name="frequencies",
                shape=(2, heads, size // 2),
                initializer=self._random_axes,
                autocast=False,  # bfloat16 cannot tell the angles of neighbors apart
            )
        else:
            self._angles, self._cos, self._sin = rotary_tables(*places, size, self.base)
        self.built = True

    def _random_axes(self, shape, dtype=None):
        """The fixed frequencies, on two axes at right angles that each head draws."""
        _, heads, half = shape
        turn = keras.initializers.RandomUniform(0.0, 2 * math.pi)((heads, 1), dtype=dtype)
        frequency = ops.cast(_frequencies(2 * half, self.base), dtype)  # (d/4,)
        along, across = ops.cos(turn) * frequency, ops.sin(turn) * frequency  # (h, d/4)
        first = ops.concatenate([along, -across], axis=-1)
        second = ops.concatenate([across, along], axis=-1)
        return ops.stack([first, second])  # (2, h, d/2)

    def call(self, x, scale=None):
        cos, sin = self.tables(scale)  # (T, h or 1, d/2)
        exact = keras.backend.result_type(x.dtype, "float32")
        z = ops.cast(x, exact)
        if self.pairs == "halves":
            a, b = ops.split(z, 2, axis=-1)  # (B, T, h, d/2)
        else:
            z = ops.reshape(z, (-1, *x.shape[1:3], x.shape[3] // 2, 2))
            a, b = z[..., 0], z[..., 1]  # (B, T, h, d/2)
        a, b = a * cos - b * sin, a * sin + b * cos
        if self.pairs == "halves":
            z = ops.concatenate([a, b], axis=-1)  # (B, T, h, d)
        else:
            z = ops.reshape(ops.stack([a, b], axis=-1), (-1, *x.shape[1:]))  # (B, T, h, d)
        return ops.cast(z, x.dtype)

    def tables(self, scale=None):
        """Cosines and sines of the angles, float32 `(T, 1, d/2)`, or if learned `(T, h, d/2)`."""
        if self.learned:
            places = ops.convert_to_tensor(self._coordinates)[:, :, None, None]  # (T, 2, 1, 1)
            frequencies = ops.cast(self.frequencies, "float32")
            angles = places[:, 0] * frequencies[0] + places[:, 1] * frequencies[1]  # (T, h, d/2)
        elif scale is None:
            return ops.convert_to_tensor(self._cos), ops.convert_to_tensor(self._sin)
        else:
            angles = ops.convert_to_tensor(self._angles)  # (T, 1, d/2)
        if scale is not None:
            angles = angles * ops.cast(scale, "float32")
        return ops.cos(angles), ops.sin(angles)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
            "learned": self.learned,
            "base": self.base,
            "coordinates": self.coordinates,
            "order": self.order,
            "pairs": self.pairs,
            "offset": self.offset,
            "reference_grid": self.reference_grid,
        }


def rotary_coordinates(grid, num_prefix_tokens, coordinates, order, offset, reference_grid):
    """The two coordinates of each token, zero before the patches: float64 `(T, 2)`.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Tokens before the patches.
        coordinates: "index" or "centered".
        order: "rows_first" or "columns_first".
        offset: Added to the number of each row and column.
        reference_grid: Rows and columns onto which the coordinates are scaled, or None.
    """
    axes = []
    for size, reference in zip(grid, reference_grid or grid, strict=True):
        number = np.arange(size) + offset
        if coordinates == "centered":
            axes.append(2 * math.pi * (2 * (number + 0.5) / size - 1))
        else:
            axes.append(number * (reference / size))
    rows, columns = np.meshgrid(*axes, indexing="ij")  # (gh, gw)
    first, second = (rows, columns) if order == "rows_first" else (columns, rows)
    patches = np.stack([first.reshape(-1), second.reshape(-1)], axis=-1)  # (N, 2)
    return np.concatenate([np.zeros((num_prefix_tokens, 2)), patches])


@functools.lru_cache(maxsize=4)  # the blocks of a model share one table
def rotary_tables(grid, num_prefix_tokens, coordinates, order, offset, reference_grid, size, base):
    """The angles of fixed frequencies, for each token and pair, and their cosines and sines.

    Args:
        grid: As for `rotary_coordinates`, like the next five.
        num_prefix_tokens: See there.
        coordinates: See there.
        order: See there.
        offset: See there.
        reference_grid: See there.
        size: d, the size of a head.
        base: Of the frequencies.

    Returns:
        Three float32 arrays `(T, 1, d/2)`, computed in float64.
    """
    places = rotary_coordinates(grid, num_prefix_tokens, coordinates, order, offset, reference_grid)
    angles = places[:, :, None] * _frequencies(size, base)  # (T, 2, d/4)
    angles = angles.reshape(len(places), 1, size // 2)
    return tuple(a.astype("float32") for a in (angles, np.cos(angles), np.sin(angles)))


def _frequencies(size, base):
    return float(base) ** -(np.arange(size // 4) / (size // 4))  # (d/4,)


def _grid(name, value):
    if len(tuple(value)) != 2 or not all(isinstance(g, int) and g > 0 for g in value):
        raise ValueError(f"{name} must be two positive ints. Received: {name}={value!r}")
    return tuple(value)

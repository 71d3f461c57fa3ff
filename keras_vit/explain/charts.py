"""Figures without an image: points by depth, and grids of small maps."""

from typing import Any

import numpy as np

from keras_vit.explain.panels import fixed_axis, new_figure

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: safe for color blindness
GRID = 6.2  # inches of the longer side of a grid of maps


def by_depth(values: np.ndarray, title: str, unit: str, most: float, most_is: str) -> Any:
    """A figure with a dot per head, and the mean of each block.

    Args:
        values: One value per block and head, `(L, h)`.
        title: The title.
        unit: The label of the values, with their unit.
        most: A value to compare with, drawn as a dashed line.
        most_is: The label of that line.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.ticker import MaxNLocator

    depth, heads = values.shape
    figure = new_figure(min(max(4.8, 2.4 + 0.42 * depth), 9.5), 3.6, title)
    axis = figure.add_subplot()
    blocks = np.arange(depth)
    axis.axhline(most, color="0.45", linestyle="--", linewidth=1, label=most_is)
    axis.plot(blocks, values.mean(1), color=ORANGE, linewidth=1.5, label="mean of the heads")
    axis.scatter(
        blocks.repeat(heads), values.ravel(), s=28, color=BLUE, alpha=0.7, lw=0, label="a head"
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="block", ylabel=unit, xlim=(-0.5, depth - 0.5), ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    # Outside the axes, because no corner is always free.
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def tiled(cells: np.ndarray, title: str, pixel: tuple[int, int], *, bar: bool) -> Any:
    """An axis with small maps in rows and columns, drawn as one image with lines between them.

    Args:
        cells: `(rows, columns, height, width)`, or `(..., 3)` colors; NaN is not drawn.
        title: The title.
        pixel: Height and width of a value, up to a factor.
        bar: Whether to leave room for a color bar.

    Returns:
        A matplotlib axis whose unit is a value; the maps are one unit apart.
    """
    whole = tile(cells)
    if whole.ndim == 3:  # color maps leave out NaN by themselves
        whole = np.dstack([np.nan_to_num(whole), np.isfinite(whole[..., :1])])
    size = whole.shape[0] * pixel[0], whole.shape[1] * pixel[1]
    inches = GRID / max(size)
    left, bottom = (0.65, 0.55) if bar else (0.1, 0.35)
    inside = size[1] * inches, size[0] * inches
    axis = fixed_axis(inside, title, left=left, bottom=bottom, bar=bar)
    axis.imshow(whole, aspect=pixel[0] / pixel[1])
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return axis


def tile(cells: np.ndarray) -> np.ndarray:
    """Joins maps `(rows, columns, height, width, ...)` to one array, with lines of NaN between."""
    rows, columns, height, width = cells.shape[:4]
    apart = [(0, 0), (0, 0), (0, 1), (0, 1), *[(0, 0)] * (cells.ndim - 4)]
    spaced = np.pad(cells.astype("float32"), apart, constant_values=np.nan)
    return spaced.swapaxes(1, 2).reshape(
        rows * (height + 1), columns * (width + 1), *cells.shape[4:]
    )[:-1, :-1]

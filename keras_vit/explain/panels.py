"""Pictures in rows and columns of a figure, with maps over the part of them that a model sees."""

import dataclasses
import math
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.images import read_image
from keras_vit.preprocessing import corner, covering, preprocess

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CMAP = "viridis"  # told apart by every eye, and in gray print
PAGE = 9.5  # inches that many panels share, each way
LARGEST = 3.4  # inches of the longer side of a single panel
PIXELS = 400
"""Longest side that a picture is drawn at where there are many panels."""
FEW = 4
"""Panels in which it is drawn pixel for pixel."""
BESIDE = 1.25  # inches for a color bar
OPACITY = 0.7  # of a map: the gray picture shows through
GRAY = 56, 190
"""Black and white of a picture below a map: of less contrast, so that it leaves colors alone."""
DIMMED = 0.65  # how white what is not seen becomes


@dataclasses.dataclass(frozen=True)
class Scale:
    """What the colors of the maps of a figure mean."""

    label: str
    low: float
    high: float
    root: bool = False
    """Whether colors go by the root: the small ones are told apart beside a few large ones."""

    def norm(self) -> Any:
        """The same for matplotlib."""
        from matplotlib.colors import PowerNorm

        return PowerNorm(0.5 if self.root else 1.0, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture, and what of it a model sees."""

    pixels: np.ndarray
    """uint8 `(H, W, 3)`, to be drawn."""
    images: np.ndarray
    """float32 `(1, height, width, C)`, as the model takes it."""
    seen: tuple[float, float, float, float]
    """Left, right, top and bottom of what the model sees, in pixels of the picture."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]


def open_picture(picture: Any, config: ViTConfig) -> Picture:
    """Reads and preprocesses one picture: a path, a PIL image, or pixels from 0 to 255."""
    if isinstance(picture, str | os.PathLike):
        picture = read_image(picture)
    if hasattr(picture, "getbands"):  # a PIL image
        deep = picture.mode.startswith("I;16")  # PIL would make 255 of most of them
        drawn = np.asarray(picture) >> 8 if deep else np.asarray(picture.convert("RGB"))
    else:
        picture = drawn = _checked_array(picture, config)
    images = preprocess([picture], config)
    drawn = drawn if drawn.ndim == 3 else drawn[..., None]
    if drawn.shape[-1] != 3:  # no colors: as gray
        drawn = drawn.astype("float32").mean(-1, keepdims=True).repeat(3, -1)
    pixels = np.clip(np.round(drawn), 0, 255).astype("uint8")
    return Picture(pixels, images, seen_part(pixels.shape[0], pixels.shape[1], config))


def open_pictures(many: Any, config: ViTConfig) -> list[Picture]:
    """One picture, or a sequence or 4-dimensional array of them."""
    single = hasattr(many, "getbands") or isinstance(many, str | os.PathLike)
    if single or (isinstance(many, np.ndarray) and many.ndim != 4):
        return [open_picture(many, config)]
    if not isinstance(many, Sequence | np.ndarray) or not len(many):
        raise ValueError(
            "pictures must be a picture (a path, a PIL image or an array) or a sequence of at "
            f"least one. Received: pictures={many!r}"
        )
    return [open_picture(picture, config) for picture in many]


def seen_part(height: int, width: int, config: ViTConfig) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of what preprocessing leaves of a picture, in its own pixels."""
    resized = covering(height, width, config)
    top, left = corner(resized, config)
    tall, wide = config.image_size
    down, across = height / resized[0], width / resized[1]
    return left * across, (left + wide) * across, top * down, (top + tall) * down


class Sheet:
    """A figure of panels that share one axis, whose unit is a pixel of the first picture."""

    def __init__(
        self,
        rows: int,
        columns: int,
        size: tuple[float, float],
        title: str,
        *,
        labeled: bool = True,
        named: tuple[Sequence[str], Sequence[str]] | None = None,
        bar: bool = True,
    ):
        """Panels for pictures of a size (width, height).

        Args:
            rows: Rows of panels.
            columns: Columns of panels.
            size: Width and height of the pictures. Others are made to fit.
            title: What is above.
            labeled: Whether the panels have labels of their own.
            named: Names of the rows and of the columns.
            bar: Whether there will be a color bar.
        """
        width, height = size
        # A very narrow picture still leaves room for its label.
        self.cell = max(width, 0.6 * height), max(height, 0.25 * width)
        self.few = rows * columns <= FEW
        longest = max(self.cell)
        inches = min(
            LARGEST / longest, PAGE / (columns * self.cell[0]), PAGE / (rows * self.cell[1])
        )  # in a unit
        self.gap = 0.1 / inches, (0.28 if labeled else 0.1) / inches
        steps = [c + g for c, g in zip(self.cell, self.gap, strict=True)]
        wide, high = columns * steps[0] - self.gap[0], rows * steps[1] - self.gap[1]
        above = self.gap[1] if labeled else 0.0
        names = named or ((), ())
        inside = wide * inches, (high + above) * inches
        left, head = 0.1 + 0.09 * max(map(len, names[0]), default=0), 0.25 * bool(named)
        self.axis = fixed_axis(inside, title, left=left, top=head, bar=bar)
        self.figure: Figure = self.axis.figure
        self.axis.set(xlim=(0, wide), ylim=(high, -above), aspect="equal")
        self.axis.spines[:].set_visible(False)
        self.letters = max(8, int(self.cell[0] * inches / 0.07))  # as many as fit above a panel
        letter = min(10, 14 * self.cell[0] * inches)  # "head 10" is no wider than its panel
        self.axis.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=letter)
        for put, texts, i in (
            (self.axis.set_yticks, names[0], 1),
            (self.axis.set_xticks, names[1], 0),
        ):
            put([n * steps[i] + self.cell[i] / 2 for n in range(len(texts))], texts)
        self._map: Any = None

    def draw(
        self,
        row: int,
        column: int,
        picture: Picture,
        values: np.ndarray | None = None,
        scale: Scale | None = None,
        *,
        label: str = "",
        mark: tuple[int, int] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        """Draws a picture into a panel.

        Args:
            row: Row of the panel.
            column: Column of the panel.
            picture: The picture, in gray where there are values.
            values: `(rows, columns)`, laid over what the model sees; `(rows, columns, 3)` are
                colors, which hide it.
            scale: What the values mean.
            label: What stands above the panel.
            mark: Row and column of a patch to frame.
            grid: Rows and columns of patches; by default those of the values.
        """
        width, height = picture.size
        fit = min(self.cell[0] / width, self.cell[1] / height)
        x, y = (n * (c + g) for n, c, g in zip((column, row), self.cell, self.gap, strict=True))
        middle = x + self.cell[0] / 2
        x, y = middle - fit * width / 2, y + (self.cell[1] - fit * height) / 2

        def extent(left, right, top, bottom):
            return x + fit * left, x + fit * right, y + fit * bottom, y + fit * top

        pixels = picture.pixels if self.few else _smaller(picture.pixels)
        if values is not None:
            gray = pixels @ np.asarray([0.299, 0.587, 0.114])
            gray = GRAY[0] + gray * (GRAY[1] - GRAY[0]) / 255
            pixels = np.repeat(np.round(gray)[..., None], 3, -1).astype("uint8")
        self.axis.imshow(pixels, extent=extent(0, width, 0, height))
        self._dim(extent, picture)
        if values is not None:
            options: dict[str, Any] = {"interpolation": "nearest"}
            if values.ndim == 2 and scale is not None:
                options |= {"cmap": CMAP, "norm": scale.norm(), "alpha": OPACITY}
            drawn = self.axis.imshow(values, extent=extent(*picture.seen), **options)
            self._map = drawn if values.ndim == 2 else self._map
        grid = grid if values is None else values.shape[:2]
        if mark is not None and grid is not None:
            self._frame(extent(*picture.seen), grid, mark)
        if label:
            label = label if len(label) <= self.letters else f"{label[: self.letters - 1]}…"
            at = middle, y - 0.2 * self.gap[1]
            self.axis.text(*at, label, ha="center", va="bottom", size=9, parse_math=False)

    def color_bar(self, scale: Scale) -> None:
        """Says what the colors mean."""
        color_bar(self.axis, self._map, scale.label)

    def _dim(self, extent, picture):
        from matplotlib.patches import Rectangle

        (width, height), (left, right, top, bottom) = picture.size, picture.seen
        for part in (
            (0, width, 0, top),
            (0, width, bottom, height),
            (0, left, top, bottom),
            (right, width, top, bottom),
        ):
            if part[1] - part[0] > 1e-6 and part[3] - part[2] > 1e-6:
                x, x_end, y, y_end = extent(*part)
                self.axis.add_patch(
                    Rectangle((x, y), x_end - x, y_end - y, color="white", alpha=DIMMED, lw=0)
                )

    def _frame(self, extent, grid, mark):
        from matplotlib.patches import Rectangle

        left, right, bottom, top = extent
        width, height = (right - left) / grid[1], (bottom - top) / grid[0]
        at = left + mark[1] * width, top + mark[0] * height
        for color, line in (("black", 3.2), ("white", 1.4)):  # seen on any color
            self.axis.add_patch(
                Rectangle(at, width, height, fill=False, edgecolor=color, linewidth=line)
            )


def columns_for(panels: int, size: tuple[int, int]) -> int:
    """Columns of a block of panels: one row of a few, else about half as wide again as high."""
    width, height = size
    columns = panels if panels <= FEW else math.sqrt(1.5 * panels * max(height / width, 0.3))
    rows = max(1, round(panels / columns))
    return -(-panels // rows)


def top(values: np.ndarray) -> float:
    """The largest value, as the end of a scale that begins at 0."""
    return float(values.max()) or 1.0


def ends(values: np.ndarray) -> tuple[float, float]:
    """The ends of a scale that shows what difference there is."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (0.0, high or 1.0)


def fixed_axis(
    size: tuple[float, float],
    title: str,
    *,
    left: float = 0.1,
    bottom: float = 0.1,
    top: float = 0.0,
    bar: bool = True,
) -> Any:
    """An axis of exactly this width and height in inches, in a figure made to fit.

    Layout engines of matplotlib cut off labels beside pictures, whose proportion is fixed.

    Args:
        size: Width and height of the axis.
        title: What is above.
        left: Inches for what is on its left.
        bottom: Inches for what is below.
        top: Inches for what is above, below the title.
        bar: Whether there is room on its right for a color bar.

    Returns:
        A matplotlib axis.
    """
    right = BESIDE if bar else left
    width = max(left + size[0] + right, 4.2)
    left = max(left, (width - size[0] - right) / 2)
    lines = _wrapped(title, width)
    height = bottom + size[1] + top + 0.2 * len(lines.splitlines()) + 0.15
    figure = new_figure(width, height, title, layout=None)
    place = left / width, bottom / height, size[0] / width, size[1] / height
    return figure.add_axes(place)


def color_bar(axis: Any, shown: Any, label: str) -> None:
    """Says beside a `fixed_axis` what the colors of a drawn map mean."""
    figure, place = axis.figure, axis.get_position()
    width, height = figure.get_size_inches()
    high = place.height * height
    bar = figure.add_axes(
        (place.x1 + 0.12 / width, place.y0, min(0.2, 0.06 * high) / width, place.height)
    )
    figure.colorbar(shown, cax=bar)
    bar.tick_params(labelsize=9)
    bar.set_ylabel(textwrap.fill(label, max(int(high / 0.075), 10)), size=9)


def new_figure(
    width: float, height: float, title: str, layout: Literal["constrained"] | None = "constrained"
) -> "Figure":
    """A figure of inches that belongs to nobody: pyplot keeps none and no window opens."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib must be installed to draw: pip install 'keras3-vit[explain]'"
        ) from error
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    at = {"y": 1 - 0.08 / height, "va": "top"} if layout is None else {}
    figure.suptitle(_wrapped(title, width), size=11, **at)
    return figure


def _wrapped(title: str, width: float) -> str:
    return textwrap.fill(title, max(int(width * 10.5), 20))


def _checked_array(picture: Any, config: ViTConfig) -> np.ndarray:
    array = np.asarray(picture)
    channels = (1, 3) if config.in_channels == 3 else (config.in_channels,)
    shaped = array.ndim == 2 and 1 in channels or array.ndim == 3 and array.shape[-1] in channels
    numbers = array.dtype.kind in "uif" and array.size > 0 and shaped
    if not numbers or not np.isfinite(array).all() or array.min() < 0 or array.max() > 255:
        seen = f"{array.dtype} of shape {array.shape}"
        if numbers:
            seen += f" with values in [{array.min():.3g}, {array.max():.3g}]"
        raise ValueError(
            "picture must be a path, a PIL image, or an array of pixels from 0 to 255, (H, W) or "
            f"(H, W, C) with {' or '.join(map(str, channels))} channels. Received: {seen}"
        )
    return array


def _smaller(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((PIXELS, PIXELS))
    return np.asarray(image)

"""Images in rows and columns of a figure, with maps over the part that a model sees."""

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

CMAP = "viridis"  # safe for color blindness and gray print
PAGE = 9.5  # largest width and height of all panels, in inches
LARGEST = 3.4  # longer side of a single panel, in inches
PIXELS = 400
"""Longest side of an image in a figure with many panels."""
FEW = 4
"""Most panels for which images are drawn at full resolution."""
BESIDE = 1.25  # width of a color bar with its labels, in inches
OPACITY = 0.7  # of a map over the gray image
GRAY = 56, 190
"""Black and white of an image below a map, whose colors it would otherwise distort."""
DIMMED = 0.65  # opacity of the white over what the model does not see


@dataclasses.dataclass(frozen=True)
class Scale:
    """The color scale of a figure's maps."""

    label: str
    low: float
    high: float
    root: bool = False
    """Whether colors follow the square root, which shows small values beside a few large ones."""

    def norm(self) -> Any:
        """The scale as a norm of matplotlib."""
        from matplotlib.colors import PowerNorm

        return PowerNorm(0.5 if self.root else 1.0, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class SourceImage:
    """An image, its preprocessed form, and the part that a model sees."""

    pixels: np.ndarray
    """uint8 `(H, W, 3)`, for drawing."""
    images: np.ndarray
    """float32 `(1, height, width, C)`, preprocessed."""
    seen: tuple[float, float, float, float]
    """Left, right, top and bottom of what the model sees, in pixels of the image."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]


def open_image(image: Any, config: ViTConfig) -> SourceImage:
    """Reads and preprocesses one image: a path, a PIL image, or pixels from 0 to 255."""
    if isinstance(image, str | os.PathLike):
        image = read_image(image)
    if hasattr(image, "getbands"):  # a PIL image
        deep = image.mode.startswith("I;16")  # PIL would clip values above 255
        drawn = np.asarray(image) >> 8 if deep else np.asarray(image.convert("RGB"))
    else:
        image = drawn = _checked_array(image, config)
    images = preprocess([image], config)
    drawn = drawn if drawn.ndim == 3 else drawn[..., None]
    if drawn.shape[-1] != 3:  # drawn in gray
        drawn = drawn.astype("float32").mean(-1, keepdims=True).repeat(3, -1)
    pixels = np.clip(np.round(drawn), 0, 255).astype("uint8")
    return SourceImage(pixels, images, seen_part(pixels.shape[0], pixels.shape[1], config))


def open_images(images: Any, config: ViTConfig) -> list[SourceImage]:
    """Opens one image, or a sequence or 4-dimensional array of them."""
    single = hasattr(images, "getbands") or isinstance(images, str | os.PathLike)
    if single or (isinstance(images, np.ndarray) and images.ndim != 4):
        return [open_image(images, config)]
    if not isinstance(images, Sequence | np.ndarray) or not len(images):
        raise ValueError(
            "images must be an image (a path, a PIL image or an array) or a sequence of at least "
            f"one. Received: images={images!r}"
        )
    return [open_image(image, config) for image in images]


def seen_part(height: int, width: int, config: ViTConfig) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of what the model sees of an image, in the image's pixels."""
    resized = covering(height, width, config)
    top, left = corner(resized, config)
    tall, wide = config.image_size
    down, across = height / resized[0], width / resized[1]
    return left * across, (left + wide) * across, top * down, (top + tall) * down


class Sheet:
    """A figure of panels on one axis, whose unit is a pixel of the first image."""

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
        """Lays out the panels.

        Args:
            rows: Rows of panels.
            columns: Columns of panels.
            size: Width and height of the images; images of other sizes are scaled to fit.
            title: The title.
            labeled: Whether to leave room for a label above each panel.
            named: Names of the rows and of the columns.
            bar: Whether to leave room for a color bar.
        """
        width, height = size
        # Panels of narrow images are wider, to leave room for the label.
        self.cell = max(width, 0.6 * height), max(height, 0.25 * width)
        self.few = rows * columns <= FEW
        longest = max(self.cell)
        inches = min(
            LARGEST / longest, PAGE / (columns * self.cell[0]), PAGE / (rows * self.cell[1])
        )  # per unit
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
        self.letters = max(8, int(self.cell[0] * inches / 0.07))  # that fit above a panel
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
        image: SourceImage,
        values: np.ndarray | None = None,
        scale: Scale | None = None,
        *,
        label: str = "",
        mark: tuple[int, int] | None = None,
        grid: Sequence[int] = (1, 1),
    ) -> None:
        """Draws an image into a panel.

        Args:
            row: Row of the panel.
            column: Column of the panel.
            image: The image, drawn in gray below values.
            values: `(rows, columns)` to draw over what the model sees, or opaque colors
                `(rows, columns, 3)`.
            scale: The color scale of the values.
            label: The label above the panel.
            mark: Row and column of a patch to frame.
            grid: Rows and columns of patches, for `mark`.
        """
        width, height = image.size
        fit = min(self.cell[0] / width, self.cell[1] / height)
        x, y = (n * (c + g) for n, c, g in zip((column, row), self.cell, self.gap, strict=True))
        middle = x + self.cell[0] / 2
        x, y = middle - fit * width / 2, y + (self.cell[1] - fit * height) / 2

        def extent(left, right, top, bottom):
            return x + fit * left, x + fit * right, y + fit * bottom, y + fit * top

        pixels = image.pixels if self.few else _smaller(image.pixels)
        if values is not None:
            gray = pixels @ np.asarray([0.299, 0.587, 0.114])
            gray = GRAY[0] + gray * (GRAY[1] - GRAY[0]) / 255
            pixels = np.repeat(np.round(gray)[..., None], 3, -1).astype("uint8")
        self.axis.imshow(pixels, extent=extent(0, width, 0, height))
        self._dim(extent, image)
        if values is not None:
            options: dict[str, Any] = {"interpolation": "nearest"}
            if values.ndim == 2 and scale is not None:
                options |= {"cmap": CMAP, "norm": scale.norm(), "alpha": OPACITY}
            drawn = self.axis.imshow(values, extent=extent(*image.seen), **options)
            self._map = drawn if values.ndim == 2 else self._map
        if mark is not None:
            self._frame(extent(*image.seen), grid, mark)
        if label:
            label = label if len(label) <= self.letters else f"{label[: self.letters - 1]}…"
            at = middle, y - 0.2 * self.gap[1]
            self.axis.text(*at, label, ha="center", va="bottom", size=9, parse_math=False)

    def color_bar(self, scale: Scale) -> None:
        """Draws a color bar beside the panels."""
        color_bar(self.axis, self._map, scale.label)

    def _dim(self, extent, image):
        from matplotlib.patches import Rectangle

        (width, height), (left, right, top, bottom) = image.size, image.seen
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
        for color, line in (("black", 3.2), ("white", 1.4)):  # visible on any color
            self.axis.add_patch(
                Rectangle(at, width, height, fill=False, edgecolor=color, linewidth=line)
            )


def columns_for(panels: int, size: tuple[int, int]) -> int:
    """The number of columns for panels: one row for a few, otherwise about 3:2 in shape."""
    width, height = size
    columns = panels if panels <= FEW else math.sqrt(1.5 * panels * max(height / width, 0.3))
    rows = max(1, round(panels / columns))
    return -(-panels // rows)


def top(values: np.ndarray) -> float:
    """The upper end of a scale from 0."""
    return float(values.max()) or 1.0


def ends(values: np.ndarray) -> tuple[float, float]:
    """The ends of a scale from the smallest to the largest value."""
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
    """A figure with one axis of exactly this width and height in inches.

    matplotlib's layout engines cut off labels of images, whose aspect ratio is fixed.

    Args:
        size: Width and height of the axis.
        title: The title.
        left: Margin on the left in inches.
        bottom: Margin below in inches.
        top: Margin between axis and title in inches.
        bar: Whether to leave room for a color bar on the right.

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
    """Draws a color bar for a map beside a `fixed_axis`."""
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
    """A figure, with its size in inches, that pyplot does not manage and no window shows."""
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


def _checked_array(image: Any, config: ViTConfig) -> np.ndarray:
    array = np.asarray(image)
    channels = (1, 3) if config.in_channels == 3 else (config.in_channels,)
    shaped = array.ndim == 2 and 1 in channels or array.ndim == 3 and array.shape[-1] in channels
    numbers = array.dtype.kind in "uif" and array.size > 0 and shaped
    if not numbers or not np.isfinite(array).all() or array.min() < 0 or array.max() > 255:
        seen = f"{array.dtype} of shape {array.shape}"
        if numbers:
            seen += f" with values in [{array.min():.3g}, {array.max():.3g}]"
        raise ValueError(
            "image must be a path, a PIL image, or an array of pixels from 0 to 255, (H, W) or "
            f"(H, W, C) with {' or '.join(map(str, channels))} channels. Received: {seen}"
        )
    return array


def _smaller(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((PIXELS, PIXELS))
    return np.asarray(image)

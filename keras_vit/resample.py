"""Position tables from one grid to another, by the rule of the code that trained them.

Every library resizes a learned position table in its own way, and `keras.ops.image.resize` is not
the same on every backend. So it is done once, in NumPy: each rule is a small matrix for the rows
and one for the columns, and each source's rule has a name in `PRESETS`.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_CHOICES = {
    "kernel": ("bilinear", "bicubic"),
    "coordinates": ("half_pixel", "align_corners"),
    "border": ("clamp", "renormalize"),
}


# Above its users, because the presets are checked as they are made.
def _require(met: bool, name: str, rule: str, value: object, attribute: str = "") -> None:
    if not met:
        received = f"{name}.{attribute}" if attribute else name
        raise ValueError(f"{name} must {rule}. Received: {received}={value!r}")


@dataclass(frozen=True)
class Interpolation:
    """One rule for resizing: everything that makes two libraries differ.

    Args:
        kernel: The weight of a neighbor by its distance: the triangle of radius 1, or Keys' cubic
            of radius 2.
        coordinates: What the two grids share: the outer edges of their cells (`"half_pixel"`) or
            the centers of their corner cells (`"align_corners"`).
        antialias: Whether the kernel is widened when the grid shrinks, so that no row is skipped.
        cubic_a: The slope of the cubic at distance 1. Used by `"bicubic"` only.
        border: Neighbors outside the grid repeat the edge (`"clamp"`), or are left out and the
            rest made to sum to one (`"renormalize"`).
        size_offset: Added to the new size when the step between samples is computed.
    """

    kernel: Literal["bilinear", "bicubic"]
    coordinates: Literal["half_pixel", "align_corners"] = "half_pixel"
    antialias: bool = False
    cubic_a: float = -0.75
    border: Literal["clamp", "renormalize"] = "clamp"
    size_offset: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, f"be one of {choices}", value)
        _require(isinstance(self.antialias, bool), "antialias", "be a bool", self.antialias)
        _require(-1 <= self.cubic_a <= 0, "cubic_a", "be between -1 and 0", self.cubic_a)
        # From 1 on, there would be room for another row.
        fits = 0 <= self.size_offset < 1
        _require(fits, "size_offset", "be at least 0 and less than 1", self.size_offset)
        # No source combines these with aligned corners, so there are no numbers to agree with.
        if self.coordinates == "align_corners":
            rule = "be {} when coordinates='align_corners'"
            _require(not self.antialias, "antialias", rule.format(False), self.antialias)
            _require(self.size_offset == 0, "size_offset", rule.format(0), self.size_offset)


PRESETS: dict[str, Interpolation] = {
    # vision_transformer `checkpoint.py: load_pretrained`, scenic: scipy.ndimage.zoom(order=1).
    "google": Interpolation("bilinear", "align_corners"),
    # big_vision `models/vit.py: resample_posemb`: the same scipy.ndimage.zoom(order=1).
    "big_vision": Interpolation("bilinear", "align_corners"),
    # big_vision `models/proj/flexi/vit.py`: jax.image.resize("linear"), antialiased by default.
    "flexivit": Interpolation("bilinear", antialias=True, border="renormalize"),
    # timm `layers/pos_embed.py: resample_abs_pos_embed`, its defaults.
    "timm": Interpolation("bicubic", antialias=True, cubic_a=-0.5, border="renormalize"),
    # timm `models/vision_transformer.py: _load_weights` (.npz); its FlexiViTs use it too.
    "timm_npz": Interpolation("bilinear"),
    # transformers `interpolate_pos_encoding` of ViT, DeiT and DINOv2: F.interpolate(size=...).
    "huggingface": Interpolation("bicubic"),
    # transformers Dinov2WithRegisters; official DINOv2 with registers (antialias, offset 0) too.
    "huggingface_dinov2_registers": Interpolation(
        "bicubic", antialias=True, cubic_a=-0.5, border="renormalize"
    ),
    # dinov2 `models/vision_transformer.py: interpolate_pos_encoding`, interpolate_offset=0.1.
    "dinov2": Interpolation("bicubic", size_offset=0.1),
    # DeiT `main.py` and MAE `util/pos_embed.py`: F.interpolate(align_corners=False).
    "deit": Interpolation("bicubic"),
    # torchvision `models/vision_transformer.py: interpolate_embeddings`.
    "torchvision": Interpolation("bicubic", "align_corners"),
}


def matrix(old: int, new: int, interpolation: str | Interpolation) -> NDArray[np.float64]:
    """The weights that take `old` samples on a line to `new`.

    Args:
        old: The number of samples there are.
        new: The number of samples wanted.
        interpolation: A name in `PRESETS`, or an `Interpolation`.

    Returns:
        An array of shape `(new, old)`; each row sums to one.
    """
    rule = _resolve(interpolation)
    _require(_is_size(old), "old", "be a positive integer", old)
    _require(_is_size(new), "new", "be a positive integer", new)
    if rule.coordinates == "align_corners":
        # Deviation: scipy's zoom leaves the last row zero where i * step rounds to beyond old - 1
        # (16 -> 30 and 24 -> 42 are two such pairs); here it stays the table's last row.
        step = (old - 1) / max(new - 1, 1)  # a single sample is taken at the first corner
        centers = np.arange(new) * step  # (new,)
    else:
        step = old / (new + rule.size_offset)
        centers = (np.arange(new) + 0.5) * step - 0.5  # (new,)
    stretch = max(step, 1.0) if rule.antialias else 1.0
    reach = math.ceil(stretch * (1 if rule.kernel == "bilinear" else 2))
    taps = np.arange(-reach, old + reach)  # the grid and what the kernel sees beyond it
    distances = np.abs(centers[:, None] - taps) / stretch  # (new, old + 2 * reach)
    if rule.kernel == "bilinear":
        weights = np.maximum(1.0 - distances, 0.0)
    else:
        weights = _cubic(distances, rule.cubic_a)
    inside = weights[:, reach:-reach].copy()  # (new, old)
    if rule.border == "clamp":
        inside[:, 0] += weights[:, :reach].sum(axis=1)
        inside[:, -1] += weights[:, -reach:].sum(axis=1)
    return inside / inside.sum(axis=1, keepdims=True)  # (new, old)


def resample_grid(
    table: Any,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    interpolation: str | Interpolation = "google",
    prefix: int = 0,
) -> NDArray[Any]:
    """A position table for another grid, computed in float64.

    Args:
        table: An array of shape `(..., prefix + old_height * old_width, D)`, row by row.
        old_grid: `(height, width)` of the table, in patches.
        new_grid: `(height, width)` wanted.
        interpolation: A name in `PRESETS`, or an `Interpolation`.
        prefix: How many leading rows (class token, registers) are kept as they are.

    Returns:
        A new array of shape `(..., prefix + new_height * new_width, D)` in the table's dtype. For
        the same grid it is the table bit for bit, as in every source.

    Example:
    >>> resample_grid(np.zeros((1, 1 + 7 * 7, 768)), (7, 7), (12, 20), "timm", prefix=1).shape
    (1, 241, 768)
    """
    rule = _resolve(interpolation)
    table = np.asarray(table)
    old_h, old_w = _check_grid("old_grid", old_grid)
    new_h, new_w = _check_grid("new_grid", new_grid)
    _require(_is_size(prefix, least=0), "prefix", "be an integer of at least 0", prefix)
    # Whole numbers would be rounded without a word on the way back.
    _require(table.dtype.kind not in "biuc", "table", "hold real floats", table.dtype, "dtype")
    rows = prefix + old_h * old_w
    held = table.shape[-2] if table.ndim >= 2 else None
    count = f"have prefix + old_grid = {prefix} + {old_h} * {old_w} = {rows} rows"
    _require(held == rows, "table", count, table.shape, "shape")
    if (old_h, old_w) == (new_h, new_w):
        return table.copy()

    *lead, _, width = table.shape
    grid = table[..., prefix:, :].astype(np.float64)
    grid = matrix(old_h, new_h, rule) @ grid.reshape(*lead, old_h, old_w * width)
    grid = grid.reshape(*lead, new_h, old_w, width)
    grid = matrix(old_w, new_w, rule) @ grid  # (..., new_h, new_w, D)
    grid = grid.reshape(*lead, new_h * new_w, width).astype(table.dtype)
    return np.concatenate([table[..., :prefix, :], grid], axis=-2)


def _cubic(x: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    """Keys' convolution kernel (1981) at distances `x >= 0`."""
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = a * (((x - 5.0) * x + 8.0) * x - 4.0)
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _resolve(interpolation: str | Interpolation) -> Interpolation:
    if isinstance(interpolation, Interpolation):
        return interpolation
    known = isinstance(interpolation, str) and interpolation in PRESETS
    rule = f"be an Interpolation or one of {sorted(PRESETS)}"
    _require(known, "interpolation", rule, interpolation)
    return PRESETS[interpolation]


def _check_grid(name: str, grid: tuple[int, int]) -> tuple[int, int]:
    pair = isinstance(grid, (tuple, list)) and len(grid) == 2 and all(map(_is_size, grid))
    _require(pair, name, "be two positive integers (height, width)", grid)
    return int(grid[0]), int(grid[1])


def _is_size(value: object, least: int = 1) -> bool:
    return isinstance(value, (int, np.integer)) and int(value) >= least

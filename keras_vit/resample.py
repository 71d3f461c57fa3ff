"""Resampling of position tables to another grid, by the rule of the code that trained them.

Each library resizes learned position tables in its own way, and `keras.ops.image.resize` differs
between backends. So the rules are implemented in NumPy, as one small matrix for the rows and one
for the columns. Each library's rule has a name in `PRESETS`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from keras_vit.config import ViTConfig  # which imports this module

_CHOICES = {
    "kernel": ("bilinear", "bicubic"),
    "coordinates": ("half_pixel", "align_corners", "geometric"),
    "border": ("clamp", "renormalize"),
}


# Defined first, because the presets are checked when they are created.
def _require(met: bool, name: str, rule: str, value: object, attribute: str = "") -> None:
    if not met:
        received = f"{name}.{attribute}" if attribute else name
        raise ValueError(f"{name} must {rule}. Received: {received}={value!r}")


@dataclass(frozen=True)
class Interpolation:
    """A rule for resizing.

    Args:
        kernel: The weight of a neighbor by its distance: the triangle of radius 1, or Keys' cubic
            of radius 2.
        coordinates: What both grids share: the outer edges of their cells (`"half_pixel"`), the
            centers of their corner cells (`"align_corners"`), or their centers, from which the old
            samples are ever farther apart, in geometric progression (`"geometric"`).
        antialias: Whether to widen the kernel when the grid shrinks, so that no row is skipped.
        cubic_a: The slope of the cubic at distance 1. Used by `"bicubic"` only.
        border: Whether neighbors outside the grid repeat the edge (`"clamp"`) or are left out, with
            the other weights scaled to sum to one (`"renormalize"`).
        size_offset: Added to the new size when the step between samples is computed.
    """

    kernel: Literal["bilinear", "bicubic"]
    coordinates: Literal["half_pixel", "align_corners", "geometric"] = "half_pixel"
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
        # With 1 or more, another row would fit.
        fits = 0 <= self.size_offset < 1
        _require(fits, "size_offset", "be at least 0 and less than 1", self.size_offset)
        # No library combines these with other coordinates, so there is nothing to compare with.
        if self.coordinates != "half_pixel":
            rule = f"be {{}} when coordinates={self.coordinates!r}"
            _require(not self.antialias, "antialias", rule.format(False), self.antialias)
            _require(self.size_offset == 0, "size_offset", rule.format(0), self.size_offset)
        if self.coordinates == "geometric":
            rule = "be 'bilinear' when coordinates='geometric'"
            _require(self.kernel == "bilinear", "kernel", rule, self.kernel)


PRESETS: dict[str, Interpolation] = {
    # vision_transformer `checkpoint.py: load_pretrained`, scenic: scipy.ndimage.zoom(order=1).
    "google": Interpolation("bilinear", "align_corners"),
    # big_vision `models/vit.py: resample_posemb`: the same scipy.ndimage.zoom(order=1).
    "big_vision": Interpolation("bilinear", "align_corners"),
    # big_vision `models/proj/flexi/vit.py`: jax.image.resize("linear"), antialiased by default.
    "flexivit": Interpolation("bilinear", antialias=True, border="renormalize"),
    # timm `layers/pos_embed.py: resample_abs_pos_embed`, its defaults.
    "timm": Interpolation("bicubic", antialias=True, cubic_a=-0.5, border="renormalize"),
    # timm `models/vision_transformer.py: _load_weights` (.npz); its FlexiViTs use it too. For patch
    # kernels also big_vision `models/proj/flexi/vit.py: resample_patchemb`.
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

OFFSETS: dict[str, Interpolation] = {
    # timm `layers/pos_embed_rel.py: resize_rel_pos_bias_table`, without TIMM_USE_SCIPY_INTERP.
    "timm": Interpolation("bilinear", "geometric"),
    # transformers `BeitRelativePositionBias`: F.interpolate(mode="bilinear").
    "huggingface": Interpolation("bilinear"),
}
"""The rules for tables of relative positions, where they differ from `PRESETS`."""


def matrix(old: int, new: int, interpolation: str | Interpolation) -> NDArray[np.float64]:
    """The weights that resample a line of `old` samples to `new` samples.

    Args:
        old: The number of samples.
        new: The new number of samples.
        interpolation: A name in `PRESETS`, or an `Interpolation`.

    Returns:
        An array of shape `(new, old)`; each row sums to one.
    """
    rule = _resolve(interpolation)
    _require(_is_size(old), "old", "be a positive integer", old)
    _require(_is_size(new), "new", "be a positive integer", new)
    if rule.coordinates == "geometric":
        return _geometric(old, new)
    if rule.coordinates == "align_corners":
        # Deviation: scipy's zoom returns zeros for the last row if i * step rounds to more than
        # old - 1 (as for 16 -> 30 and 24 -> 42); here it is the table's last row.
        step = (old - 1) / max(new - 1, 1)  # a single sample lies at the first corner
        centers = np.arange(new) * step  # (new,)
    else:
        step = old / (new + rule.size_offset)
        centers = (np.arange(new) + 0.5) * step - 0.5  # (new,)
    stretch = max(step, 1.0) if rule.antialias else 1.0
    reach = math.ceil(stretch * (1 if rule.kernel == "bilinear" else 2))
    taps = np.arange(-reach, old + reach)  # the samples, and the kernel's reach beyond them
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
    """Resamples a position table to another grid, in float64.

    Args:
        table: An array of shape `(..., prefix + old_height * old_width, D)`, row by row.
        old_grid: `(height, width)` of the table, in patches.
        new_grid: The new `(height, width)`.
        interpolation: A name in `PRESETS`, or an `Interpolation`.
        prefix: Number of leading rows (class token, registers) to keep unchanged.

    Returns:
        A new array of shape `(..., prefix + new_height * new_width, D)` in the table's dtype. For
        the same grid it equals the table bit for bit, as in every library.

    Example:
    >>> resample_grid(np.zeros((1, 1 + 7 * 7, 768)), (7, 7), (12, 20), "timm", prefix=1).shape
    (1, 241, 768)
    """
    rule = _resolve(interpolation)
    table = np.asarray(table)
    old_h, old_w = _check_grid("old_grid", old_grid)
    new_h, new_w = _check_grid("new_grid", new_grid)
    _require(_is_size(prefix, least=0), "prefix", "be an integer of at least 0", prefix)
    # Integers would be rounded silently.
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


def resample_kernel(
    kernel: Any, patch_size: tuple[int, int], interpolation: str | Interpolation = "timm_npz"
) -> NDArray[Any]:
    """Resamples a patch kernel to another patch size, so that resized patches give the same tokens.

    With B the matrix that resizes a patch, `pinv(B^T) w` is the kernel whose product with a resized
    patch is nearest to that of `w` with the patch itself; where B enlarges it is the same.

    Args:
        kernel: `(P, P, C, D)`.
        patch_size: The new height and width.
        interpolation: How patches are resized: a name in `PRESETS`, or an `Interpolation`.

    Returns:
        A new array `(P', P', C, D)` in the kernel's dtype.

    Reference:
        FlexiViT, arXiv 2212.08013, Section 3.4, "PI-resize".

    Example:
    >>> resample_kernel(np.zeros((32, 32, 3, 768)), (16, 16)).shape
    (16, 16, 3, 768)
    """
    kernel = np.asarray(kernel)
    _require(kernel.ndim == 4, "kernel", "have 4 axes", kernel.shape, "shape")
    new_h, new_w = _check_grid("patch_size", patch_size)
    old_h, old_w, *_ = kernel.shape
    # B is a matrix for the rows and one for the columns, and so is its pseudoinverse.
    rows = np.linalg.pinv(matrix(old_h, new_h, interpolation).T)  # (new_h, old_h)
    columns = np.linalg.pinv(matrix(old_w, new_w, interpolation).T)  # (new_w, old_w)
    new = np.einsum("ih,jw,hwcd->ijcd", rows, columns, kernel.astype(np.float64), optimize=True)
    return new.astype(kernel.dtype)


def resample_offsets(
    table: Any,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    interpolation: str | Interpolation = "google",
) -> NDArray[Any]:
    """Resamples a table of relative positions, one row per offset, for another grid of patches.

    Args:
        table: An array `((2 * old_height - 1) * (2 * old_width - 1) + k, h)`; the last k rows are
            kept unchanged.
        old_grid: `(height, width)` in patches.
        new_grid: The new `(height, width)`.
        interpolation: A name in `PRESETS`, or an `Interpolation`.

    Returns:
        A new array for `new_grid`.
    """
    if isinstance(interpolation, str):
        interpolation = OFFSETS.get(interpolation, interpolation)
    old_h, old_w = _check_grid("old_grid", old_grid)
    new_h, new_w = _check_grid("new_grid", new_grid)
    old, new = (2 * old_h - 1, 2 * old_w - 1), (2 * new_h - 1, 2 * new_w - 1)
    table = np.asarray(table)
    count = old[0] * old[1]
    return np.concatenate([resample_grid(table[:count], old, new, interpolation), table[count:]])


def _geometric(old: int, new: int) -> NDArray[np.float64]:
    """Linear interpolation of odd lines, whose old samples lie at 0, 1, 1 + q, 1 + q + q^2 ...

    The ratio q is that with which they reach as far as the new samples, at 0, 1, 2 ...
    """
    half, goal = old // 2, new // 2
    low, high = 1.01, 1.5  # so a smaller grid is cut out of the larger one, nearly
    while high - low > 1e-6:
        q = (low + high) / 2
        low, high = (low, q) if (1 - q**half) / (1 - q) > goal else (q, high)
    distances = np.cumsum(q ** np.arange(half))  # (old // 2,)
    knots = np.concatenate([-distances[::-1], [0.0], distances])  # (old,)
    centers = np.arange(new) - new // 2
    return np.stack([np.interp(centers, knots, row) for row in np.eye(old)], axis=1)  # (new, old)


def resized_weight(
    path: str, value: NDArray[Any], old: "ViTConfig", new: "ViTConfig"
) -> NDArray[Any]:
    """A weight of a model with the config `old`, for another image size or patch size in `new`."""
    *_, layer, name = path.split("/")
    rule = new.interpolation
    if path == "patches/projection/kernel" and old.patch_size != new.patch_size:
        # Only timm resizes patches by its own rule; the others have the paper's or none.
        kernel_rule = rule if rule == "timm" else "timm_npz"
        return resample_kernel(value, new.patch_size, kernel_rule)
    if layer == "position_embedding" and name == "table":
        return resample_grid(value, old.grid, new.grid, rule, prefix=old.num_prefix_rows)
    if layer == "position_embedding" and name in ("rows", "columns"):
        axis = 0 if name == "rows" else 1
        return resample_grid(value, (old.grid[axis], 1), (new.grid[axis], 1), rule)
    if layer == "relative_positions" and name == "table":
        return resample_offsets(value, old.grid, new.grid, rule)
    if layer == "relative_positions" and name == "keys":
        # The paper has no rule: offsets keep their share of the sequence's length.
        lines = (2 * old.num_tokens - 1, 1), (2 * new.num_tokens - 1, 1)
        flat = resample_grid(value.reshape(len(value), -1), *lines, rule)
        return flat.reshape(-1, *value.shape[1:])
    return value


def resizing_matrix(
    path: str, shape: tuple[int, ...], old: "ViTConfig", new: "ViTConfig"
) -> NDArray[np.float64] | None:
    """The matrix by which `resized_weight` multiplies a weight, or None if it leaves it alone.

    Resizing is linear, so the matrix is what becomes of the identity. With it, a weight of another
    size can be computed from the trained one inside a training step.

    Args:
        path: The weight's path.
        shape: Its shape in the config `old`.
        old: The config of the weight.
        new: The same with another image size or patch size.

    Returns:
        `(P'^2, P^2)` for a patch kernel `(P, P, C, D)`, `(rows', rows)` for a table `(rows, ...)`.
    """
    kernel = path == "patches/projection/kernel"
    if not kernel and not {"position_embedding", "relative_positions"} & set(path.split("/")):
        return None
    lines = shape[:2] if kernel else shape[:1]
    between = (1,) * (len(shape) - len(lines) - 1)
    count = math.prod(lines)
    identity = np.eye(count).reshape(*lines, *between, count)
    return resized_weight(path, identity, old, new).reshape(-1, count)


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

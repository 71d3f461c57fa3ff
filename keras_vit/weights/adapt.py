"""Adapts a checkpoint to the requested model: another grid, other channels, a new head."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.resample import resized_weight

LOG = logging.getLogger("keras_vit")
PATCHES, TABLE = "patches/projection/kernel", "position_embedding/table"
LINES = ("position_embedding/rows", "position_embedding/columns")
RELATIVE = ("relative_positions/table", "relative_positions/keys")
FIXED = ("width", "depth", "mlp_dim", "num_registers")
"""Sizes that a model has in common with its checkpoint."""


def in_head(path: str) -> bool:
    """Whether a weight belongs to the head."""
    return path.startswith("head/")


def pixel_kernel(config: ViTConfig) -> str:
    """The path of the kernel that reads pixels: its third axis is their channels."""
    return "stem/root_conv/kernel" if config.stem else "patches/projection/kernel"


def adapted(path: str, value: np.ndarray, source: ViTConfig, target: ViTConfig) -> np.ndarray:
    """A weight of `source`, changed for `target`."""
    if path == pixel_kernel(source) and source.in_channels != target.in_channels:
        parts = np.split(value, source.patch_copies, axis=2)
        value = np.concatenate([adapt_channels(p, target.in_channels) for p in parts], axis=2)
    return resized_weight(path, value, source, target)


def adapted_shape(
    path: str, shape: tuple[int, ...], source: ViTConfig, target: ViTConfig
) -> tuple[int, ...]:
    """The shape that `adapted` returns for a weight of this shape."""
    if path == PATCHES and not source.stem:
        sides = shape[:2] if source.patch_shift else target.patch_size
        return (*sides, target.in_channels * source.patch_copies, shape[3])
    if path == pixel_kernel(source):
        return (*shape[:2], target.in_channels, shape[3])
    if path == TABLE:
        return (target.num_patches + source.num_prefix_rows, shape[1])
    if path in LINES:
        return (target.grid[LINES.index(path)], shape[1])
    if path.endswith(RELATIVE[0]):
        (rows, columns), prefix = target.grid, source.num_prefix_tokens
        return ((2 * rows - 1) * (2 * columns - 1) + 3 * prefix, shape[1])
    if path.endswith(RELATIVE[1]):
        tokens = target.num_patches + source.num_prefix_tokens
        return (2 * tokens - 1, *shape[1:])
    return shape


def adapt_channels(kernel: np.ndarray, count: int) -> np.ndarray:
    """A kernel of pixels for another number of channels, as in timm's `adapt_input_conv`.

    One channel is the sum of all, so that a gray image gives the same result. More channels repeat
    in order, scaled so that the sum keeps its size.

    Args:
        kernel: `(P, P, C, D)`.
        count: The new number of channels.

    Returns:
        `(P, P, count, D)`.
    """
    channels = kernel.shape[2]
    if count == 1:
        return kernel.sum(axis=2, keepdims=True)  # (P, P, 1, D)
    repeated = np.tile(kernel, (1, 1, math.ceil(count / channels), 1))[:, :, :count]
    return repeated * np.float32(channels / count)  # (P, P, count, D)


def _pixel_fields(source: ViTConfig, count: int) -> dict[str, Any]:
    """Pixel statistics for another number of channels: averaged, or repeated in order."""
    fields: dict[str, Any] = {}
    for name in ("pixel_mean", "pixel_std"):
        values = getattr(source, name)
        if isinstance(values, tuple):
            one = float(np.mean(values))
            many = tuple(values[i % len(values)] for i in range(count))
            fields[name] = one if count == 1 else many
    return fields


def log_changes(source: ViTConfig, target: ViTConfig, new_head: bool) -> None:
    """Logs how the model differs from the checkpoint."""
    if new_head:
        saved = f"{source.num_classes} classes" if source.num_classes else "no head"
        LOG.warning(
            "The head is new and untrained: %d classes; the checkpoint has %s",
            target.num_classes,
            saved,
        )
    if source.in_channels != target.in_channels:
        LOG.warning(
            "The patch kernel was adapted from %d to %d channels as in timm; "
            "pixel_mean=%s, pixel_std=%s",
            source.in_channels,
            target.in_channels,
            target.pixel_mean,
            target.pixel_std,
        )
    learned = target.position_table == "learned" or target.attention_positions
    if source.patch_size != target.patch_size:
        LOG.info("Patch kernel resampled from %s to %s", source.patch_size, target.patch_size)
    if source.grid != target.grid and learned:
        rule = target.interpolation
        LOG.info("Position table resampled from %s to %s by %r", source.grid, target.grid, rule)


def target_config(source: ViTConfig, given: Mapping[str, Any]) -> tuple[ViTConfig, bool]:
    """The config of the requested model, and whether its head is new.

    Args:
        source: The checkpoint's config.
        given: Fields that the caller passed.

    Raises:
        ValueError: A size is not the checkpoint's.
    """
    for name in FIXED:
        if name in given and given[name] != (saved := getattr(source, name)):
            raise ValueError(
                f"{name} must be {saved}, as in the checkpoint. Received: {name}={given[name]!r}"
            )
    fields: dict[str, Any] = {}
    classes = given.get("num_classes", source.num_classes)
    other = classes != source.num_classes
    if other:
        fields["labels"] = None
        # The sources drop the layer before the logits if they create a new head (Section 3.1 of the
        # paper: one linear layer for fine-tuning).
        if classes:
            fields["representation_size"] = None
            if source.head_bias is None:  # as in a projection, which a classifier replaces
                fields["head_bias"] = 0.0
    channels = given.get("in_channels", source.in_channels)
    if channels != source.in_channels:
        fields |= _pixel_fields(source, channels)
    return source.replace(**fields | dict(given)), other and bool(classes)

"""Adapts a checkpoint to the requested model: another grid, other channels, a new head."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.resample import resample_grid

LOG = logging.getLogger("keras_vit")
PATCHES, TABLE = "patches/projection/kernel", "position_embedding/table"


def in_head(path: str) -> bool:
    """Whether a weight belongs to the head."""
    return path.startswith("head/")


def adapted(path: str, value: np.ndarray, source: ViTConfig, target: ViTConfig) -> np.ndarray:
    """A weight of `source`, changed for `target`."""
    if path == PATCHES and source.in_channels != target.in_channels:
        return adapt_channels(value, target.in_channels)
    if path == TABLE and source.grid != target.grid:
        rule, prefix = target.interpolation, source.num_prefix_rows
        return resample_grid(value, source.grid, target.grid, rule, prefix=prefix)
    return value


def adapted_shape(
    path: str, shape: tuple[int, ...], source: ViTConfig, target: ViTConfig
) -> tuple[int, ...]:
    """The shape that `adapted` returns for a weight of this shape."""
    if path == PATCHES:
        return (*shape[:2], target.in_channels, shape[3])
    if path == TABLE:
        return (target.num_patches + source.num_prefix_rows, shape[1])
    return shape


def adapt_channels(kernel: np.ndarray, count: int) -> np.ndarray:
    """A patch kernel for another number of channels, as in timm's `adapt_input_conv`.

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
    if source.grid != target.grid and target.position_embedding == "learned":
        rule = target.interpolation
        LOG.info("Position table resampled from %s to %s by %r", source.grid, target.grid, rule)


def target_config(
    source: ViTConfig, given: Mapping[str, Any], new_head: bool = False
) -> tuple[ViTConfig, bool]:
    """The config of the requested model, and whether its head is new.

    Args:
        source: The checkpoint's config.
        given: Fields that the caller passed.
        new_head: Whether the checkpoint's head cannot be used.
    """
    fields: dict[str, Any] = {}
    classes = given.get("num_classes", source.num_classes)
    other = new_head or classes != source.num_classes
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

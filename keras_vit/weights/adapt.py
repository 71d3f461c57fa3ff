"""From what a checkpoint was made for to what is asked for: another grid, other channels."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.resample import resample_grid

LOG = logging.getLogger("keras_vit")
PATCHES, TABLE = "patches/projection/kernel", "position_embedding/table"
HEAD = ("head/kernel", "head/bias")


def adapted(path: str, value: np.ndarray, source: ViTConfig, target: ViTConfig) -> np.ndarray:
    """A weight of `source` as `target` needs it."""
    if path == PATCHES and source.in_channels != target.in_channels:
        return channels(value, target.in_channels)
    if path == TABLE and source.grid != target.grid:
        rule, prefix = target.interpolation, int(source.class_row)
        return resample_grid(value, source.grid, target.grid, rule, prefix=prefix)
    return value


def adapted_shape(
    path: str, shape: tuple[int, ...], source: ViTConfig, target: ViTConfig
) -> tuple[int, ...]:
    """The shape of what `adapted` makes of a weight of this shape."""
    if path == PATCHES:
        return (*shape[:2], target.in_channels, shape[3])
    if path == TABLE:
        return (target.num_patches + source.class_row, shape[1])
    return shape


def channels(kernel: np.ndarray, count: int) -> np.ndarray:
    """A patch kernel for another number of channels, as timm's `adapt_input_conv` makes it.

    For one channel the others are added up, so that a grey picture is seen as before; for more,
    the channels repeat in order and are scaled so that the sum keeps its size.

    Args:
        kernel: `(P, P, C, D)`.
        count: Channels wanted.

    Returns:
        `(P, P, count, D)`.
    """
    own = kernel.shape[2]
    if count == 1:
        return kernel.sum(axis=2, keepdims=True)  # (P, P, 1, D)
    repeated = np.tile(kernel, (1, 1, math.ceil(count / own), 1))[:, :, :count]
    return repeated * np.float32(own / count)  # (P, P, count, D)


def pixel_fields(source: ViTConfig, count: int) -> dict[str, Any]:
    """The pixel contract for another number of channels: averaged, or repeated in order."""
    fields: dict[str, Any] = {}
    for name in ("pixel_mean", "pixel_std"):
        values = getattr(source, name)
        if isinstance(values, tuple):
            one = float(np.mean(values))
            many = tuple(values[i % len(values)] for i in range(count))
            fields[name] = one if count == 1 else many
    return fields


def report(source: ViTConfig, target: ViTConfig, new_head: bool) -> None:
    """Says what the model has that the checkpoint has not."""
    if new_head:
        own = f"{source.num_classes} classes" if source.num_classes else "no head"
        LOG.warning(
            "The head is new and untrained: %d classes; the checkpoint has %s",
            target.num_classes,
            own,
        )
    if source.in_channels != target.in_channels:
        LOG.warning(
            "The patch kernel was made for %d channels and now takes %d, as timm adapts it; "
            "pixel_mean=%s, pixel_std=%s",
            source.in_channels,
            target.in_channels,
            target.pixel_mean,
            target.pixel_std,
        )
    if source.grid != target.grid and target.position_embedding == "learned":
        rule = target.interpolation
        LOG.info("Positions resampled from %s to %s by %r", source.grid, target.grid, rule)


def target_config(
    source: ViTConfig, given: Mapping[str, Any], new_head: bool = False
) -> tuple[ViTConfig, bool]:
    """The config to make of a checkpoint's, and whether its head is new.

    Args:
        source: The checkpoint's config.
        given: Fields as the caller gave them.
        new_head: Whether the checkpoint's head cannot be used.
    """
    fields: dict[str, Any] = {}
    classes = given.get("num_classes", source.num_classes)
    other = new_head or classes != source.num_classes
    if other:
        fields["labels"] = None
        # Sources drop the layer in front of the logits where they make a new head (the paper's
        # Section 3.1: one linear layer when fine-tuning).
        if classes:
            fields["representation_size"] = None
    channels = given.get("in_channels", source.in_channels)
    if channels != source.in_channels:
        fields |= pixel_fields(source, channels)
    return source.replace(**fields | dict(given)), other and bool(classes)

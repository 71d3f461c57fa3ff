"""Images as patches of pixels, and back.

Shapes: B batch, H x W pixels, C channels, P x P patch, N patches, (gh, gw) the grid.
"""

import numpy as np
from keras import ops

from keras_vit.config import ViTConfig

MASKED_GRAY = 0.5
"""The color of hidden patches in pictures."""


def to_patches(images, config: ViTConfig):
    """Cuts images into patches: `(B, H, W, C)` to float32 `(B, N, P * P * C)`.

    Pixels after the last whole patch (`ignore_remainder`) are in none.
    """
    (gh, gw), (ph, pw), channels = config.grid, config.patch_size, config.in_channels
    x = ops.cast(images, "float32")[:, : gh * ph, : gw * pw]
    x = ops.reshape(x, (-1, gh, ph, gw, pw, channels))
    x = ops.transpose(x, (0, 1, 3, 2, 4, 5))  # (B, gh, gw, P, P, C)
    return ops.reshape(x, (-1, gh * gw, ph * pw * channels))


def to_images(patches, config: ViTConfig):
    """The reverse: `(B, N, P * P * C)` to `(B, gh * P, gw * P, C)`."""
    (gh, gw), (ph, pw), channels = config.grid, config.patch_size, config.in_channels
    x = ops.reshape(patches, (-1, gh, gw, ph, pw, channels))
    x = ops.transpose(x, (0, 1, 3, 2, 4, 5))  # (B, gh, P, gw, P, C)
    return ops.reshape(x, (-1, gh * ph, gw * pw, channels))


def to_unit(images, config: ViTConfig):
    """Undoes the normalization of preprocessing: pixels in [0, 1]."""
    mean, std = (np.float32(v) for v in (config.pixel_mean, config.pixel_std))
    return ops.add(ops.multiply(images, std), mean)

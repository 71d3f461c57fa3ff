"""Pictures of what masked training predicts."""

from typing import Any, NamedTuple

import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_vit.train.objectives.objective import Objective
from keras_vit.train.objectives.patch_pixels import MASKED_GRAY, to_images, to_patches, to_unit


class Reconstruction(NamedTuple):
    """Images `(B, H, W, C)` with values in [0, 1], for figures."""

    original: NDArray[Any]
    masked: NDArray[Any]
    """What the vit saw. Hidden patches are gray."""
    reconstruction: NDArray[Any]
    """What the vit saw, and its prediction of the hidden patches."""


class Reconstructs(Objective):
    """An objective that predicts the pixels of hidden patches: `reconstruct` shows them."""

    def predicted_pixels(self, images: Any, outputs: dict[str, Any]) -> Any:
        """The predicted pixels of all patches, in the range of `images`: `(B, N, P * P * C)`."""
        raise NotImplementedError(f"{type(self).__name__} must define predicted_pixels")

    def reconstruct(self, images: Any) -> Reconstruction:
        """Masks images as in evaluation and reconstructs them, for a figure.

        Args:
            images: `(B, H, W, C)`, preprocessed for the vit; a few of them.

        Returns:
            `original`, `masked` and `reconstruction`, float32 arrays in [0, 1].
        """
        config = self.vit.config
        images = ops.convert_to_tensor(images)
        outputs = self(images, training=False)
        predicted = self.predicted_pixels(images, outputs)
        original, predicted = (
            to_unit(to_images(p, config), config) for p in (to_patches(images, config), predicted)
        )
        size = int(np.prod(config.patch_size)) * config.in_channels
        mask = ops.expand_dims(ops.cast(outputs["mask"], "float32"), -1)  # (B, N, 1)
        mask = to_images(ops.repeat(mask, size, axis=-1), config)  # (B, H, W, C)
        seen = (1 - mask) * original
        arrays = (original, seen + mask * MASKED_GRAY, seen + mask * predicted)
        return Reconstruction(*(np.clip(ops.convert_to_numpy(a), 0, 1) for a in arrays))

"""Shifted patch tokenization: each patch sees the half patches around it."""

import keras
from keras import ops

COPIES = 5
"""The image itself, and four shifted ones."""


@keras.saving.register_keras_serializable("keras_vit")
class PatchShift(keras.layers.Layer):
    """Concatenates images with copies of themselves that are shifted by half a patch.

    Shapes: B batch, H x W pixels, C channels, P x P patch, s = P / 2, rounded down.

    `[x, x_lu, x_ru, x_lb, x_rb]` on the channels: pixel (i, j) of the four copies is pixel
    (i - s, j - s), (i - s, j + s), (i + s, j - s) and (i + s, j + s) of the image, or 0 beyond its
    edge. A patch of the result covers 2 P x 2 P pixels of the image, so that one product mixes
    neighboring patches, as a convolution would.

    Args:
        patch_size: Height and width of a patch; one int means a square.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        images: `(B, H, W, C)`.

    Returns:
        `(B, H, W, 5 C)`.

    Reference:
        arXiv 2112.13492, Section 3.2.

    Example:

    >>> PatchShift(patch_size=4)(keras.ops.ones((2, 16, 16, 3))).shape
    (2, 16, 16, 15)
    """

    def __init__(self, patch_size, **kwargs):
        super().__init__(**kwargs)
        pair = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        if len(pair) != 2 or not all(isinstance(p, int) and p > 1 for p in pair):
            raise ValueError(
                "patch_size must be an int of at least 2 or a pair of them. "
                f"Received: patch_size={patch_size!r}"
            )
        self.patch_size = pair

    def call(self, images):
        _, height, width, _ = ops.shape(images)
        rows, columns = (p // 2 for p in self.patch_size)
        x = ops.pad(images, ((0, 0), (rows, rows), (columns, columns), (0, 0)))
        copies = [
            x[:, top : top + height, left : left + width]
            for top in (0, 2 * rows)
            for left in (0, 2 * columns)
        ]
        return ops.concatenate([images, *copies], axis=-1)  # (B, H, W, 5 C)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], COPIES * input_shape[-1])

    def get_config(self):
        return {**super().get_config(), "patch_size": self.patch_size}

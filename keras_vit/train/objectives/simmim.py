"""SimMIM: hidden patches are a learned token, and a linear head predicts their pixels."""

import math
from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_int, require
from keras_vit.model import ViT
from keras_vit.train.objectives.masked import MaskedInPlace, mean_of_masked
from keras_vit.train.objectives.masking import random_block_mask
from keras_vit.train.objectives.objective import check_share
from keras_vit.train.objectives.patch_pixels import to_patches
from keras_vit.train.objectives.reconstruction import Reconstructs


@keras.saving.register_keras_serializable("keras_vit")
class SimMIM(Reconstructs, MaskedInPlace):
    """Trains a ViT to predict the pixels of hidden squares.

    Squares of `block_size` patches are hidden: their embeddings are replaced by a learned token,
    before the class token and the positions. A linear layer predicts each patch's pixels from its
    token.

    L = mean over the pixels of the hidden patches of |x_hat - x|

    The ViT processes all tokens, so that a step costs as much as in supervised training, and any
    positions work.

    Shapes: B batch, H x W pixels, C channels, P x P patch, N patches.

    Args:
        vit: A `ViT`. It is trained in place: `simmim.vit`.
        mask_ratio: Share of the squares that are hidden; their number is rounded up.
        block_size: Rows and columns of patches in a square. It must divide those of the image. The
            paper hides squares of 32 pixels: 2 patches of 16.
        seed: Random seed.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed for the ViT.
        training: Whether this is a step of training.
        mask: `(B, N)`, 1 for each patch to hide. None draws it.

    Returns:
        "prediction" `(B, N, P * P * C)` and "mask" `(B, N)`, 1 where a patch is hidden.

    Reference:
        arXiv 2111.09886.

    Example:

    >>> simmim = keras_vit.train.SimMIM(keras_vit.vit_b16(num_classes=0))
    >>> simmim.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.05))
    >>> simmim.fit(images)
    """

    def __init__(
        self,
        vit: ViT,
        *,
        mask_ratio: float = 0.6,
        block_size: int = 2,
        seed: int | None = None,
        name: str = "simmim",
        **kwargs: Any,
    ):
        check_share("mask_ratio", mask_ratio)
        holds = is_int(block_size) and block_size > 0
        require(holds, "block_size", "be a positive int", block_size)
        super().__init__(vit, seed=seed, name=name, **kwargs)
        config = vit.config
        rule = f"divide the rows and columns of patches, {config.grid}"
        divides = not any(side % block_size for side in config.grid)
        require(divides, "block_size", rule, block_size)
        self.mask_ratio = mask_ratio
        self.block_size = block_size
        blocks = config.num_patches // block_size**2
        self.num_masked = math.ceil(blocks * mask_ratio)
        rule = f"leave at least one of the {blocks} squares visible"
        require(self.num_masked < blocks, "mask_ratio", rule, mask_ratio)
        size = math.prod(config.patch_size) * config.in_channels
        self.pixels = keras.layers.Dense(size, dtype=vit.dtype_policy, name="pixels")
        self.pixels.build((None, None, config.width))

    def call(self, images, training=None, mask=None):
        z = self._embed(images)  # (B, N, D)
        if mask is None:
            mask = random_block_mask(
                *(ops.shape(z)[0], self.vit.config.grid, self.block_size, self.num_masked),
                seed=self.seed_for(training),
            )  # (B, N)
        z = self._mixed(z, self.mask_token, mask)  # (B, N, D)
        prediction = self.pixels(self._encode_patches(z, training))  # (B, N, P * P * C)
        return {
            "prediction": ops.cast(prediction, "float32"),
            "mask": ops.cast(mask, "float32"),
        }

    def image_losses(self, images, labels, outputs):
        target = to_patches(images, self.vit.config)  # (B, N, P * P * C)
        # Deviation: the authors add 1e-5 to the number of hidden pixels, which is never 0 here.
        losses = ops.mean(ops.abs(outputs["prediction"] - target), axis=-1)  # (B, N)
        return mean_of_masked(losses, outputs["mask"])  # (B,)

    def predicted_pixels(self, images, outputs):
        return outputs["prediction"]

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "mask_ratio": self.mask_ratio,
            "block_size": self.block_size,
        }

"""Masked patch prediction: the self-supervision of the ViT paper."""

import math
from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_int, require
from keras_vit.model import ViT
from keras_vit.train.objectives.masked import MaskedInPlace, mean_of_masked
from keras_vit.train.objectives.masking import random_mask
from keras_vit.train.objectives.objective import check_share
from keras_vit.train.objectives.patch_pixels import to_patches, to_unit

MASKED, REPLACED = 0.8, 0.1
"""Shares of the corrupted patches: a learned token, another patch. The rest is kept."""
MAX_BITS = 16


@keras.saving.register_keras_serializable("keras_vit")
class MaskedPatchPrediction(MaskedInPlace):
    """Trains a ViT to predict the mean colors of corrupted patches.

    Half of the patches of each image are corrupted, at random: 80 % of them become a learned mask
    token, 10 % the embedding of another patch of the same image, also at random, and 10 % stay as
    they are. This happens before the class token and the positions. A linear layer predicts the
    3-bit mean color of each corrupted patch from its token.

    L = mean over the corrupted patches of -log softmax(y_i)[color_i]

    The color is that of the pixels in [0, 1], x * pixel_std + pixel_mean of the ViT's config, which
    undoes the preprocessing. A patch's mean of a channel, which is in [0, 1], has the 3-bit value
    v = min(floor(8 mean), 7); color = v_red + 8 v_green + 64 v_blue, one of 512.

    Shapes: B batch, H x W pixels, C channels, N patches, K colors.

    Args:
        vit: A `ViT`. It is trained in place: `mpp.vit`.
        mask_ratio: Share of the patches that are corrupted, rounded down, but one at the least.
        bits: Bits of a channel's mean; there are K = 2^(C bits) colors.
        seed: Random seed.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed for the ViT.
        training: Whether this is a step of training.

    Returns:
        "logits" `(B, N, K)` and "mask" `(B, N)`, 1 where a patch is corrupted.

    Reference:
        arXiv 2010.11929, Appendix B.1.2.

    Example:

    >>> mpp = keras_vit.train.MaskedPatchPrediction(keras_vit.vit_b16(num_classes=0))
    >>> mpp.compile(keras.optimizers.Adam(2e-4))
    >>> mpp.fit(images)
    """

    def __init__(
        self,
        vit: ViT,
        *,
        mask_ratio: float = 0.5,
        bits: int = 3,
        seed: int | None = None,
        name: str = "masked_patch_prediction",
        **kwargs: Any,
    ):
        check_share("mask_ratio", mask_ratio)
        require(is_int(bits) and bits > 0, "bits", "be a positive int", bits)
        super().__init__(vit, seed=seed, name=name, **kwargs)
        config = vit.config
        rule = f"be at most {MAX_BITS // config.in_channels} with {config.in_channels} channels"
        require(bits * config.in_channels <= MAX_BITS, "bits", rule, bits)
        self.mask_ratio = mask_ratio
        self.bits = bits
        self.num_masked = max(1, int(config.num_patches * mask_ratio))
        # The logits are in float32, as those of a ViT.
        self.colors = keras.layers.Dense(
            2 ** (bits * config.in_channels), dtype="float32", name="colors"
        )
        self.colors.build((None, None, config.width))

    def call(self, images, training=None):
        z = self._embed(images)  # (B, N, D)
        shape = (ops.shape(z)[0], self.vit.config.num_patches)
        mask = random_mask(*shape, self.num_masked, self.seed_for(training, 0))
        kind = keras.random.uniform(shape, seed=self.seed_for(training, 1))
        others = self._other_patches(z, self.seed_for(training, 2))  # (B, N, D)
        replaced = mask * ops.cast(kind >= 1 - REPLACED, "float32")
        z = self._mixed(z, others, replaced)
        z = self._mixed(z, self.mask_token, mask * ops.cast(kind < MASKED, "float32"))
        logits = self.colors(self._encode_patches(z, training))  # (B, N, K)
        return {"logits": logits, "mask": mask}

    def _other_patches(self, z: Any, seed: Any) -> Any:
        """For each patch the embedding of another one of the same image."""
        batch, count = ops.shape(z)[0], self.vit.config.num_patches
        # Steps of 1 to N - 1, around the end: never 0.
        steps = keras.random.randint((batch, count), 1, count, seed=seed)
        index = ops.mod(ops.arange(count, dtype="int32") + steps, count)  # (B, N)
        return ops.take_along_axis(z, ops.expand_dims(index, -1), axis=1)  # (B, N, D)

    def color_classes(self, images: Any) -> Any:
        """The color of each patch: `(B, H, W, C)`, preprocessed, to int32 `(B, N)`."""
        config = self.vit.config
        shape = (-1, config.num_patches, math.prod(config.patch_size), config.in_channels)
        pixels = ops.reshape(to_patches(images, config), shape)  # (B, N, P * P, C)
        mean = to_unit(ops.mean(pixels, axis=2), config)  # (B, N, C)
        levels = 2**self.bits
        values = ops.clip(ops.floor(mean * levels), 0, levels - 1)
        digits = ops.convert_to_tensor([levels**i for i in range(config.in_channels)], "int32")
        return ops.sum(ops.cast(values, "int32") * digits, axis=-1)  # (B, N)

    def image_losses(self, images, labels, outputs):
        losses = ops.sparse_categorical_crossentropy(
            self.color_classes(images), outputs["logits"], from_logits=True
        )  # (B, N)
        return mean_of_masked(losses, outputs["mask"])  # (B,)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mask_ratio": self.mask_ratio, "bits": self.bits}

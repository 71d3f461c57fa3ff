"""Masked autoencoders (MAE): the vit sees a quarter of the patches, a decoder draws the rest."""

import math
import os
from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_int, require
from keras_vit.model import ViT
from keras_vit.train.objectives.mae_decoder import MAEDecoder
from keras_vit.train.objectives.masked import Masked, mean_of_masked
from keras_vit.train.objectives.masking import ranks
from keras_vit.train.objectives.objective import check_share, refuse
from keras_vit.train.objectives.patch_pixels import to_patches
from keras_vit.train.objectives.reconstruction import Reconstructs
from keras_vit.weights.load import from_pretrained, local_path
from keras_vit.weights.training_parts import find_decoder, read_values

EPSILON = 1e-6  # of the normalized pixels


@keras.saving.register_keras_serializable("keras_vit")
class MAE(Reconstructs, Masked):
    """Trains a ViT as a masked autoencoder.

    Three quarters of the patches of each image are hidden. The ViT processes the others alone, a
    quarter of the tokens; a small decoder, which is thrown away after training, predicts the pixels
    of the hidden patches.

    L = mean over the hidden patches of (x_hat_i - x'_i)^2

    where x'_i is a patch's pixels less their mean, divided by their standard deviation (the
    unbiased one). The loss of patches that the ViT saw is not part of L.

    Positions must be added before the blocks: rotary and relative ones are refused. All tokens
    before the patches, such as the class token, are always processed. The paper's ViTs have the
    fixed sines and cosines of `sincos_2d(endpoint=False)`, which published files hold as a table
    and which this class trains further, as it does a learned table.

    Shapes: B batch, H x W pixels, C channels, P x P patch, N patches, n visible patches.

    Args:
        vit: A `ViT`. It is trained in place: `mae.vit`.
        mask_ratio: Share of the patches that are hidden; n = int(N (1 - mask_ratio)).
        decoder_width: Width of the decoder, a multiple of 4.
        decoder_depth: Its number of blocks.
        decoder_heads: Its attention heads.
        decoder_mlp_dim: Hidden size of its MLPs; None means 4 times its width.
        normalize_pixels: Whether each patch of the target is normalized.
        seed: Random seed.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed for the ViT.
        training: Whether this is a step of training.
        noise: `(B, N)`: the n patches with the lowest noise are visible. None draws it.

    Returns:
        "prediction" `(B, N, P * P * C)` and "mask" `(B, N)`, 1 where a patch is hidden.

    Reference:
        arXiv 2111.06377.

    Example:

    >>> mae = keras_vit.train.MAE(keras_vit.vit_b16(num_classes=0))
    >>> mae.compile(keras.optimizers.AdamW(1.5e-4, weight_decay=0.05, beta_2=0.95))
    >>> mae.fit(images)
    >>> mae.vit.save("trained.keras")
    """

    def __init__(
        self,
        vit: ViT,
        *,
        mask_ratio: float = 0.75,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        decoder_mlp_dim: int | None = None,
        normalize_pixels: bool = True,
        seed: int | None = None,
        name: str = "mae",
        **kwargs: Any,
    ):
        check_share("mask_ratio", mask_ratio)
        sizes = {"decoder_width": decoder_width, "decoder_depth": decoder_depth}
        sizes |= {"decoder_heads": decoder_heads, "decoder_mlp_dim": decoder_mlp_dim or 1}
        for argument, value in sizes.items():
            require(is_int(value) and value > 0, argument, "be a positive int", value)
        require(decoder_width % 4 == 0, "decoder_width", "be a multiple of 4", decoder_width)
        rule = f"divide decoder_width={decoder_width}"
        require(decoder_width % decoder_heads == 0, "decoder_heads", rule, decoder_heads)
        flag = isinstance(normalize_pixels, bool)
        require(flag, "normalize_pixels", "be True or False", normalize_pixels)
        super().__init__(vit, seed=seed, name=name, **kwargs)
        config = vit.config
        self.mask_ratio = mask_ratio
        self.num_visible = int(config.num_patches * (1 - mask_ratio))
        rule = f"leave at least one of the {config.num_patches} patches visible"
        require(self.num_visible, "mask_ratio", rule, mask_ratio)
        self.decoder_width = decoder_width
        self.decoder_depth = decoder_depth
        self.decoder_heads = decoder_heads
        self.decoder_mlp_dim = decoder_mlp_dim
        size = math.prod(config.patch_size) * config.in_channels
        rule = "be False for patches of one number, which have no deviation"
        require(size > 1 or not normalize_pixels, "normalize_pixels", rule, normalize_pixels)
        self.normalize_pixels = normalize_pixels
        # Not as an attribute: its layers are the vit's.
        embed = keras.Model(vit.input, vit.blocks[0].input)
        self._embed = lambda images, training: embed(images, training=training)
        self.decoder = MAEDecoder(
            config.grid,
            config.num_prefix_tokens,
            decoder_width,
            decoder_depth,
            decoder_heads,
            decoder_mlp_dim or 4 * decoder_width,
            size,
            norm_epsilon=config.norm_epsilon,
            gelu=config.gelu,
            dtype=vit.dtype_policy,
            name="decoder",
        )
        self.decoder.build((None, None, config.width))

    def _check_vit(self, vit: ViT) -> None:
        super()._check_vit(vit)
        rule = (
            "be a table or 'none': attention can only know the positions of all patches, of which "
            "MAE leaves out some"
        )
        place = vit.config.position_embedding
        refuse(vit.config.attention_positions, "position_embedding", rule, place)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike,
        *,
        mask_ratio: float | None = None,
        decoder_heads: int | None = None,
        normalize_pixels: bool | None = None,
        seed: int | None = None,
        dtype: Any = None,
        **config_fields: Any,
    ) -> "MAE":
        """A masked autoencoder with the encoder and the decoder of a published file.

        Args:
            source: As for `keras_vit.from_pretrained`: the files of facebookresearch/mae (converted
                to safetensors) or of transformers' ViT-MAE, with their decoder.
            mask_ratio: None takes what the file's config.json states, or 0.75.
            decoder_heads: Its attention heads; None takes what the config.json states, or 16, as
                published.
            normalize_pixels: Whether the decoder predicts normalized pixels. None takes what the
                config.json states, or True. (The files named mae_visualize_* predict plain pixels.)
            seed: Random seed.
            dtype: dtype policy of the ViT and the decoder.
            **config_fields: As for `keras_vit.from_pretrained`. `num_classes` is 0 by default. With
                another `image_size`, the decoder's positions are computed anew.

        Returns:
            An `MAE`.

        Example:

        >>> mae = keras_vit.train.MAE.from_pretrained("hf://facebook/vit-mae-base")
        >>> original, masked, reconstruction = mae.reconstruct(images)
        """
        path = local_path(source)
        decoder = find_decoder(path, decoder_heads)
        vit = from_pretrained(path, dtype=dtype, **{"num_classes": 0, **config_fields})
        given = {"mask_ratio": mask_ratio, "normalize_pixels": normalize_pixels}
        stated = {**decoder.stated, **{k: v for k, v in given.items() if v is not None}}
        mae = cls(vit, seed=seed, **decoder.sizes, **stated)
        weights = {w.path.split("/", 1)[1]: w for w in mae.decoder.weights}  # without "decoder/"
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        # Positions of another grid stay as they are computed.
        part = r"decoder|mask_token", ("positions",)
        for name, value in read_values(path, decoder.rows, shapes, *part).items():
            weights[name].assign(value)
        return mae

    def call(self, images, training=None, noise=None):
        k = self.vit.config.num_prefix_tokens
        z = self._embed(images, training)  # (B, k + N, D)
        if noise is None:
            shape = (ops.shape(z)[0], self.vit.config.num_patches)
            noise = keras.random.uniform(shape, seed=self.seed_for(training))
        order, rank = ranks(noise)  # (B, N)
        visible = ops.expand_dims(order[:, : self.num_visible], -1)  # (B, n, 1)
        patches = ops.take_along_axis(z[:, k:], visible, axis=1)  # (B, n, D)
        z = ops.concatenate([z[:, :k], patches], axis=1)  # (B, k + n, D)
        for block in self.vit.blocks:
            z = block(z, training=training)
        if self.vit.config.final_norm == "before_pooling":
            z = self.vit.get_layer("encoder_norm")(z)
        prediction = self.decoder(z, rank, training=training)  # (B, N, P * P * C)
        return {
            "prediction": ops.cast(prediction, "float32"),
            "mask": ops.cast(rank >= self.num_visible, "float32"),
        }

    def image_losses(self, images, labels, outputs):
        target = to_patches(images, self.vit.config)  # (B, N, P * P * C)
        if self.normalize_pixels:
            mean, deviation = _statistics(target)
            target = (target - mean) / deviation
        losses = ops.mean((outputs["prediction"] - target) ** 2, axis=-1)  # (B, N)
        return mean_of_masked(losses, outputs["mask"])  # (B,)

    def predicted_pixels(self, images, outputs):
        """The predicted pixels of all patches, in the range of `images`.

        A model of normalized pixels does not predict a patch's mean and deviation: they are the
        original's, as in the figures of the paper.
        """
        prediction = outputs["prediction"]
        if not self.normalize_pixels:
            return prediction
        mean, deviation = _statistics(to_patches(images, self.vit.config))
        return prediction * deviation + mean

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "mask_ratio": self.mask_ratio,
            "decoder_width": self.decoder_width,
            "decoder_depth": self.decoder_depth,
            "decoder_heads": self.decoder_heads,
            "decoder_mlp_dim": self.decoder_mlp_dim,
            "normalize_pixels": self.normalize_pixels,
        }


def _statistics(patches):
    """Mean and unbiased standard deviation of each patch, `(B, N, 1)` each."""
    size = patches.shape[-1]
    mean = ops.mean(patches, axis=-1, keepdims=True)
    variance = ops.sum((patches - mean) ** 2, axis=-1, keepdims=True) / (size - 1)
    return mean, ops.sqrt(variance + EPSILON)

"""What masked training has in common: a vit that sees a part of each image's patches."""

from typing import Any

import keras
from keras import ops

from keras_vit.model import ViT
from keras_vit.train.objectives.objective import Objective, refuse


class Masked(Objective):
    """An objective that hides patches of each image from the vit, and predicts them.

    Outputs are "mask" `(B, N)`, which is 1 for each patch that is hidden, and what the subclass
    predicts. It refuses a stem, which sees pixels beyond a patch's border, and `patch_dropout`
    and `token_merging`, which drop and merge the patches that are to be predicted.
    """

    def _check_vit(self, vit: ViT) -> None:
        super()._check_vit(vit)
        rule = "be None, because a stem mixes the pixels of neighboring patches"
        refuse(vit.config.stem, "stem", rule, vit.config.stem)
        rule = "be False, because shifted copies show the pixels of neighboring patches"
        refuse(vit.config.patch_shift, "patch_shift", rule, vit.config.patch_shift)
        refuse(vit.config.patch_dropout, "patch_dropout", "be 0", vit.config.patch_dropout)
        rule = "be 0, because every patch is predicted"
        refuse(vit.config.token_merging, "token_merging", rule, vit.config.token_merging)
        count = vit.config.num_patches
        refuse(count < 2, "image_size", "hold at least two patches", vit.config.image_size)


class MaskedInPlace(Masked):
    """Masked training in which all patches are processed, the hidden ones as other embeddings.

    Patch embeddings are replaced before the class token and the positions are added, so that the
    vit knows where the hidden patches are.
    """

    def __init__(self, vit: ViT, **kwargs):
        super().__init__(vit, **kwargs)
        patches, tokens = vit.get_layer("patches"), vit.features("tokens").output
        # Not as attributes: their layers are the vit's.
        encoder = keras.Model(patches.output, tokens)
        self._embed = lambda images: patches(images)
        self._encode = lambda z, training: encoder(z, training=training)
        self.mask_token = self.add_weight(
            name="mask_token",
            shape=(1, 1, vit.config.width),
            initializer=keras.initializers.TruncatedNormal(stddev=0.02),
        )

    def _encode_patches(self, z: Any, training: bool | None) -> Any:
        """From patch embeddings `(B, N, D)` to the patch tokens of the last block `(B, N, D)`."""
        return self._encode(z, training)[:, self.vit.config.num_prefix_tokens :]

    def _mixed(self, z: Any, others: Any, mask: Any) -> Any:
        """`others` where the mask `(B, N)` is 1, else z."""
        mask = ops.expand_dims(ops.cast(mask, z.dtype), -1)  # (B, N, 1)
        return z * (1 - mask) + ops.cast(others, z.dtype) * mask  # (B, N, D)


def mean_of_masked(losses: Any, mask: Any) -> Any:
    """The mean loss of each image's hidden patches, all of which have some: `(B, N)` to `(B,)`."""
    return ops.sum(losses * mask, axis=-1) / ops.sum(mask, axis=-1)

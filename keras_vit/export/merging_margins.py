"""How clear it is which tokens a model merges, image by image."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.model import ViT
from keras_vit.preprocessing import model_input

AT_ONCE = 8  # images


def merging_margins(model: ViT, images: Any) -> np.ndarray:
    """The least difference of two cosines that decided which tokens of an image are merged.

    Token merging is a choice: where two pairs of tokens are nearly as similar, rounding may merge
    the other one, and then the whole image is computed with other tokens.

    Args:
        model: A `ViT` in float32 that merges tokens.
        images: `(B, H, W, C)`, floats as the model takes them or uint8 pixels.

    Returns:
        The margins `(B,)`.
    """
    images = model_input(np.asarray(images), model.config)
    first, *_ = keras.tree.flatten(model.blocks[0].input)
    embed = keras.Model(model.input, first)
    blocks = model.blocks
    if model.config.pooling == "token":  # only the class token is read from the last block
        blocks = blocks[:-1]
    found = [np.zeros(0)]
    for i in range(0, len(images), AT_ONCE):
        x, sizes = embed(images[i : i + AT_ONCE], training=False), None
        margin = np.full(x.shape[0], np.inf)
        for block in blocks:
            x, keys = block.attend(x, training=False, token_sizes=sizes)
            seen = ops.convert_to_numpy(ops.stop_gradient(block.merging.margins(keys)))
            margin = np.minimum(margin, seen)
            x, sizes = block.merging(x, keys, sizes=sizes)
            x = ops.stop_gradient(block.transform(x, training=False))
        found.append(margin)
    return np.concatenate(found)

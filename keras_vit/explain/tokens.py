"""Runs a model block by block: what every explanation reads from it.

A block is called as it stands, without dropout, on the tokens of the one before, so that what is
read is what the model computes and nothing of the model changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.preprocessing import model_input

BATCH_BYTES = 1 << 26
"""Of the attention weights of one block that are held at a time."""


def check_model(model: Any) -> None:
    """Raises `ValueError` for what is no `ViT`."""
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a keras_vit.ViT. Received: model={model!r}")


def checked_images(images: Any, config: ViTConfig) -> np.ndarray:
    """Images as the model takes them, in float32; uint8 pixels of its size are normalized.

    Floats that were not normalized are refused, as `preprocessing.check_normalized` says.
    """
    # A tensor may be on a GPU or have a gradient, of which NumPy alone makes nothing.
    array = np.asarray(ops.convert_to_numpy(images) if ops.is_tensor(images) else images)
    known = array.dtype.kind == "f" or array.dtype == np.uint8
    if array.ndim != 4 or not len(array) or array.shape[1:] != config.input_shape or not known:
        raise ValueError(
            "images must be floats as the model takes them, or uint8 pixels, of shape "
            f"(batch, {', '.join(map(str, config.input_shape))}), at least one. "
            f"Received: images with shape {array.shape}, {array.dtype}"
        )
    return model_input(array, config)


def checked_block(name: str, value: Any, depth: int) -> int:
    """The index of a block, counted from 0 or from the end with negatives, from 0."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        rule = "be one int or several" if name == "layers" else "be an int"
        raise ValueError(f"{name} must {rule}. Received: {name}={value!r}")
    if not -depth <= value < depth:
        raise ValueError(f"{name} must be in [-{depth}, {depth - 1}]. Received: {name}={value!r}")
    return int(value) % depth


def checked_layers(layers: int | Sequence[int] | None, depth: int) -> list[int]:
    """The indices of the blocks that are asked for, from 0; None means all."""
    if layers is None:
        return list(range(depth))
    several = layers if isinstance(layers, Sequence | np.ndarray) else [layers]
    wanted = [checked_block("layers", i, depth) for i in several]
    if not wanted:
        raise ValueError(f"layers must name at least one block. Received: layers={layers!r}")
    return wanted


def read_tokens(config: ViTConfig) -> slice:
    """The tokens of the last block that the head reads: the patches where it reads each token."""
    if config.pooling == "token":
        return slice(0, 1)
    return slice(0 if config.pooling == "mean_all" else config.num_prefix_tokens, None)


def batches(images: np.ndarray, config: ViTConfig) -> Iterator[slice]:
    """Parts of a batch whose attention weights fit into `BATCH_BYTES`, or single images."""
    size = max(1, BATCH_BYTES // (4 * config.num_heads * config.num_tokens**2))
    for start in range(0, len(images), size):
        yield slice(start, start + size)


def embedded(model: ViT, images: np.ndarray) -> Any:
    """z_0 of Eq. 1, `(B, T, D)`: what the first block reads."""
    stem = keras.Model(model.input, model.blocks[0].input)
    return ops.stop_gradient(stem(images, training=False))


def after(block: Any, tokens: Any) -> Any:
    """What a block makes of tokens, `(B, T, D)`."""
    return ops.stop_gradient(block(tokens, training=False))  # torch keeps no graph then


def after_with_scores(block: Any, tokens: Any) -> tuple[Any, np.ndarray]:
    """The same, and the block's attention weights, `(B, h, T, T)` in float32."""
    tokens, scores = block(tokens, training=False, return_attention_scores=True)
    return ops.stop_gradient(tokens), as_numpy(scores)


def as_numpy(x: Any) -> np.ndarray:
    """A tensor of any backend and precision as float32."""
    return np.asarray(ops.convert_to_numpy(ops.cast(ops.stop_gradient(x), "float32")))


def patch_tokens(model: ViT, images: Any, block: int) -> np.ndarray:
    """The patch tokens that a block returns, `(B, N, D)` in float32.

    Those of the last block pass the last LayerNorm where the model has one before its pooling.
    """
    check_model(model)
    config = model.config
    index = checked_block("block", block, config.depth)
    images = checked_images(images, config)
    layers = list(model.blocks[: index + 1])
    if index == config.depth - 1 and config.final_norm == "before_pooling":
        layers.append(model.get_layer("encoder_norm"))
    found = []
    for part in batches(images, config):
        z = embedded(model, images[part])
        for layer in layers:
            z = after(layer, z)
        found.append(as_numpy(z)[:, config.num_prefix_tokens :])
    return np.concatenate(found)

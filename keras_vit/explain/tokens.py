"""Runs a model block by block, without changing it."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.preprocessing import model_input

BATCH_BYTES = 1 << 26
"""Most bytes of attention weights that are held in memory: those of one block."""


def check_vit(model: Any) -> None:
    """Raises `ValueError` unless `model` is a `ViT`."""
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a keras_vit.ViT. Received: model={model!r}")


def check_every_patch(config: ViTConfig) -> None:
    """Raises `ValueError` for a model that merges tokens: they are no patches any more."""
    if config.token_merging:
        raise ValueError(
            "model must not merge tokens, because it is explained patch by patch: pass "
            "keras_vit.with_token_merging(model, 0), which has the same weights. "
            f"Received: token_merging={config.token_merging}"
        )


def checked_images(images: Any, config: ViTConfig) -> np.ndarray:
    """Checks preprocessed images, or normalizes uint8 pixels of the model's size, to float32."""
    check_every_patch(config)
    # NumPy cannot read tensors that are on a GPU or require a gradient.
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
    """Checks the index of a block, and makes a negative one count from 0."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        rule = "be one int or several" if name == "layers" else "be an int"
        raise ValueError(f"{name} must {rule}. Received: {name}={value!r}")
    if not -depth <= value < depth:
        raise ValueError(f"{name} must be in [-{depth}, {depth - 1}]. Received: {name}={value!r}")
    return int(value) % depth


def checked_layers(layers: int | Sequence[int] | None, depth: int) -> list[int]:
    """Checks the indices of blocks, and makes them count from 0; None means all."""
    if layers is None:
        return list(range(depth))
    several = layers if isinstance(layers, Sequence | np.ndarray) else [layers]
    wanted = [checked_block("layers", i, depth) for i in several]
    if not wanted:
        raise ValueError(f"layers must name at least one block. Received: layers={layers!r}")
    return wanted


def read_tokens(config: ViTConfig) -> slice:
    """The tokens of the last block that the head reads; without pooling, the patches."""
    if config.pooling in ("token", "token_pair"):
        return slice(0, 1 if config.pooling == "token" else 2)
    every = config.pooling in ("mean_all", "map_all", "token_mean")
    return slice(0 if every else config.num_prefix_tokens, None)


def batch_slices(images: np.ndarray, config: ViTConfig) -> Iterator[slice]:
    """Parts of a batch whose attention weights fit into `BATCH_BYTES`, or single images."""
    size = max(1, BATCH_BYTES // (4 * config.num_heads * config.num_tokens**2))
    for start in range(0, len(images), size):
        yield slice(start, start + size)


def embedded(model: ViT, images: np.ndarray) -> Any:
    """z_0 of Eq. 1, `(B, T, D)`: the input of the first block."""
    tokens, *_ = keras.tree.flatten(model.blocks[0].input)  # a `rope_scale` may follow
    stem = keras.Model(model.input, tokens)
    return ops.stop_gradient(stem(images, training=False))


def after(block: Any, tokens: Any) -> Any:
    """The output of a block, `(B, T, D)`, without a graph on torch."""
    return ops.stop_gradient(block(tokens, training=False))


def after_with_scores(block: Any, tokens: Any) -> tuple[Any, np.ndarray]:
    """The output of a block, and its attention weights `(B, h, T, T)` in float32."""
    tokens, scores = block(tokens, training=False, return_attention_scores=True)
    return ops.stop_gradient(tokens), as_numpy(scores)


def as_numpy(x: Any) -> np.ndarray:
    """A tensor of any backend and precision as float32."""
    return np.asarray(ops.convert_to_numpy(ops.cast(ops.stop_gradient(x), "float32")))


def patch_tokens(model: ViT, images: Any, block: int) -> np.ndarray:
    """The patch tokens after a block, `(B, N, D)` in float32.

    After the last block, the model's last LayerNorm is applied if it comes before the pooling.
    """
    check_vit(model)
    config = model.config
    index = checked_block("block", block, config.depth)
    images = checked_images(images, config)
    layers = list(model.blocks[: index + 1])
    if index == config.depth - 1 and config.final_norm == "before_pooling":
        layers.append(model.get_layer("encoder_norm"))
    found = []
    for part in batch_slices(images, config):
        z = embedded(model, images[part])
        for layer in layers:
            z = after(layer, z)
        found.append(as_numpy(z)[:, config.num_prefix_tokens :])
    return np.concatenate(found)

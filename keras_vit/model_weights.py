"""The weights of a model: their shapes without one, their values, and a copy in float32."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.deferred import deferred
from keras_vit.model import ViT


@functools.lru_cache(maxsize=16)
def weight_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every weight of `ViT(config)`, in the model's order.

    They are read from a model with one block and without values: all blocks are alike.

    Example:

    >>> weight_shapes(ViTConfig())["head/kernel"]
    (768, 1000)
    """
    fields: dict[str, Any] = {"depth": 1, "labels": None}
    # "sincos_2d" and "rope" have no weights, and a table of any size.
    words = set(config.position_embedding.split("+")) - {"sincos_2d", "rope"}
    fields["position_embedding"] = "+".join(sorted(words)) or "none"
    with deferred():
        model = ViT(config.replace(**fields))
    shapes = {weight.path: tuple(weight.shape) for weight in model.weights}
    first = "encoder_block_0/"
    block = {path: shape for path, shape in shapes.items() if path.startswith(first)}
    before = list(shapes).index(next(iter(block)))
    every = {
        f"encoder_block_{i}/{path.removeprefix(first)}": shape
        for i in range(config.depth)
        for path, shape in block.items()
    }
    return dict(list(shapes.items())[:before]) | every | shapes


def merged_weights(model: ViT) -> dict[str, np.ndarray]:
    """Path and value of every weight, LoRA's adapters added to the kernels they belong to."""
    variables = {w.path: w for w in model.weights if "lora_kernel" not in w.path}
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            variables[layer._kernel.path] = layer.kernel  # Keras merges LoRA when this is read
    # A copy: JAX would share the array, and delete it in further training.
    return {path: np.array(keras.ops.convert_to_numpy(v)) for path, v in variables.items()}


def float32_copy(model: ViT, values: Mapping[str, np.ndarray] | None = None) -> ViT:
    """A model of the same config in float32, with LoRA merged.

    Args:
        model: The model.
        values: What `merged_weights` returned at some time; None means now.
    """
    values = merged_weights(model) if values is None else values
    with deferred() as weights:
        copy = ViT(model.config, name=model.name, dtype="float32")
    for weight in copy.weights:
        weights.fill(weight, values[weight.path])
    weights.initialize_rest()
    return copy

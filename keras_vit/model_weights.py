"""The weights of a model: their shapes without one, their values, and copies of a model."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.deferred import deferred
from keras_vit.layers import composite
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
    return _filled(model.config, model.name, "float32", values or merged_weights(model))


def with_token_merging(model: ViT, token_merging: int, schedule: str | None = None) -> ViT:
    """The same model with another number of merged tokens, which no weight depends on.

    Fewer tokens take less time, in training too. A trained model needs no further training:
    measure what it loses (`docs/speed.md`).

    Args:
        model: A `ViT`, not quantized. LoRA is merged.
        token_merging: r, the tokens that each block merges; 0 for none.
        schedule: "constant" or "decreasing", as `ViTConfig.token_merging_schedule`; None keeps
            the model's.

    Returns:
        A copy that is not compiled, or the model itself if it merges these tokens already.

    Reference:
        arXiv 2210.09461.

    Example:

    >>> faster = keras_vit.with_token_merging(model, 8)
    >>> faster.config.merged_tokens
    (8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)
    """
    schedule = schedule or model.config.token_merging_schedule
    config = model.config.replace(token_merging=token_merging, token_merging_schedule=schedule)
    if config == model.config:
        return model
    for layer in model._flatten_layers():
        if getattr(layer, "quantization_mode", None):
            raise ValueError(
                "model must not be quantized: change the float model, and quantize the copy. "
                f"Received: {layer.quantization_mode} in layer {layer.path!r}"
            )
    copy = _filled(config, model.name, model.dtype_policy, merged_weights(model))
    copy.trainable = model.trainable
    composite.set_trainable_parts(copy, composite.trainable_parts(model))
    return copy


def _filled(config: ViTConfig, name: str, dtype: Any, values: Mapping[str, np.ndarray]) -> ViT:
    with deferred() as weights:
        model = ViT(config, name=name, dtype=dtype)
    for weight in model.weights:
        weights.fill(weight, values[weight.path])
    weights.initialize_rest()
    return model

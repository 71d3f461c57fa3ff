"""Layers made of layers: which of their parts train, as a config that comes back."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras

KEY = "trainable_parts"


class Composite(keras.layers.Layer):
    """Puts the `trainable` flags of sub-layers into the config, where Keras drops them.

    Keras saves one flag a layer, and a layer that is made with `trainable=False` does not hand it
    on to its sub-layers: a frozen block, Keras' own MultiHeadAttention too, is trained after a
    reload. A subclass calls `self._restore_trainable()` at the end of `build`, where the last
    sub-layers are made.
    """

    _restored: Mapping[str, bool] | None = None

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        parts = trainable_parts(self) if self.built else self._restored
        return {**config, KEY: dict(parts)} if parts else config

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        config = dict(config)
        parts = config.pop(KEY, {})
        layer = super().from_config(config)
        layer._restored = parts
        return layer

    def _restore_trainable(self) -> None:
        if self._restored is not None:
            # Not `self.trainable = self.trainable`, which does nothing on TensorFlow.
            for part in self._flatten_layers(False, recursive=False):
                part.trainable = self.trainable
            set_trainable_parts(self, self._restored)
            self._restored = None


def trainable_parts(layer: keras.layers.Layer) -> dict[str, bool]:
    """The parts of a layer or model whose `trainable` is not that of what holds them.

    Adapters of LoRA are left out: Keras saves the kernel with them added. The kernel, which LoRA
    froze, is in.

    Args:
        layer: A built layer or a functional model.

    Returns:
        Path of a sub-layer or weight, relative to `layer` -> its flag; from the outside in.
    """
    return {
        path: part.trainable
        for path, part, owner in _parts(layer)
        if part.trainable != owner.trainable
    }


def set_trainable_parts(layer: keras.layers.Layer, parts: Mapping[str, bool]) -> None:
    """The reverse of `trainable_parts`, on a layer whose parts all have its own flag.

    Args:
        layer: A built layer or a functional model.
        parts: What `trainable_parts` returned, from a file that may hold anything.
    """
    if not isinstance(parts, Mapping) or any(type(flag) is not bool for flag in parts.values()):
        raise ValueError(
            f"{KEY} must map paths of layers or weights to True or False. Received: {KEY}={parts!r}"
        )
    known = {path: part for path, part, _ in _parts(layer)}
    if unknown := [path for path in parts if path not in known]:
        raise ValueError(
            f"{KEY} must name layers or weights of {layer.name!r}. "
            f"Received: {', '.join(map(repr, unknown))}"
        )
    for path, part in known.items():  # from the outside in, because a layer hands its flag on
        if path in parts:
            part.trainable = parts[path]


def _parts(layer, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every weight and sub-layer below a layer: its path, itself and the layer that holds it."""
    # Not `layer.weights`: scales of int8 and the like are never trained, whatever the flag says.
    for weight in layer._trainable_variables:
        if not weight.name.startswith("lora_kernel"):
            yield prefix + weight.name, weight, layer
    # Of a model only the graph's layers: what a user attaches to it is not in its config.
    is_model = isinstance(layer, keras.Model)
    for part in layer.layers if is_model else layer._flatten_layers(False, recursive=False):
        if part.weights:  # the flag of a Dropout says nothing
            yield prefix + part.name, part, layer
            yield from _parts(part, f"{prefix}{part.name}/")

"""Saves which sub-layers and weights of a layer or model are trainable."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras

KEY = "trainable_parts"


class Composite(keras.layers.Layer):
    """Base class of layers with sub-layers: saves their `trainable` flags in the config.

    Keras saves only the flag of the layer itself, and does not pass it on to sub-layers when the
    layer is created from its config. So without this class, frozen blocks would be trainable again
    after loading. Subclasses call `self._restore_trainable()` at the end of `build`.
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
            # `self.trainable = self.trainable` does nothing on TensorFlow.
            for part in self._flatten_layers(False, recursive=False):
                part.trainable = self.trainable
            set_trainable_parts(self, self._restored)
            self._restored = None


def trainable_parts(layer: keras.layers.Layer) -> dict[str, bool]:
    """The sub-layers and weights whose `trainable` flag differs from that of their owner.

    LoRA adapters are not included, because Keras merges them on saving; kernels frozen by LoRA are.

    Args:
        layer: A built layer or a functional model.

    Returns:
        The flags by path relative to `layer`, outer parts first.
    """
    return {
        path: part.trainable
        for path, part, owner in _parts(layer)
        if part.trainable != owner.trainable
    }


def set_trainable_parts(layer: keras.layers.Layer, parts: Mapping[str, bool]) -> None:
    """Sets the flags that `trainable_parts` returned.

    Args:
        layer: A built layer or a functional model, all parts of which have its own flag.
        parts: The flags by path; they are checked, because they come from a file.
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
    for path, part in known.items():  # outer parts first, because they set the flag of inner ones
        if path in parts:
            part.trainable = parts[path]


def _parts(layer, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, weight or sub-layer, and owner, of everything inside a layer."""
    # Not `layer.weights`, which includes int8 scales; those are never trained.
    for weight in layer._trainable_variables:
        if not weight.name.startswith("lora_kernel"):
            yield prefix + weight.name, weight, layer
    # Of a model only the layers of its graph: layers set as attributes are not in its config.
    is_model = isinstance(layer, keras.Model)
    for part in layer.layers if is_model else layer._flatten_layers(False, recursive=False):
        if part.weights:
            yield prefix + part.name, part, layer
            yield from _parts(part, f"{prefix}{part.name}/")

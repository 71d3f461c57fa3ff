"""What every runtime has in common: images in, NumPy arrays out."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.preprocessing import MAKE, check_normalized, model_input
from keras_vit.weights.files.rules import refusal
from keras_vit.weights.stated import vit_config

ACTIVATIONS = ("softmax", "sigmoid", None)
IMAGES = ("float32", "uint8")


class Runtime:
    """A model that takes images and returns NumPy arrays.

    Images are an array `(B, H, W, C)` of the model's size: floats as the model takes them, made by
    `keras_vit.preprocessing.preprocess`, or uint8 pixels, which are normalized first. Floats that
    were not normalized are refused, as `keras_vit.preprocessing.check_normalized` says.

    Attributes:
        path: Where it was opened.
        kind: What it is: "keras", "saved_model", "tflite" or "onnx".
        config: The model's `ViTConfig`.
        labels: Names of the classes, or None.
        activation: "softmax" or "sigmoid": from logits to probabilities.
        outputs: What it gives: "logits", "features" or both.
        log_probabilities: Whether `logits` are the logarithms of the probabilities, which is all
            that is left of them behind an activation.
        images: "uint8" if it takes pixels alone, otherwise "float32".
        where: What runs it, and on what machine.
    """

    kind = ""
    images = "float32"
    outputs: tuple[str, ...] = ("logits", "features")
    log_probabilities = False

    def __init__(
        self,
        path: str | os.PathLike,
        config: ViTConfig,
        *,
        labels: tuple[str, ...] | None = None,
        activation: str | None = None,
    ):
        self.path = Path(path)
        self.config = config
        self.labels = labels if labels is not None else config.labels
        self.activation = activation or probability_function(config)

    @property
    def where(self) -> str:
        return f"{self._engine()}, {platform.system()} {platform.machine()}"

    def logits(self, images: Any) -> np.ndarray:
        """Logits `(B, K)` in float32, without the model's own activation."""
        self._check_head()
        return self._run(self._checked(images))["logits"]

    def probabilities(self, images: Any) -> np.ndarray:
        """Probabilities `(B, K)` in float32."""
        logits = self.logits(images).astype("float64")
        if self.activation == "sigmoid":
            return (0.5 * (1 + np.tanh(logits / 2))).astype("float32")
        raised = np.exp(logits - logits.max(-1, keepdims=True))
        return (raised / raised.sum(-1, keepdims=True)).astype("float32")

    def features(self, images: Any) -> np.ndarray:
        """What the head reads, `(B, D)` in float32."""
        return self._run(self._checked(images), "features")["features"]

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        """The outputs for images of the dtype `self.images`; `wanted` is among them."""
        raise NotImplementedError

    def _engine(self) -> str:
        """The name and version of what runs it."""
        raise NotImplementedError

    def _check_head(self) -> None:
        if not self.config.num_classes:
            raise ValueError(
                f"{self.path} must have a head for logits; it returns features. "
                "Received: num_classes=0"
            )

    def _checked(self, images: Any) -> np.ndarray:
        array = np.asarray(images)
        shape = self.config.input_shape
        # Pixels of another integer type would be read as floats that are normalized already.
        known = array.dtype.kind == "f" or array.dtype == np.uint8
        if array.shape[1:] != shape or array.ndim != 4 or not known:
            raise ValueError(
                "images must be floats as the model takes them, or uint8 pixels, of shape "
                f"(batch, {', '.join(map(str, shape))}). "
                f"Received: shape {array.shape}, {array.dtype}"
            )
        if self.images == "uint8":
            if array.dtype != np.uint8:
                raise ValueError(
                    "images must be uint8 pixels, for which this model was exported. "
                    f"Received: {array.dtype}"
                )
            return array
        return model_input(array, self.config)

    def _check_raw(self, images: Any) -> None:
        """Raises for pixels that were not normalized, where `run` gets images in float32."""
        if self.images == "float32":
            check_normalized(np.asarray(images), self.config, advice=f"{MAKE}.")


def stated(path: str | os.PathLike, record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Runtime` that an export states of itself, checked.

    Args:
        path: The export, for errors.
        record: What it states: `config`, `labels`, `activation` and `images`.
    """
    config, labels = vit_config(path, record.get("config")), record.get("labels")
    if labels is not None:
        names = isinstance(labels, list) and all(isinstance(name, str) for name in labels)
        if not names or len(labels) != config.num_classes:
            rule = f"state labels as {config.num_classes} strings, or null"
            raise refusal(path, rule, labels=labels)
        labels = tuple(labels)
    for name, known in (("activation", ACTIVATIONS), ("images", IMAGES)):
        if not any(record.get(name) == value for value in known):
            rule = f"state {name} as one of {', '.join(map(repr, known))}"
            raise refusal(path, rule, **{name: record.get(name)})
    return {"config": config, "labels": labels, "activation": record.get("activation")}


def check_input(path: str | os.PathLike, config: ViTConfig, shape: Sequence[Any]) -> None:
    """Raises where an export's input `(B, H, W, C)` has another size than its config states."""
    if tuple(shape[1:]) != config.input_shape:
        rule = f"take images of the size in its config, {config.input_shape}"
        raise refusal(path, rule, input=tuple(shape[1:]))


def check_threads(num_threads: Any) -> None:
    """Raises where an argument is no number of threads, nor None."""
    if num_threads is None:
        return
    if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
        raise ValueError(
            f"num_threads must be a positive int or None. Received: num_threads={num_threads!r}"
        )


def probability_function(config: ViTConfig) -> str:
    """The function from a model's logits to probabilities: softmax, unless it says sigmoid."""
    return "sigmoid" if config.classifier_activation == "sigmoid" else "softmax"

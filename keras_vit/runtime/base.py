"""The common interface of runtimes: images in, NumPy arrays out."""

import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.config_rules import short
from keras_vit.preprocessing import MAKE, check_normalized, model_input
from keras_vit.probabilities import FUNCTIONS, probabilities_of, probability_function
from keras_vit.weights.files.documents import (
    NAMES,
    OBJECT,
    Shape,
    check_fields,
    one_of,
    parse_document,
    stated,
)
from keras_vit.weights.files.rules import refusal
from keras_vit.weights.json_rules import parse_config

RECORD = "keras_vit"
"""Name of the metadata in TFLite and ONNX files, which is JSON."""
FORMAT = 1
"""Version of that metadata."""
IMAGES = ("float32", "uint8")
RECORD_SHAPE: Shape = {
    "config": stated(OBJECT),
    "labels": NAMES,
    "activation": one_of(*FUNCTIONS, None),
    "images": stated(one_of(*IMAGES)),
}
"""What an export states of its model; see `keras_vit.weights.files.documents`."""


class Runtime:
    """A model that takes images and returns NumPy arrays.

    Images are an array `(B, H, W, C)` of the model's size: floats from
    `keras_vit.preprocessing.preprocess`, which are checked by `check_normalized`, or uint8 pixels,
    which are normalized first. Threads may share a runtime.

    Attributes:
        path: The path of the model.
        kind: "keras", "saved_model", "tflite", "onnx" or "openvino".
        config: The model's `ViTConfig`.
        labels: The class names, or None.
        activation: The function from logits to probabilities: "softmax", or "sigmoid", which that
            of one logit always is.
        outputs: The available outputs: "logits", "features" or both.
        log_probabilities: Whether `logits` are logarithms of probabilities, because the file
            returns only the latter.
        images: "uint8" if the model takes only pixels, otherwise "float32".
        where: The engine and the machine.
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
        self._one_at_a_time = threading.Lock()  # for engines that answer one call at a time

    @property
    def where(self) -> str:
        return f"{self._engine()}, {platform.system()} {platform.machine()}"

    def logits(self, images: Any) -> np.ndarray:
        """Logits `(B, K)` in float32, without the model's own activation."""
        self._check_head()
        return self._run(self._checked(images))["logits"]

    def probabilities(self, images: Any) -> np.ndarray:
        """Probabilities `(B, K)` in float32."""
        return self.scores(images)["probabilities"]

    def scores(self, images: Any) -> dict[str, np.ndarray]:
        """`probabilities` and `logits` of one run, `(B, K)` in float32."""
        self._check_head()
        outputs = self._run(self._checked(images))
        if "probabilities" in outputs:
            return {name: outputs[name] for name in ("probabilities", "logits")}
        logits = outputs["logits"]
        return {"probabilities": probabilities_of(logits, self.activation), "logits": logits}

    def features(self, images: Any) -> np.ndarray:
        """The input of the head, `(B, D)` in float32."""
        return self._run(self._checked(images), "features")["features"]

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        """Runs images of the dtype `self.images`; returns at least the output `wanted`."""
        raise NotImplementedError

    def _engine(self) -> str:
        """The name and version of the engine."""
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
        # Other integers would be treated as normalized floats.
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
        """Raises for images that are not normalized, in `run` of a model for float32."""
        if self.images == "float32":
            check_normalized(np.asarray(images), self.config, advice=f"{MAKE}.")


def described(path: str | os.PathLike, record: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the metadata of an export; returns the arguments of `Runtime` in it.

    Args:
        path: The file that states it, for errors.
        record: The metadata: `config`, `labels`, `activation` and `images`.
    """
    check_fields(path, record, RECORD_SHAPE)
    config, labels = parse_config(path, record["config"]), record.get("labels")
    if labels is not None and len(labels) != config.num_classes:
        rule = f"state labels as {config.num_classes} strings, or null"
        raise refusal(path, rule, labels=labels)
    labels = None if labels is None else tuple(labels)
    if config.num_classes == 1 and record.get("activation") == "softmax":
        rule = "state activation as sigmoid, or null, for one class; export the model again"
        raise refusal(path, rule, activation="softmax")
    return {"config": config, "labels": labels, "activation": record.get("activation")}


def check_input(path: str | os.PathLike, config: ViTConfig, shape: Sequence[Any]) -> None:
    """Raises if the shape `(B, H, W, C)` of an export's input contradicts its config."""
    if tuple(shape[1:]) != config.input_shape:
        rule = f"take images of the size in its config, {config.input_shape}"
        raise refusal(path, rule, input=tuple(shape[1:]))


def parse_record(
    path: str | os.PathLike, data: bytes | None, kind: str, writer: str
) -> dict[str, Any]:
    """Parses a file's metadata, which is an object of a known format.

    Args:
        path: The file, for errors.
        data: The metadata, or None if there is none.
        kind: The kind of file, for errors.
        writer: The function of `keras_vit` that writes such files, for errors.
    """
    record = {} if data is None else parse_document(path, data)
    if "format" not in record:
        raise ValueError(
            f"path must be {kind} file with metadata, as keras_vit.{writer} writes it. "
            f"Received: path={os.fspath(path)!r}"
        )
    if type(record["format"]) is not int or record["format"] != FORMAT:
        raise ValueError(
            f"path must be a file of format {FORMAT}; a newer keras_vit may have written it. "
            f"Received: format {short(record['format'])} in {os.fspath(path)!r}"
        )
    return record


def usable_cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def check_threads(num_threads: Any) -> None:
    """Raises unless the argument is a number of threads or None."""
    if num_threads is None:
        return
    if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
        raise ValueError(
            f"num_threads must be a positive int or None. Received: num_threads={num_threads!r}"
        )

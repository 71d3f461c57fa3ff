"""Opens what was saved or exported and runs images through it, whatever wrote it."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.preprocessing import normalised
from keras_vit.weights.own import read_json

MANIFEST = "MANIFEST.json"
LINEAR = (None, "linear")


class Runtime:
    """A model that takes images and returns NumPy arrays.

    Images are an array `(B, H, W, C)` of the model's size: floats as the model takes them, made by
    `keras_vit.preprocessing.preprocess`, or uint8 pixels, which are normalised first.

    Attributes:
        path: Where it was opened.
        kind: What it is: "keras" or "saved_model".
        config: The model's `ViTConfig`.
        labels: Names of the classes, or None.
        activation: "softmax" or "sigmoid": from logits to probabilities.
    """

    kind = ""

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
        """The outputs for images that are checked, uint8 or float32; `wanted` is among them."""
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
        # Pixels of another integer type would be read as floats that are normalised already.
        known = array.dtype.kind == "f" or array.dtype == np.uint8
        if array.shape[1:] != shape or array.ndim != 4 or not known:
            raise ValueError(
                "images must be floats as the model takes them, or uint8 pixels, of shape "
                f"(batch, {', '.join(map(str, shape))}). "
                f"Received: shape {array.shape}, {array.dtype}"
            )
        return array if array.dtype == np.uint8 else array.astype("float32", copy=False)


class KerasRuntime(Runtime):
    """A `ViT` in Python."""

    kind = "keras"

    def __init__(self, model: ViT, path: str | os.PathLike = ""):
        super().__init__(path, model.config)
        self.model = model
        self._before_head = None

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        if images.dtype == np.uint8:
            images = normalised(images, self.config)
        if wanted == "logits" and self.config.classifier_activation in LINEAR:
            return {"logits": _predict(self.model, images)}
        if self._before_head is None:
            self._before_head = self.model.features()
        features = _predict(self._before_head, images)
        if wanted == "features":
            return {"features": features}
        head = self.model.get_layer("head")
        if getattr(head, "quantization_mode", None) is not None:
            raise ValueError(
                "classifier_activation must be None for the logits of a quantised model. "
                f"Received: classifier_activation={self.config.classifier_activation!r}"
            )
        kernel, bias = (
            np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(v)))
            for v in (head.kernel, head.bias)
        )
        return {"logits": features @ kernel + bias}


class SavedModelRuntime(Runtime):
    """A version folder that `export_saved_model` wrote, on TensorFlow."""

    kind = "saved_model"

    def __init__(self, folder: str | os.PathLike):
        import tensorflow as tf

        self.manifest = read_json(Path(folder, MANIFEST))
        if "config" not in self.manifest:
            raise ValueError(
                f"path must be an export with a {MANIFEST}, as keras_vit.export_saved_model writes "
                f"it. Received: path={os.fspath(folder)!r}"
            )
        labels = self.manifest["labels"]
        super().__init__(
            folder,
            ViTConfig.from_dict(self.manifest["config"]),
            labels=None if labels is None else tuple(labels),
            activation=self.manifest["activation"],
        )
        self._loaded = tf.saved_model.load(os.fspath(folder))  # keeps the weights alive

    def signature(self, name: str) -> Any:
        """A signature as a function of TensorFlow."""
        if name not in self._loaded.signatures:
            known = ", ".join(sorted(self._loaded.signatures))
            raise ValueError(f"signature must be one of {known}. Received: signature={name!r}")
        return self._loaded.signatures[name]

    def run(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        """A signature's outputs by name.

        A batch of more than the export's `max_batch_size` is run in parts; an error that names an
        image then counts within the part.

        Args:
            signature: "serving_default", "serve_bytes", "classify" or "features".
            **inputs: Its input by name: arrays, or for `bytes` a sequence of files.
        """
        import tensorflow as tf

        function = self.signature(signature)
        specs = function.structured_input_signature[1]
        values = {
            name: tf.constant(value, specs[name].dtype if name in specs else None)
            for name, value in inputs.items()
        }
        most = self.manifest["max_batch_size"]
        count = max((len(value) for value in values.values() if value.ndim), default=0)
        if count > most:
            parts = [
                function(**{name: value[i : i + most] for name, value in values.items()})
                for i in range(0, count, most)
            ]
        else:
            parts = [function(**values)]
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}

    def probabilities(self, images: Any) -> np.ndarray:
        self._check_head()
        return self._run(self._checked(images))["probabilities"]

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        takes = self.manifest["images"]
        if takes == "uint8" and images.dtype != np.uint8:
            raise ValueError(
                "images must be uint8 pixels, for which this model was exported. "
                f"Received: {images.dtype}"
            )
        if takes == "float32" and images.dtype == np.uint8:
            images = normalised(images, self.config)
        return self.run("features" if wanted == "features" else "serving_default", images=images)


def open(path: str | os.PathLike) -> Runtime:
    """Opens a model to run it.

    Args:
        path: A `.keras` file; a run folder with `model.keras`; an exported version folder, or the
            folder of all versions, of which the highest is taken; or anything that
            `keras_vit.from_pretrained` reads.

    Returns:
        A `Runtime`. The files of an export are compared with the hashes in its MANIFEST.json.

    Example:

    >>> model = keras_vit.runtime.open("savedmodels/flowers")
    >>> model.probabilities(keras_vit.preprocessing.preprocess(pictures, model.config))
    """
    if "://" in os.fspath(path):
        from keras_vit.weights import hub  # a network client, which a local file does not need

        path = hub.fetch(path)
    place = Path(path)
    if place.is_dir() and (place / "model.keras").is_file():
        place = place / "model.keras"
    if place.suffix == ".keras":
        return KerasRuntime(_load_keras(place), place)
    if (folder := _version_folder(place)) is not None:
        _check_files(folder)
        return SavedModelRuntime(folder)
    from keras_vit.weights.load import from_pretrained

    return KerasRuntime(from_pretrained(path), path)


def probability_function(config: ViTConfig) -> str:
    """The function from a model's logits to probabilities: softmax, unless it says sigmoid."""
    return "sigmoid" if config.classifier_activation == "sigmoid" else "softmax"


def _version_folder(path: Path) -> Path | None:
    """The SavedModel that a path is, or the highest version in it."""
    if (path / "saved_model.pb").is_file():
        return path
    versions = path.glob("*/saved_model.pb") if path.is_dir() else ()
    folders = [p.parent for p in versions if p.parent.name.isdecimal()]
    return max(folders, key=lambda folder: int(folder.name), default=None)


def _check_files(folder: Path) -> None:
    """Raises where a file of an export is not the one that was verified."""
    for name, entry in read_json(folder / MANIFEST).get("files", {}).items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} must hold what its {MANIFEST} names. {name} is missing")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise ValueError(
                f"{folder} must hold the files that its {MANIFEST} describes. Received: {name} "
                f"with sha256 {found}, not {entry['sha256']}"
            )


def _load_keras(path: Path) -> ViT:
    model = keras.saving.load_model(path, compile=False)
    if not isinstance(model, ViT):
        raise ValueError(f"path must hold a ViT. Received: {path}, a {type(model).__name__} model")
    return model


def _predict(model: keras.Model, images: np.ndarray) -> np.ndarray:
    if not len(images):  # which `predict` refuses
        return np.zeros((0, *model.output_shape[1:]), "float32")
    return np.asarray(model.predict(images, batch_size=32, verbose=0), "float32")

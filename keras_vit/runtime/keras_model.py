"""A `ViT`, run by Keras."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_vit.classifier import vit_of
from keras_vit.model import ViT, head_logits
from keras_vit.runtime.base import Runtime
from keras_vit.weights.keras_files import check_keras_file, load_model

if TYPE_CHECKING:
    from keras_vit.weights.load import CheckpointInfo


class KerasRuntime(Runtime):
    """A `ViT`, run by Keras."""

    kind = "keras"

    def __init__(self, model: ViT, path: str | os.PathLike = ""):
        super().__init__(path, model.config)
        self.model = model
        self._before_head = None

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        with self._one_at_a_time:  # `predict` keeps its function and state in the model
            return self._outputs(images, wanted)

    def _outputs(self, images: np.ndarray, wanted: str) -> Mapping[str, np.ndarray]:
        if wanted == "logits" and self.config.classifier_activation in (None, "linear"):
            return {"logits": _predict(self.model, images)}
        if self._before_head is None:
            self._before_head = self.model.features()
        features = _predict(self._before_head, images)
        if wanted == "features":
            return {"features": features}
        logits = keras.ops.stop_gradient(head_logits(self.model, features))
        return {"logits": np.asarray(keras.ops.convert_to_numpy(logits))}

    def _engine(self) -> str:
        return f"Keras {keras.__version__} on {keras.backend.backend()}"


def load_keras(path: str | os.PathLike) -> ViT:
    """The `ViT` in a `.keras` file, of a `Classifier` the one inside."""
    check_keras_file(path)
    model = vit_of(load_model(path))
    if not isinstance(model, ViT):
        raise ValueError(
            f"path must hold a ViT. Received: {os.fspath(path)}, a {type(model).__name__} model"
        )
    return model


def inspect_keras(path: str | os.PathLike) -> "CheckpointInfo":
    """Describes a `.keras` file, as `keras_vit.weights.load.inspect` does other checkpoints."""
    from keras_vit.weights.load import CheckpointInfo  # not needed to run a model

    model = load_keras(path)
    return CheckpointInfo(
        format="keras",
        config=model.config,
        num_arrays=len(model.weights),
        nbytes=Path(path).stat().st_size,
        parameters=model.count_params(),
        loaded=tuple(weight.path for weight in model.weights),
        dropped={},
    )


def _predict(model: keras.Model, images: np.ndarray) -> np.ndarray:
    if not len(images):  # `predict` refuses empty batches
        return np.zeros((0, *model.output_shape[1:]), "float32")
    return np.asarray(model.predict(images, batch_size=32, verbose=0), "float32")

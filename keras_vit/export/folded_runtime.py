"""A `ViT`, folded and run by TensorFlow, whatever backend Keras runs on."""

import os
from collections.abc import Mapping

import numpy as np

from keras_vit.export.fold import check_model, fold
from keras_vit.export.program import Program
from keras_vit.export.saved_model.operators import TensorFlowOperators
from keras_vit.model import ViT
from keras_vit.runtime.base import Runtime


class FoldedRuntime(Runtime):
    """A `ViT` as the graph that `export_saved_model` writes, without a file.

    It keeps the weights that the model has now.

    Args:
        model: A `ViT`, not quantized.
        path: The path that it was read from, for errors.

    Example:

    >>> runtime = FoldedRuntime(model)
    >>> runtime.probabilities(keras_vit.preprocessing.preprocess(images, model.config))
    """

    kind = "folded"

    def __init__(self, model: ViT, path: str | os.PathLike = ""):
        check_model(model)
        super().__init__(path, model.config)
        operators = TensorFlowOperators("float32")
        program = Program(fold(model), operators)
        has_head = bool(model.config.num_classes)

        def compute(images):
            x = program.head_input(images)
            logits = {"logits": program.logits(x)} if has_head else {}
            return {**logits, "features": program.features(x)}

        self._compute = operators.function(compute, model.config.input_shape)
        self._weights = operators.weights  # the function holds them weakly

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        return {name: value.numpy() for name, value in self._compute(images).items()}

    def _engine(self) -> str:
        import tensorflow as tf

        return f"TensorFlow {tf.__version__}, folded"

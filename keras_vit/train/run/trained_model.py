"""The trained model that a run saves: float32, without optimizer state and LoRA layers."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.atomic import atomic_path
from keras_vit.train import build
from keras_vit.train.distribution.devices import jit_compile


def save_model(
    plain: keras_vit.ViT, path: str | os.PathLike, loss: str | None, batches: Any
) -> keras_vit.ViT:
    """Saves a `.keras` file that needs `import keras_vit` alone to load, and checks it.

    Args:
        plain: A model that `keras_vit.model_weights.float32_copy` returned.
        path: The file.
        loss: "softmax" or "sigmoid", which the saved model is compiled with; None for a model
            without a head, which is not compiled.
        batches: Batches of (images, targets); both models predict the first one.

    Returns:
        The model as loaded from the file.
    """
    losses = {
        "softmax": keras.losses.CategoricalCrossentropy,
        "sigmoid": keras.losses.BinaryCrossentropy,
    }
    if loss is not None:
        metrics = build.metrics(plain.config.num_classes)
        # SGD has no state but its step. It is built, so that Keras finds it when it loads.
        plain.compile(keras.optimizers.SGD(), losses[loss](from_logits=True), metrics=metrics)
        plain.optimizer.build(plain.trainable_variables)
    images = np.asarray(next(iter(batches))[0])
    with atomic_path(path) as temporary:
        plain.save(temporary)
        again = keras.saving.load_model(temporary)
        if not jit_compile():  # here; the file keeps Keras' choice
            plain.jit_compile = again.jit_compile = False
        expected, got = (one.predict_on_batch(images) for one in (plain, again))
        if not np.allclose(expected, got, rtol=1e-5, atol=1e-5):
            error = float(np.abs(expected - got).max())
            raise RuntimeError(
                f"{path}: the saved model's outputs differ from the trained one's by {error:.3g}; "
                "the file was not written"
            )
    return again


def save_objective(
    model: keras.Model, weights: Sequence[np.ndarray], path: str | os.PathLike
) -> Any:
    """Saves an objective with all its parts, and checks the file.

    Args:
        model: The objective.
        weights: Values of `model.variables`, in order.
        path: The file.

    Returns:
        The objective as loaded from the file, not compiled.
    """
    copy = type(model).from_config(model.get_config())  # `model` may be split over devices
    for variable, value in zip(copy.variables, weights, strict=True):
        variable.assign(value)
    if hasattr(copy, "update_teacher"):  # the update after the last step
        copy.update_teacher()
    with atomic_path(path) as temporary:
        copy.save(temporary)
        again = keras.saving.load_model(temporary, compile=False)
        for one, other in zip(copy.weights, again.weights, strict=True):
            if not np.array_equal(*map(keras.ops.convert_to_numpy, (one, other)), equal_nan=True):
                raise RuntimeError(
                    f"{path}: {one.path} of the saved objective differs from the trained one's; "
                    "the file was not written"
                )
    return again

"""What a run leaves: the trained model in float32, with nothing of its training."""

import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.train import build
from keras_vit.train.distribution.devices import jit_compile
from keras_vit.weights.atomic import atomic_path


def plain_weights(model: keras_vit.ViT) -> dict[str, np.ndarray]:
    """Path of a weight -> its value, with LoRA added."""
    variables = {w.path: w for w in model.weights if "lora_kernel" not in w.path}
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            variables[layer._kernel.path] = layer.kernel  # Keras adds the two up when it is read
    # A copy: JAX would share the array, and delete it when the model is trained further.
    return {path: np.array(keras.ops.convert_to_numpy(v)) for path, v in variables.items()}


def plain_model(model: keras_vit.ViT, weights: Mapping[str, np.ndarray]) -> keras_vit.ViT:
    """A model in float32 of the same config, with these weights."""
    plain = keras_vit.ViT(model.config, name=model.name, dtype="float32")
    for weight in plain.weights:
        weight.assign(weights[weight.path])
    return plain


def save_plain(
    plain: keras_vit.ViT, path: str | os.PathLike, loss: str, batches: Any
) -> keras_vit.ViT:
    """Saves a `.keras` file that `import keras_vit` alone can load, and checks that it does.

    Args:
        plain: A model of `plain_model`.
        path: Where to.
        loss: "softmax" or "sigmoid", which the saved model is compiled with.
        batches: (images, targets), of which the first is predicted by both.

    Returns:
        The model that was read from the file.
    """
    losses = {
        "softmax": keras.losses.CategoricalCrossentropy,
        "sigmoid": keras.losses.BinaryCrossentropy,
    }
    metrics = build.metrics(plain.config.num_classes)
    # SGD has nothing to save but its step, and is built so that Keras finds it when it loads.
    plain.compile(keras.optimizers.SGD(), losses[loss](from_logits=True), metrics=metrics)
    plain.optimizer.build(plain.trainable_variables)
    images = np.asarray(next(iter(batches))[0])
    with atomic_path(path) as temporary:
        plain.save(temporary)
        again = keras.saving.load_model(temporary)
        if not jit_compile():  # for what follows here; the file keeps Keras' choice
            plain.jit_compile = again.jit_compile = False
        wanted, got = (one.predict_on_batch(images) for one in (plain, again))
        if not np.allclose(wanted, got, rtol=1e-5, atol=1e-5):
            error = float(np.abs(wanted - got).max())
            raise RuntimeError(
                f"{path}: the saved model does not predict what the trained one does, "
                f"logits are {error:.3g} apart; nothing was kept"
            )
    return again

"""A recipe as plain Keras: `build_model`, `compile_model`, and `run`, which leaves a run folder.

In a notebook:

>>> recipe = training.recipes.load("digits")
>>> source = open_source(recipe.data)
>>> model = build_model(recipe, source)
>>> compile_model(model, recipe, steps=1000)
>>> batches = train_batches(source, model.config, recipe.augment, recipe.run.batch_size, seed=0)
>>> model.fit(batches, epochs=10, steps_per_epoch=100, shuffle=False)
"""

import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.weights.atomic import atomic_path
from training import callbacks as watch
from training import few_shot, report
from training.data import open_source, test_batches, train_batches
from training.optimizers import PerUpdate, make_optimizer, make_schedule
from training.recipe import Recipe

MODEL = "model.keras"


class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy on logits, summed over the classes, then averaged over the batch.

    L = - sum_k y_k log s(z_k) + (1 - y_k) log(1 - s(z_k))

    The sum is big_vision's, whose learning rates and head bias (-6.9 for 1,000 classes) belong to
    it. DeiT III takes the mean: K times less, which LAMB does not see.

    Args:
        label_smoothing: Share of the target spread evenly over the K classes, as for a softmax.
            (Keras' own would move every target towards 1/2.)
    """

    def __init__(self, label_smoothing: float = 0.0, name: str = "sigmoid_crossentropy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        y = y_true * (1 - self.label_smoothing) + self.label_smoothing / y_true.shape[-1]
        losses = keras.ops.binary_crossentropy(y, y_pred, from_logits=True)  # (B, K)
        return keras.ops.sum(losses, axis=-1)  # (B,)

    def get_config(self):
        return {**super().get_config(), "label_smoothing": self.label_smoothing}


def build_model(recipe: Recipe, source: Any) -> keras_vit.ViT:
    """The model that a recipe starts from, with the classes of the data.

    Args:
        recipe: A `Recipe`.
        source: The data: its `num_classes`, `labels` and `shape`.

    Returns:
        A `ViT`; for "linear_probe" and "lora" with what is not trained frozen.
    """
    part = recipe.model
    fields = {"num_classes": source.num_classes, "labels": source.labels}
    *size, channels = source.shape
    if channels is not None:
        fields["in_channels"] = channels
    if part.weights is None and None not in size:
        fields["image_size"] = tuple(size)
    fields |= part.config
    if part.variant is not None and part.variant not in keras_vit.list_variants():
        raise ValueError(
            f"model.variant must be one of {', '.join(keras_vit.list_variants())}. "
            f"Received: model.variant={part.variant!r}"
        )
    if part.variant is not None:
        build = getattr(keras_vit, part.variant)
        model = build(weights=part.weights, dtype=recipe.run.precision, **fields)
    elif part.weights is not None:
        model = keras_vit.from_pretrained(part.weights, dtype=recipe.run.precision, **fields)
    else:
        model = keras_vit.ViT(keras_vit.ViTConfig(**fields), dtype=recipe.run.precision)
    if part.method == "linear_probe":
        for layer in model.layers:
            layer.trainable = layer.name == "head"
    elif part.method == "lora":
        model.enable_lora(part.lora_rank)
    return model


def compile_model(model: keras_vit.ViT, recipe: Recipe, steps: int) -> None:
    """Compiles the model as the recipe says.

    Args:
        model: The model of `build_model`.
        recipe: A `Recipe`.
        steps: Batches in the whole run, over which the learning rate goes.
    """
    make = keras.losses.CategoricalCrossentropy
    smoothing = recipe.loss.label_smoothing
    sigmoid = recipe.loss.name == "sigmoid"
    model.compile(
        optimizer=make_optimizer(recipe, model, steps),
        loss=SigmoidCrossentropy(smoothing)
        if sigmoid
        else make(from_logits=True, label_smoothing=smoothing),
        metrics=_metrics(model.config.num_classes),
        jit_compile=jit_compile(recipe.run.jit_compile),
        steps_per_execution=recipe.run.steps_per_execution,
    )


def jit_compile(setting: bool | None = None) -> bool | str:
    """What `compile` gets: the setting, or Keras' own choice but for TensorFlow on a CPU."""
    if setting is not None:
        return setting
    slower = keras.backend.backend() == "tensorflow" and not _accelerators()
    return False if slower else "auto"


def epochs_of(steps: int, num_examples: int, batch_size: int, multiple: int = 1) -> tuple[int, int]:
    """Epochs, and steps in each but the last, which has what is left of the whole run's steps.

    Args:
        steps: Batches in the whole run.
        num_examples: Training samples.
        batch_size: Samples in a batch.
        multiple: `steps_per_execution`, which must divide both.
    """
    if steps % multiple:
        raise ValueError(
            f"run.steps_per_execution must divide the {steps} steps of the run, or run.steps be "
            f"set to {max(steps - steps % multiple, multiple)}. "
            f"Received: run.steps_per_execution={multiple}"
        )
    epochs = max(1, round(steps * batch_size / num_examples))
    each = math.ceil(steps / epochs / multiple) * multiple
    return math.ceil(steps / each), each


def run(
    recipe: Recipe,
    workdir: str | os.PathLike,
    *,
    verbose: int | str = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    on_start: Any = None,
) -> dict[str, Any]:
    """Trains by a recipe with `model.fit` and leaves everything in one folder.

    What can be wrong is found before the first step: the folder, the data, the batch, the disk.

    Args:
        recipe: A `Recipe`.
        workdir: The run folder, new or empty.
        verbose: As of `fit`, but "auto" is a bar on a terminal, one line an epoch elsewhere.
        callbacks: Further callbacks for `fit`.
        on_start: Called with (model, source, epochs, steps) before the first step.

    Returns:
        What was reached: "top1", "top5", "seconds", "images_per_second", and "few_shot"
        where the recipe asks for it.
    """
    workdir = Path(workdir)
    _check_folder(workdir)
    source = open_source(recipe.data)
    batch = recipe.run.batch_size
    num_examples = source.train.num_examples
    if not 0 < batch <= num_examples:
        raise ValueError(
            f"run.batch_size must be from 1 to the {num_examples} training samples. "
            f"Received: run.batch_size={batch}"
        )
    steps, looks = recipe.steps(num_examples), recipe.evaluation
    for name, value in (
        ("run.steps", steps),
        ("run.steps_per_execution", recipe.run.steps_per_execution),
        ("evaluation.batch_size", batch if looks.batch_size is None else looks.batch_size),
        ("evaluation.every", looks.every),
        ("evaluation.few_shot", min(looks.few_shot, default=1)),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {name}={value}")
    epochs, each = epochs_of(steps, num_examples, batch, recipe.run.steps_per_execution)
    keras.utils.set_random_seed(recipe.run.seed)
    model = build_model(recipe, source)
    _check_space(workdir, model)
    compile_model(model, recipe, steps)
    updates = recipe.optimizer.accumulate
    schedule = make_schedule(recipe.schedule, recipe.optimizer.learning_rate, steps // updates)
    progress = watch.Progress(batch, steps, PerUpdate(schedule, updates))
    observers = [watch.StopAfter(steps), progress]
    if recipe.optimizer.ema_momentum is not None:
        observers.append(keras.callbacks.SwapEMAWeights())
    observers += [watch.JsonLines(workdir / "log.jsonl"), watch.EventFiles(workdir / "logs")]

    with atomic_path(workdir / "recipe.json") as temporary:
        temporary.write_text(json.dumps(recipe.to_dict(), indent=2) + "\n", encoding="utf-8")
    if on_start is not None:
        on_start(model, source, epochs, steps)
    size, every = looks.batch_size or batch, looks.every
    tests = test_batches(source.test, model.config, size, source.num_classes)
    start = time.monotonic()
    model.fit(
        train_batches(source, model.config, recipe.augment, batch, recipe.run.seed),
        epochs=epochs,
        steps_per_epoch=each,
        validation_data=tests,
        validation_freq=sorted({*range(every, epochs + 1, every), epochs}),
        callbacks=[*observers, *callbacks],
        shuffle=False,  # the batches are shuffled already, and Keras would say so
        # Keras' own "auto" is a bar in a file too.
        verbose=(1 if sys.stdout.isatty() else 2) if verbose == "auto" else verbose,
    )
    seconds = time.monotonic() - start
    model = save_plain(model, workdir / MODEL, recipe.loss.name, tests)
    predictions = report.predict(model, tests)
    reached = {
        "top1": predictions.top1,
        "top5": predictions.top5,
        "seconds": seconds,
        "images_per_second": progress.images_per_second,
    }
    if shots := looks.few_shot:
        pictures = test_batches(source.train, model.config, size, source.num_classes)
        reached["few_shot"] = few_shot.evaluate(model, pictures, tests, shots)
    facts = {
        "training": f"{steps:,} steps of {batch}, {steps * batch / num_examples:.4g} epochs of "
        f"{num_examples:,} pictures",
        "time": f"{seconds / 60:.1f} minutes, evaluation included",
        "images a second": f"{progress.images_per_second:,.0f}, without evaluation",
        "parameters": f"{model.count_params():,}",
        "machine": machine(),
    }
    for name, value in reached.get("few_shot", {}).items():
        facts[f"linear, {name.removeprefix('few_shot_')} pictures a class"] = f"{value:.2%}"
    report.write(workdir, recipe, predictions, facts, model.config.labels)
    return reached


def plain_copy(model: keras_vit.ViT) -> keras_vit.ViT:
    """The same model in float32, everything trainable, with LoRA added to the weights it adapts."""
    plain = keras_vit.ViT(model.config, name=model.name, dtype="float32")
    values = {w.path: w for w in model.weights}
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            values[layer._kernel.path] = layer.kernel  # Keras adds the two up when it is read
    for weight in plain.weights:
        # Through NumPy: JAX would share the array, and delete it when either model predicts.
        weight.assign(np.array(keras.ops.convert_to_numpy(values[weight.path])))
    return plain


def save_plain(
    model: keras_vit.ViT, path: str | os.PathLike, loss: str, batches: Any
) -> keras_vit.ViT:
    """Saves a `.keras` file that `import keras_vit` alone can load, and checks that it does.

    Args:
        model: The trained model.
        path: Where to.
        loss: "softmax" or "sigmoid", which the saved model is compiled with.
        batches: (images, targets), of which the first is predicted by both.

    Returns:
        The model that was read from the file.
    """
    plain = plain_copy(model)
    losses = {
        "softmax": keras.losses.CategoricalCrossentropy,
        "sigmoid": keras.losses.BinaryCrossentropy,
    }
    metrics = _metrics(model.config.num_classes)
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


def machine() -> str:
    """One line on what a run ran on."""
    name = keras.backend.backend()
    version = __import__(name).__version__
    devices = _accelerators() or [f"{os.cpu_count()} CPU cores ({platform.machine()})"]
    return f"{', '.join(devices)}; Keras {keras.__version__} on {name} {version}"


# -- what can be wrong at the start


def _check_folder(workdir: Path) -> None:
    if workdir.is_dir() and (there := sorted(p.name for p in workdir.iterdir())):
        more = f" and {len(there) - 6} more" if len(there) > 6 else ""
        raise FileExistsError(
            "workdir must be a new or empty folder. "
            f"Received: workdir={str(workdir)!r}, which holds {', '.join(there[:6])}{more}"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise OSError(
            "workdir must be a folder that can be written. "
            f"Received: workdir={str(workdir)!r}: {error.strerror}"
        ) from error


def _check_space(workdir: Path, model: keras.Model) -> None:
    """The model, the one being written beside it, and as much again for logs and pictures."""
    needed = 3 * 4 * model.count_params() + 2**20
    free = shutil.disk_usage(workdir).free
    if free < needed:
        raise OSError(
            f"workdir must have {needed / 1e6:,.0f} MB of free space. "
            f"Received: workdir={str(workdir)!r} with {free / 1e6:,.0f} MB"
        )


def _metrics(num_classes: int) -> list[keras.metrics.Metric]:
    metrics: list[keras.metrics.Metric] = [keras.metrics.CategoricalAccuracy(name="accuracy")]
    if num_classes > 5:
        metrics.append(keras.metrics.TopKCategoricalAccuracy(5, name="top5"))
    return metrics


def _accelerators() -> list[str]:
    """GPUs and TPUs that the backend of Keras sees."""
    name = keras.backend.backend()
    if name == "tensorflow":
        import tensorflow as tf

        return [d.name for d in tf.config.list_physical_devices() if d.device_type != "CPU"]
    if name == "jax":
        import jax

        return [str(d) for d in jax.devices() if d.platform != "cpu"]
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

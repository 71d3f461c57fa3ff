"""From a recipe to a compiled Keras model."""

import inspect
from pathlib import Path
from typing import Any

import keras

import keras_vit
from keras_vit.train.distribution import Devices
from keras_vit.train.objectives.by_name import objective_class, split_options
from keras_vit.train.optim.optimizer import make_optimizer
from keras_vit.train.recipe import Model, Recipe
from keras_vit.train.recomputation import remat


class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy on logits, summed over the classes, then averaged over the batch.

    L = - sum_k y_k log s(z_k) + (1 - y_k) log(1 - s(z_k))

    The sum is big_vision's, whose learning rates and head bias (-6.9 for 1,000 classes) assume it.
    DeiT III takes the mean: K times less, to which LAMB is invariant.

    Args:
        label_smoothing: Share of the target spread evenly over the K classes, as for a softmax.
            (Keras' smoothing would move every target toward 1/2.)
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
        A `ViT`; for "linear_probe" and "lora" with all other weights frozen. It has no head if the
        objective needs no labels.
    """
    if recipe.model.method != "full" and recipe.objective.name != "labels":
        raise ValueError(
            f"model.method must be 'full' for objective.name={recipe.objective.name!r}. "
            f"Received: model.method={recipe.model.method!r}"
        )
    part = recipe.model
    fields = {"num_classes": source.num_classes, "labels": source.labels}
    if not recipe.objective.needs_labels:
        fields = {"num_classes": 0, "labels": None}
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
    if part.weights is not None:
        model = _pretrained(part, {"dtype": recipe.run.precision, **fields})
    elif part.variant is not None:
        model = getattr(keras_vit, part.variant)(dtype=recipe.run.precision, **fields)
    else:
        model = keras_vit.ViT(keras_vit.ViTConfig(**fields), dtype=recipe.run.precision)
    if part.method == "linear_probe":
        for layer in model.layers:
            layer.trainable = layer.name == "head"
    elif part.method == "lora":
        model.enable_lora(part.lora_rank)
    if recipe.run.remat:
        remat(model)
    return model


def _pretrained(part: Model, fields: dict[str, Any]) -> keras_vit.ViT:
    """The model with the recipe's weights, or the error that says which option names others."""
    try:
        if part.variant is not None:
            return getattr(keras_vit, part.variant)(weights=part.weights, **fields)
        return keras_vit.from_pretrained(str(part.weights), **fields)
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        kind = next(k for k in (ConnectionError, FileNotFoundError, PermissionError)
                    if isinstance(error, k))  # fmt: skip
        raise kind(
            f"{error} The recipe starts from model.weights={part.weights!r}: --set "
            "model.weights=FILE names a file of your own, --set model.weights=null starts from "
            "random weights."
        ) from error


def build_objective(vit: keras_vit.ViT, recipe: Recipe, steps: int) -> keras.Model:
    """What is trained: the objective of the recipe around a ViT, or for labels the ViT itself.

    Args:
        vit: The model of `build_model`.
        recipe: A `Recipe`.
        steps: Batches in the whole run.
    """
    name = recipe.objective.name
    if name == "labels":
        return vit
    arguments = {
        "seed": recipe.run.seed,
        "steps": steps,
        "label_smoothing": recipe.loss.label_smoothing,
    }
    if recipe.objective.teacher is not None:
        arguments["teacher"] = _teacher(recipe.objective.teacher)
    cls = objective_class(name)
    taken = inspect.signature(cls).parameters
    given = {k: v for k, v in arguments.items() if k in taken}
    return cls(vit, **given, **split_options(name, recipe.objective.checked().options)[0])


def _teacher(path: str) -> keras.Model:
    if path.endswith(".keras") and Path(path).is_file():  # of any Keras model
        return keras.saving.load_model(path, compile=False)
    return keras_vit.from_pretrained(path)


def compile_model(
    model: keras.Model, recipe: Recipe, steps: int, devices: Devices | None = None
) -> None:
    """Compiles the model by the recipe.

    Args:
        model: The model of `build_model`, or of `build_objective`.
        recipe: A `Recipe`.
        steps: Batches in the whole run, over which the learning rate is scheduled.
        devices: What `keras_vit.train.scope` yields; None is one device.
    """
    devices = devices or Devices()
    loss, weighted_metrics = None, None
    if recipe.objective.name == "labels":
        smoothing = recipe.loss.label_smoothing
        if recipe.loss.name == "sigmoid":
            loss = SigmoidCrossentropy(smoothing)
        else:
            loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=smoothing)
    if recipe.objective.needs_labels:
        # Devices that share a batch evaluate on full batches, in which padding has no weight.
        weighted_metrics = metrics(getattr(model, "vit", model).config.num_classes)
    model.compile(
        optimizer=devices.optimizer(
            lambda: make_optimizer(recipe, model, steps), recipe.run.precision
        ),
        loss=loss,
        weighted_metrics=weighted_metrics,
        jit_compile=devices.jit_compile(recipe.run.jit_compile),
        steps_per_execution=recipe.run.steps_per_execution,
    )
    # Now: built later, in mixed_float16, its variables get other names, which checkpoints compare.
    model.optimizer.build(model.trainable_variables)
    devices.prepare(model)


def metrics(num_classes: int) -> list[keras.metrics.Metric]:
    """Accuracy, and top-5 accuracy where there are enough classes."""
    metrics: list[keras.metrics.Metric] = [keras.metrics.CategoricalAccuracy(name="accuracy")]
    if num_classes > 5:
        metrics.append(keras.metrics.TopKCategoricalAccuracy(5, name="top5"))
    return metrics

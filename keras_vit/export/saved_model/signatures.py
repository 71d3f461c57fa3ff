"""The signatures of a SavedModel, around one compiled graph, and the requests that they refuse."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.fold import fold
from keras_vit.export.program import Program
from keras_vit.export.saved_model import image_bytes
from keras_vit.export.saved_model.operators import TensorFlowOperators
from keras_vit.model import ViT

LABELS = "labels.txt"


@dataclasses.dataclass(frozen=True)
class Serving:
    """How a model is served; the arguments of `export_saved_model`."""

    dtype: str
    activation: str
    images: str
    labels: tuple[str, ...]
    top_k: int
    max_batch_size: int
    max_pixels: int


def make_module(model: ViT, serving: Serving, folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """The `tf.Module` to save, and its signatures by name.

    Args:
        model: A `ViT`.
        serving: How it is served.
        folder: Where the labels file is written; saving copies it into the assets.

    Returns:
        A `tf.Module` and a dict of concrete functions: `serving_default` and `features`, and
        `serve_bytes` and `classify` if the model has what they need.
    """
    import tensorflow as tf

    config = model.config
    module: Any = tf.Module()
    compute, weights = _compute(model, serving.dtype)
    module.weights = weights  # not the compiled function, which would be saved twice
    image_type = tf.TensorSpec([None, *config.input_shape], serving.images, name="images")
    bytes_type = tf.TensorSpec([None], tf.string, name="bytes")

    def from_images(images):
        images = _checked("images", images, config.input_shape, serving.max_batch_size)
        return answer(_normalized(images, config) if serving.images == "uint8" else images)

    def from_bytes(files):
        files = _checked("bytes", files, (), serving.max_batch_size)
        return answer(_normalized(image_bytes.decode(files, config, serving.max_pixels), config))

    def answer(images):
        outputs = compute(images)
        with tf.control_dependencies([_finite(next(iter(outputs.values())))]):
            outputs = {name: tf.identity(value) for name, value in outputs.items()}
        if config.num_classes:
            outputs["probabilities"] = getattr(tf.nn, serving.activation)(outputs["logits"])
        return outputs

    def chosen(outputs, *names):
        return {name: outputs[name] for name in names}

    names = ("probabilities", "logits") if config.num_classes else ("features",)
    functions = {
        "serving_default": (lambda images: chosen(from_images(images), *names), image_type),
        "features": (lambda images: chosen(from_images(images), "features"), image_type),
    }
    if config.in_channels in (1, 3):
        functions["serve_bytes"] = (lambda files: chosen(from_bytes(files), *names), bytes_type)
    if config.in_channels in (1, 3) and config.num_classes and config.pooling is not None:
        table = module.labels = _table(serving.labels, folder / LABELS)

        def classify(files):
            best = tf.math.top_k(from_bytes(files)["probabilities"], serving.top_k)
            return {"labels": table.lookup(tf.cast(best.indices, tf.int64)), "scores": best.values}

        functions["classify"] = (classify, bytes_type)
    signatures = {
        name: tf.function(function, input_signature=[spec], autograph=False).get_concrete_function()
        for name, (function, spec) in functions.items()
    }
    return module, signatures


def input_of(function: Any) -> Any:
    """The `tf.TensorSpec` of a signature's only input."""
    (spec,) = function.structured_input_signature[0]
    return spec


def _compute(model: ViT, dtype: str) -> tuple[Any, Any]:
    """A function from normalized images to logits and features, and the variables it reads."""
    ops = TensorFlowOperators(dtype)
    program = Program(fold(model), ops)

    def compute(images):
        x = program.head_input(images)
        logits = {"logits": program.logits(x)} if model.config.num_classes else {}
        return {**logits, "features": program.features(x)}

    # A function of its own, so that all signatures share one trace.
    return ops.function(compute, model.config.input_shape), ops.weights


def _checked(name: str, values, shape: tuple[int, ...], most: int):
    """The same values, or an error if they have another shape.

    A server does not compare shapes with the signature, and would take an image of twice the size
    for two images.
    """
    import tensorflow as tf

    # Constant folding would remove a check of the declared shape.
    hidden = tf.raw_ops.PlaceholderWithDefault(input=values, shape=None)
    found = tf.shape(hidden)
    text = tf.strings.reduce_join(tf.strings.as_string(found), separator=", ")
    # As text, because the optimizer believes that it knows the rank.
    fits = tf.strings.regex_full_match(text, ", ".join([r"\d+", *map(str, shape)]))
    wanted = ", ".join(["batch", *map(str, shape)])
    received = tf.strings.join([". Received: shape (", text, ")"])
    error = tf.strings.join([f"{name} must have shape ({wanted})", received])
    right = tf.debugging.Assert(fits, [error])
    with tf.control_dependencies([right]):
        count = tf.size(hidden) // max(int(np.prod(shape)), 1)
    error = tf.strings.join([f"a request must hold at most {most} of `{name}`", received])
    few = tf.debugging.Assert(count <= most, [error])
    with tf.control_dependencies([right, few]):
        return tf.ensure_shape(hidden, (None, *shape))


def _finite(values):
    """Fails on NaN and infinity, which a single such pixel spreads to the whole image."""
    import tensorflow as tf

    axes = list(range(1, len(values.shape)))
    wrong = tf.where(~tf.reduce_all(tf.math.is_finite(values), axes))[:, 0]
    named = tf.strings.reduce_join(tf.strings.as_string(wrong[: image_bytes.NAMED]), separator=", ")
    error = tf.strings.join(
        ["images must hold finite numbers. Received: NaN or infinite ones in image ", named]
    )
    return tf.debugging.Assert(tf.size(wrong) == 0, [error])


def _normalized(pixels, config: ViTConfig):
    """uint8 pixels to (pixel / 255 - mean) / std, in the order of `preprocess`."""
    import tensorflow as tf

    mean, std = (np.asarray(v, "float32") for v in (config.pixel_mean, config.pixel_std))
    return (tf.cast(pixels, tf.float32) / 255.0 - mean) / std


def _table(labels: tuple[str, ...], file: Path):
    """A lookup table from class numbers to labels, in a file that becomes an asset."""
    import tensorflow as tf

    file.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8", newline="\n")
    lines = tf.lookup.TextFileInitializer(
        str(file),
        key_dtype=tf.int64,
        key_index=tf.lookup.TextFileIndex.LINE_NUMBER,
        value_dtype=tf.string,
        value_index=tf.lookup.TextFileIndex.WHOLE_LINE,
        vocab_size=len(labels),
    )
    return tf.lookup.StaticHashTable(lines, default_value="")

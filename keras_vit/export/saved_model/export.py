"""Exports a model as a SavedModel for TensorFlow Serving: compiled, verified, then published."""

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.export.accuracy import (
    Accuracy,
    Drop,
    batches,
    check_accuracy_data,
    check_drop,
)
from keras_vit.export.arguments import (
    IMAGES,
    check_bound,
    check_choice,
    check_count,
    class_names,
)
from keras_vit.export.fold import check_model
from keras_vit.export.quiet import without_infos
from keras_vit.export.record import as_json
from keras_vit.export.saved_model import image_bytes, signatures, versions, warm_up
from keras_vit.export.saved_model.child_process import in_tensorflow
from keras_vit.export.saved_model.manifest import describe, write_manifest
from keras_vit.export.saved_model.operators import DTYPES
from keras_vit.export.saved_model.signatures import Serving
from keras_vit.export.verify import (
    BOUNDS,
    Verification,
    checked_pictures,
    float32_model,
    generated_images,
    latencies,
    merging_model,
    verify_export,
    verify_files,
)
from keras_vit.model import ViT
from keras_vit.paths import as_output
from keras_vit.preprocessing import most_pixels, normalize
from keras_vit.probabilities import chosen_function
from keras_vit.runtime.keras_model import KerasRuntime
from keras_vit.runtime.saved_model import SavedModelRuntime


@dataclasses.dataclass(frozen=True)
class SavedModelExport:
    """What was written, and how it compares with the model."""

    path: Path
    """The version folder."""
    version: int
    dtype: str
    """Of the weights and the products."""
    size: int
    """Bytes of all files."""
    latency: float
    """Milliseconds for one image, the shortest of several."""
    plain_latency: float
    """The same for the Keras model in float32, in a `tf.function`; the two were timed in turns."""
    verification: Verification
    accuracy: Drop | None = None
    """The model's accuracy and the export's on `accuracy_data`, or None."""


@takes_classifier
def export_saved_model(
    model: ViT,
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    version: int | None = None,
    labels: Sequence[str] | None = None,
    activation: str | None = None,
    images: str = "float32",
    top_k: int = 5,
    max_batch_size: int = 256,
    max_pixels: int = image_bytes.MAX_PIXELS,
    token_merging: int | None = None,
    accuracy_data: Any = None,
    max_drop: float = 1.0,
    bound: float | None = None,
    verify: Any = None,
) -> SavedModelExport:
    """Writes a model as `path/VERSION/` for TensorFlow Serving.

    The model is compiled for inference. The version folder appears only after it was opened, run
    and compared with the model; if they differ by more than `bound`, this raises `ValueError` and
    leaves nothing behind. On JAX and torch, a child process does the export on TensorFlow.

    | signature | takes | returns |
    |---|---|---|
    | `serving_default` | `images` | `probabilities`, `logits` |
    | `serve_bytes` | `bytes`, JPEG or PNG files | `probabilities`, `logits` |
    | `classify` | `bytes` | `labels`, `scores`, the best first |
    | `features` | `images` | `features`, what the head reads |

    A model without a head returns `features` instead of probabilities and logits. `classify` needs
    a head and pooling. The signatures that take files need 1 or 3 channels.

    Args:
        model: A `ViT` on any backend, not quantized. LoRA is merged.
        path: The folder of all versions, such as "savedmodels/flowers".
        dtype: "float32", or "bfloat16" for processors that multiply it.
        version: An unused version number; None means the next one.
        labels: Names of the classes; None means the config's, or else their numbers.
        activation: "softmax" or "sigmoid", from logits to probabilities; None means sigmoid if the
            model has one class or a `classifier_activation` of sigmoid, otherwise softmax.
        images: "float32" if `images` are what the model takes, "uint8" if they are pixels of the
            model's size, which the export normalizes.
        top_k: How many classes `classify` returns.
        max_batch_size: The largest number of images in a request.
        max_pixels: The largest number of pixels of an image file, before and after resizing. A file
            with more is refused before it is decoded.
        token_merging: r, the most similar pairs of tokens that each block merges, for speed; None
            means the config's. The export is compared with the model that merges likewise, its
            accuracy with that of `model`.
        accuracy_data: Images and their classes, `(images, labels)` or batches of them, on which the
            accuracy of the export is compared with the model's.
        max_drop: The most percentage points of accuracy that the export may lose on them.
        bound: The largest difference of a logit, as a share of their range; None means 1e-5 in
            float32 and 0.05 in bfloat16.
        verify: Images to compare on: uint8 pixels of the model's size, or with `images="float32"`
            floats as the model takes them. Generated images by default.

    Returns:
        An `SavedModelExport`: path, size, latency and the verification.

    Example:

    >>> export = keras_vit.export_saved_model(model, "savedmodels/flowers", dtype="bfloat16")
    >>> export.path
    PosixPath('savedmodels/flowers/1')
    """
    check_model(model)
    check_accuracy_data(model.config, accuracy_data, max_drop)
    merging = model.config  # which must be possible
    if token_merging is not None:
        merging = merging.replace(token_merging=token_merging)
    arguments: dict[str, Any] = {
        "path": os.path.abspath(as_output("path", path)),
        "version": version,
        "bound": bound,
        "token_merging": merging.token_merging,
        "max_drop": max_drop,
        "serving": dataclasses.asdict(
            _serving(
                model.config, dtype, activation, images, labels, top_k, max_batch_size, max_pixels
            )
        ),
    }
    check_bound(bound)
    pictures = None if verify is None else checked_pictures(verify, model.config, images)
    versions.check_version(Path(path), version)
    if keras.backend.backend() == "tensorflow":
        facts = export_here(model, verify=pictures, accuracy_data=accuracy_data, **arguments)
    else:
        labeled = None
        if accuracy_data is not None:
            parts = zip(*batches(KerasRuntime(model), accuracy_data), strict=True)
            labeled = tuple(np.concatenate(part) for part in parts)
        facts = in_tensorflow("saved_model.export:export_here", model, arguments, pictures, labeled)
    facts["verification"] = Verification(**facts["verification"])
    if drop := facts["accuracy"]:
        sides = {name: Accuracy(**drop[name]) for name in ("reference", "export")}
        facts["accuracy"] = Drop(**{**drop, **sides})
    return SavedModelExport(**{**facts, "path": Path(path, str(facts["version"]))})


def export_here(
    model: ViT,
    *,
    path: str,
    version: int | None,
    bound: float | None,
    token_merging: int,
    max_drop: float,
    serving: dict,
    verify: Any,
    accuracy_data: Any,
) -> dict[str, Any]:
    """Exports in a process that runs on TensorFlow; returns an `SavedModelExport` as JSON."""
    import tensorflow as tf

    how = Serving(**{**serving, "labels": tuple(serving["labels"])})
    given, model = model, merging_model(model, token_merging)
    reference = KerasRuntime(float32_model(model))
    with versions.new_version(Path(path), version) as (folder, placed):
        with tempfile.TemporaryDirectory() as scratch:
            module, functions = signatures.make_module(model, how, Path(scratch))
            with without_infos():
                tf.saved_model.save(module, str(folder), signatures=functions)
        warm_up.write_warm_up(folder, functions, Path(path).name)
        content = describe(model.config, how, functions)
        write_manifest(folder, content)
        exported = SavedModelRuntime(folder)
        bound = bound or BOUNDS[how.dtype]
        verification = verify_export(reference, exported, bound, verify)
        if model.config.in_channels in (1, 3):
            files = verify_files(exported, bound)
            verification = dataclasses.replace(verification, files_difference=files)
        accuracy = None
        if accuracy_data is not None:
            unmerged = reference if given is model else KerasRuntime(float32_model(given))
            accuracy = check_drop(unmerged, exported, accuracy_data, max_drop)
        latency, plain_latency = _latencies(exported, reference.model)
        write_manifest(
            folder,
            {
                **content,
                "verification": as_json(verification),
                "accuracy": as_json(accuracy) if accuracy else None,
                "latency_ms": {"export": latency, "plain": plain_latency},
            },
        )
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    export = SavedModelExport(
        path=placed[0],
        version=int(placed[0].name),
        dtype=how.dtype,
        size=size,
        latency=latency,
        plain_latency=plain_latency,
        verification=verification,
        accuracy=accuracy,
    )
    return as_json(export)


def _serving(
    config: ViTConfig,
    dtype: str,
    activation: str | None,
    images: str,
    labels: Sequence[str] | None,
    top_k: int,
    max_batch_size: int,
    max_pixels: int,
) -> Serving:
    """Checks the arguments."""
    check_choice("dtype", dtype, DTYPES)
    activation = chosen_function(config, activation)
    check_choice("images", images, IMAGES)
    check_count("top_k", top_k)
    check_count("max_batch_size", max_batch_size)
    check_count("max_pixels", max_pixels)
    height, width, _ = config.input_shape
    least = most_pixels(height, width, config)
    if max_pixels < least and config.in_channels in (1, 3):
        raise ValueError(
            f"max_pixels must be at least {least}, what an image of the model's own size "
            f"({height}, {width}) is resized to. Received: max_pixels={max_pixels}"
        )
    names = class_names(config, labels) or [str(i) for i in range(config.num_classes)]
    return Serving(
        dtype=dtype,
        activation=activation,
        images=images,
        labels=tuple(names),
        top_k=min(top_k, config.num_classes),
        max_batch_size=max_batch_size,
        max_pixels=max_pixels,
    )


def _latencies(exported: SavedModelRuntime, model: ViT) -> list[float]:
    """Milliseconds for one image: of the export, and of the Keras model in a `tf.function`."""
    import tensorflow as tf

    pixels = generated_images(model.config, 1)
    floats = tf.constant(normalize(pixels, model.config))
    images = tf.constant(pixels) if exported.manifest["images"] == "uint8" else floats
    plain = tf.function(lambda x: model(x, training=False), autograph=False)
    serve = exported.signature("serving_default")
    return latencies([lambda: serve(images=images), lambda: plain(floats)])

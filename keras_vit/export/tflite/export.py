"""Exports a model as a TFLite file for phones and browsers: converted, quantized, verified."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.export.accuracy import Drop, check_drop, check_max_drop
from keras_vit.export.arguments import (
    IMAGES,
    PROBABILITIES,
    check_bound,
    check_choice,
    check_count,
    class_names,
)
from keras_vit.export.fold import check_model, fold
from keras_vit.export.one_file import check_file, new_file
from keras_vit.export.quantization import CALIBRATED, calibration_images, check_quantizing
from keras_vit.export.record import package_versions
from keras_vit.export.requirement import check_tensorflow
from keras_vit.export.tflite.metadata import add_metadata
from keras_vit.export.tflite.operators import OUTPUTS, to_float32_tflite
from keras_vit.export.tflite.quantize import quantize_file
from keras_vit.export.verify import (
    Verification,
    checked_pictures,
    float32_model,
    latencies_of_both,
    merging_model,
    verify_export,
)
from keras_vit.model import ViT
from keras_vit.runtime import KerasRuntime
from keras_vit.runtime.base import FORMAT, probability_function
from keras_vit.runtime.tflite import TFLiteRuntime

BOUNDS = {None: 1e-5, "float16": 5e-3, "dynamic": 0.1, "int8": 0.3}
"""The largest difference from the model by `quantize`, as a share of the logits' range."""

FILE = ".tflite"


@dataclasses.dataclass(frozen=True)
class TFLiteExport:
    """What was written, and how it compares with the model."""

    path: Path
    quantize: str | None
    """None, "float16", "dynamic" or "int8"."""
    size: int
    """Bytes."""
    latency: float
    """Milliseconds for one image on one thread, the shortest of several."""
    plain_latency: float
    """The same for the Keras model on its backend; the two were timed in turns."""
    verification: Verification
    accuracy: Drop | None = None
    """The model's accuracy and the file's on `accuracy_data`, or None."""


@takes_classifier
def export_tflite(
    model: ViT,
    path: str | os.PathLike,
    *,
    quantize: str | None = None,
    batch_size: int | None = 1,
    labels: Sequence[str] | None = None,
    activation: str | None = None,
    output: str = "probabilities",
    images: str = "float32",
    description: str | None = None,
    calibration: Any = None,
    float_layers: Sequence[str] | None = None,
    token_merging: int | None = None,
    accuracy_data: Any = None,
    max_drop: float = 1.0,
    bound: float | None = None,
    verify: Any = None,
    overwrite: bool = False,
) -> TFLiteExport:
    """Writes a model as a `.tflite` file of built-in operators, with the metadata that apps read.

    The model is folded and then converted by TensorFlow, whatever backend it is on. The file
    appears only after it was run and compared with the model; if it differs by more than `bound`,
    or loses more accuracy than `max_drop`, this raises `ValueError` and leaves nothing behind.

    The file has one input, `images`, and one output. Its metadata says how pixels become the input
    and what the classes are called, so that `mediapipe.tasks.vision.ImageClassifier` opens it.
    MediaPipe has one mean and one deviation for all channels, so a model that normalizes each
    channel by its own numbers needs `images="uint8"`.

    | `quantize` | weights | computes in |
    |---|---|---|
    | None | float32 | float32 |
    | "float16" | float16, half the size | float32 |
    | "dynamic" | int8, a quarter | int8 products, scaled by each input; the rest float32 |
    | "int8" | int8, a quarter | int8 products, scaled by `calibration`; the rest float32 |

    Args:
        model: A `ViT` on any backend, not quantized. LoRA is merged.
        path: The file, ending in `.tflite`.
        quantize: None, "float16", "dynamic" or "int8".
        batch_size: Images at a time; None means any number, which the app must then choose. The
            Task libraries need 1.
        labels: Names of the classes; None means the config's, if it has any.
        activation: "softmax" or "sigmoid", from logits to probabilities; None means the config's
            `classifier_activation` if that is sigmoid, otherwise softmax.
        output: "probabilities", "logits" or "features", what the head reads. A model without a head
            has features alone.
        images: "float32" if the input is what the model takes, "uint8" if it is pixels of the
            model's size, which the file normalizes.
        description: What the model is, for people who inspect the file.
        calibration: Images for "int8", typical ones: uint8 pixels of the model's size, or with
            `images="float32"` floats as the model takes them. A hundred are enough.
        float_layers: Layers that stay in float32, as `keras_vit.quantization_sweep` names them.
        token_merging: r: each block merges its r most similar pairs of tokens, for speed; None means
            the config's. The export is then compared with the model that merges likewise, its
            accuracy with that of `model`.
        accuracy_data: Images and their classes, `(images, labels)` or batches of them, on which the
            accuracy of the file is compared with the model's.
        max_drop: The most percentage points of accuracy that the file may lose on them.
        bound: The largest difference of a logit, as a share of their range; None means 1e-5 in
            float32, 0.005 in float16, 0.1 in dynamic and 0.3 in int8. In int8 this only catches
            broken files: use `accuracy_data` to see the cost.
        verify: Images to compare on, as for `calibration`. None means generated images, or in int8
            those of `calibration`, because its ranges fit no others.
        overwrite: Whether to replace an existing file.

    Returns:
        An `TFLiteExport`: path, size, latency, the verification and the accuracy.

    Example:

    >>> export = keras_vit.export_tflite(model, "flowers.tflite", quantize="dynamic")
    >>> export.size, export.latency
    """
    check_tensorflow()
    check_model(model)
    given, model = model, merging_model(model, token_merging)
    config = model.config
    target = check_file(path, FILE, overwrite)
    check_choice("quantize", quantize, tuple(BOUNDS))
    check_choice("activation", activation, (None, *PROBABILITIES))
    check_choice("output", output, OUTPUTS)
    check_choice("images", images, IMAGES)
    check_bound(bound)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    names = class_names(config, labels)
    _check_head(config, output, accuracy_data, max_drop)
    if description is not None and (not isinstance(description, str) or not description.strip()):
        raise ValueError(f"description must be a text. Received: description={description!r}")
    pictures = None if verify is None else checked_pictures(verify, config, images)
    check_quantizing(quantize, calibration, float_layers)
    if calibration is not None:
        calibration = calibration_images(calibration, config, images)
        pictures = calibration[:CALIBRATED] if pictures is None else pictures

    activation = activation or probability_function(config)
    reference = KerasRuntime(float32_model(model))
    accuracy_reference = reference if given is model else KerasRuntime(float32_model(given))
    content = to_float32_tflite(
        fold(model), batch_size=batch_size, output=output, images=images, activation=activation
    )
    if quantize:
        content = quantize_file(
            content, quantize, calibration=calibration, float_layers=float_layers or ()
        )
    record = {
        "format": FORMAT,
        "config": config.to_dict(),
        "labels": names,
        "activation": activation,
        "output": output,
        "images": images,
        "quantize": quantize,
        "versions": package_versions("tensorflow"),
    }
    description = description or f"A Vision Transformer ({_size(config)}), made by keras_vit"
    content = add_metadata(content, record, target.stem, description)
    with new_file(target, overwrite) as beside:
        beside.write_bytes(content)
        exported = TFLiteRuntime(beside)
        if bound is None:
            bound = BOUNDS[quantize]
        verification = verify_export(reference, exported, bound, pictures)
        accuracy = None
        if accuracy_data is not None:
            accuracy = check_drop(accuracy_reference, exported, accuracy_data, max_drop)
        latency, plain_latency = latencies_of_both(
            exported, reference.model, exported.batch_size or 1
        )
    return TFLiteExport(
        path=target,
        quantize=quantize,
        size=len(content),
        latency=latency,
        plain_latency=plain_latency,
        verification=verification,
        accuracy=accuracy,
    )


# -- the arguments


def _check_head(config: ViTConfig, output: str, accuracy_data: Any, max_drop: Any) -> None:
    if output != "features" and not config.num_classes:
        raise ValueError(
            "output must be 'features' for a model without a head. "
            f"Received: output={output!r}, num_classes=0"
        )
    if accuracy_data is not None and (output == "features" or config.pooling is None):
        raise ValueError(
            "accuracy_data must be None where the file gives no classes of an image. "
            f"Received: output={output!r}, pooling={config.pooling!r}"
        )
    check_max_drop(max_drop)


# -- the file


def _size(config: ViTConfig) -> str:
    (height, width), (rows, columns) = config.image_size, config.patch_size
    return (
        f"{config.depth} blocks of width {config.width}, patches of {rows}x{columns}, "
        f"images of {height}x{width}"
    )

"""Exports a model as a TFLite file for phones and browsers: converted, quantized, verified."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.export.arguments import check_choice, check_count
from keras_vit.export.file_export import FileExport, check_task
from keras_vit.export.fold import fold
from keras_vit.export.requirement import check_tensorflow
from keras_vit.export.tflite.metadata import add_metadata
from keras_vit.export.tflite.operators import OUTPUTS, to_float32_tflite
from keras_vit.export.tflite.quantize import quantize_file
from keras_vit.model import ViT
from keras_vit.runtime.tflite import TFLiteRuntime

BOUNDS = {None: 1e-5, "float16": 5e-3, "dynamic": 0.1, "int8": 0.3}
"""The largest difference from the model by `quantize`, as a share of the logits' range."""

FILE = ".tflite"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFLiteExport(FileExport):
    """What was written, and how it compares with the model.

    The latency is that on one thread.
    """


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
        activation: "softmax" or "sigmoid", from logits to probabilities; None means sigmoid if the
            model has one class or a `classifier_activation` of sigmoid, otherwise softmax.
        output: "probabilities", "logits" or "features", what the head reads. A model without a head
            has features alone.
        images: "float32" if the input is what the model takes, "uint8" if it is pixels of the
            model's size, which the file normalizes.
        description: What the model is, for people who inspect the file.
        calibration: Images for "int8", typical ones: uint8 pixels of the model's size, or with
            `images="float32"` floats as the model takes them. A hundred are enough.
        float_layers: Layers that stay in float32, as `keras_vit.quantization_sweep` names them.
        token_merging: r, the most similar pairs of tokens that each block merges, for speed; None
            means the config's. The export is compared with the model that merges likewise, its
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
    task = check_task(
        model,
        path,
        FILE,
        modes=[mode for mode in BOUNDS if mode],
        quantize=quantize,
        labels=labels,
        activation=activation,
        images=images,
        calibration=calibration,
        float_layers=float_layers,
        token_merging=token_merging,
        accuracy_data=accuracy_data,
        max_drop=max_drop,
        bound=bound,
        verify=verify,
        overwrite=overwrite,
    )
    config = task.model.config
    if batch_size is not None:
        check_count("batch_size", batch_size)
    check_choice("output", output, OUTPUTS)
    _check_head(config, output, accuracy_data)
    if description is not None and (not isinstance(description, str) or not description.strip()):
        raise ValueError(f"description must be a text. Received: description={description!r}")

    content = to_float32_tflite(
        fold(task.model),
        batch_size=batch_size,
        output=output,
        images=images,
        activation=task.activation,
    )
    if quantize:
        content = quantize_file(
            content, quantize, calibration=task.calibration, float_layers=task.float_layers
        )
    record = task.record("tensorflow", output=output)
    description = description or f"A Vision Transformer ({_size(config)}), made by keras_vit"
    content = add_metadata(content, record, task.target.stem, description)
    with task.new_file() as beside:
        beside.write_bytes(content)
        exported = TFLiteRuntime(beside)
        facts = task.compare(exported, BOUNDS[quantize], exported.batch_size or 1)
    return TFLiteExport(**facts, size=len(content))


# -- the arguments


def _check_head(config: ViTConfig, output: str, accuracy_data: Any) -> None:
    if output != "features" and not config.num_classes:
        raise ValueError(
            "output must be 'features' for a model without a head. "
            f"Received: output={output!r}, num_classes=0"
        )
    if accuracy_data is not None and output == "features":
        raise ValueError(
            "accuracy_data must be None where the file gives no classes of an image. "
            f"Received: output={output!r}"
        )


# -- the file


def _size(config: ViTConfig) -> str:
    (height, width), (rows, columns) = config.image_size, config.patch_size
    return (
        f"{config.depth} blocks of width {config.width}, patches of {rows}x{columns}, "
        f"images of {height}x{width}"
    )

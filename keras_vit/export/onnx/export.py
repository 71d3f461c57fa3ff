"""Exports a model as an ONNX file of standard operators, verified in ONNX Runtime."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.export.arguments import check_choice
from keras_vit.export.file_export import FileExport, check_task
from keras_vit.export.fold import fold
from keras_vit.export.onnx.operators import (
    DTYPES,
    MAX_BYTES,
    OPSET,
    import_onnx,
    to_onnx,
)
from keras_vit.export.onnx.quantize import QuantizedOperators, measure_channels
from keras_vit.export.quantization import MODES, modes_of, product_names
from keras_vit.export.smoothing import smoothed, whole_ranges
from keras_vit.model import ViT
from keras_vit.runtime.base import RECORD
from keras_vit.runtime.onnx import OnnxRuntime, import_onnxruntime

BOUNDS = {"float32": 1e-5, "float16": 0.005, "dynamic": 0.1, "int8": 0.3}
"""The largest difference from the model by `quantize` or `dtype`, as a share of the logits' range.
"""

FILE = ".onnx"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ONNXExport(FileExport):
    """What was written, and how it compares with the model."""

    dtype: str
    """Of the weights and the products that are not quantized."""
    opset: int


@takes_classifier
def export_onnx(
    model: ViT,
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    labels: Sequence[str] | None = None,
    activation: str | None = None,
    images: str = "float32",
    opset: int = OPSET,
    calibration: Any = None,
    float_layers: Sequence[str] | None = None,
    token_merging: int | None = None,
    accuracy_data: Any = None,
    max_drop: float = 1.0,
    bound: float | None = None,
    verify: Any = None,
    overwrite: bool = False,
) -> ONNXExport:
    """Writes a model as an `.onnx` file, for ONNX Runtime and other engines that read the format.

    The model is folded and written operator by operator, whatever backend it is on. The file
    appears only after it has passed ONNX' own checker, and was run and compared with the model; if
    they differ by more than `bound`, or the file loses more accuracy than `max_drop`, this raises
    `ValueError` and leaves nothing behind.

    | | name | shape, B is any number |
    |---|---|---|
    | input | `images` | (B, H, W, C) |
    | outputs | `logits`, `probabilities` | (B, K), with `pooling=None` (B, T, K) |
    | | `features`, what the head reads | (B, D), with `pooling=None` (B, T, D) |

    A model without a head has only `features`. Outputs are in float32 whatever `dtype` is. The
    file's metadata holds the config, the labels and how pixels become images. There is no second
    file for the weights, so it must stay below 2 GB: up to ViT-L in float32, up to ViT-g/14 in
    float16.

    | `quantize` | weights | computes in |
    |---|---|---|
    | None | `dtype` | `dtype` |
    | "dynamic" | int8, a quarter | int8 products, scaled by each batch; the rest float32 |
    | "int8" | int8, a quarter | int8 products, scaled by `calibration`; the rest float32 |

    Both int8 files are for ONNX Runtime on processors, where they are the fastest. The images of a
    call share the scales of all products in "dynamic", and of the first and the last in "int8": an
    image would change the logits of others, so `keras_vit.runtime` passes one at a time. Do the
    same. An "int8" file has operators of ONNX Runtime's own, which other engines do not read.

    Args:
        model: A `ViT` on any backend, not quantized. LoRA is merged.
        path: The file, ending in `.onnx`.
        dtype: "float32", or "float16" for half the size; LayerNorm and softmax still compute in
            float32. A GPU multiplies in float16. On processors that do not, ONNX Runtime converts
            the weights back to float32, so speed and memory are those of a float32 file.
        quantize: None, "dynamic" or "int8"; `dtype` is then "float32".
        labels: Names of the classes; None means the config's, if it has any.
        activation: "softmax" or "sigmoid", from logits to probabilities; None means sigmoid if the
            model has one class or a `classifier_activation` of sigmoid, otherwise softmax.
        images: "float32" if the input is what the model takes, "uint8" if it is pixels of the
            model's size, which the file normalizes.
        opset: The version of ONNX' operators: 20, the first with GELU, or a newer one that the
            installed ONNX Runtime knows.
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
        An `ONNXExport`: path, size, latency, the verification and the accuracy.

    Example:

    >>> export = keras_vit.export_onnx(model, "flowers.onnx")
    >>> session = onnxruntime.InferenceSession("flowers.onnx")
    >>> (logits,) = session.run(["logits"], {"images": images})
    """
    task = check_task(
        model,
        path,
        FILE,
        modes=MODES,
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
    check_choice("dtype", dtype, DTYPES)
    if quantize and dtype != "float32":
        raise ValueError(
            "dtype must be 'float32' with quantize, which is about the products. "
            f"Received: dtype={dtype!r}, quantize={quantize!r}"
        )
    onnx = import_onnx()
    import_onnxruntime()  # before any work is done
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or isinstance(opset, bool) or not OPSET <= opset <= newest:
        raise ValueError(
            f"opset must be an int from {OPSET} to {newest}. Received: opset={opset!r}"
        )
    _check_size(task.model, dtype, quantize)

    record = task.record("onnx", "onnxruntime", dtype=dtype)
    folded, ops = fold(task.model), None
    if quantize:
        how, ranges = modes_of(quantize, product_names(folded), task.float_layers), {}
        if task.calibration is not None:
            folded, seen = smoothed(folded, measure_channels(folded, task.calibration, images))
            ranges = whole_ranges(seen)
        ops = QuantizedOperators(how, ranges)
    made = to_onnx(
        folded,
        dtype=dtype,
        images=images,
        activation=task.activation,
        opset=opset,
        ops=ops,
    )
    del folded, ops
    _describe(made, record)
    with task.new_file() as beside:
        beside.write_bytes(made.SerializeToString(deterministic=True))
        del made
        onnx.checker.check_model(os.fspath(beside), full_check=True)
        try:
            exported = OnnxRuntime(beside)
        except ValueError as error:
            if opset == OPSET:
                raise
            raise ValueError(
                f"opset must be one that ONNX Runtime reads. Received: opset={opset}; {error}"
            ) from error
        facts = task.compare(exported, BOUNDS[quantize or dtype])
        size = beside.stat().st_size
    return ONNXExport(**facts, dtype=dtype, opset=opset, size=size)


# -- the arguments


def _check_size(model: ViT, dtype: str, quantize: str | None) -> None:
    """Checked before the weights are copied, which takes as much memory again."""
    count = model.count_params()
    size = count * (1 if quantize == "dynamic" else np.dtype(dtype).itemsize)
    if size > MAX_BYTES:
        half = count * np.dtype("float16").itemsize
        fits = "dtype='float16' does" if half <= MAX_BYTES else "no dtype does"
        calibrated = ", while it is calibrated" if quantize == "int8" else ""
        raise ValueError(
            f"model must fit in an ONNX file of 2 GB{calibrated}, and {fits}. "
            f"Received: dtype={dtype!r}, quantize={quantize!r} with {size / 1e9:.1f} GB of weights"
        )


# -- the file


def _describe(made: Any, record: dict[str, Any]) -> None:
    """Describes the model in the file: to us as JSON, to people in the fields that viewers show."""
    onnx, config = import_onnx(), ViTConfig.from_dict(record["config"])
    (height, width), (rows, columns) = config.image_size, config.patch_size
    made.producer_name = "keras_vit"
    made.producer_version = record["versions"]["keras_vit"]
    made.doc_string = (
        f"Vision Transformer (arXiv 2010.11929) for images of {height}x{width}: {config.depth} "
        f"blocks of width {config.width}, patches of {rows}x{columns}. Folded for inference: "
        f"weights of LayerNorm, LayerScale and LoRA are in the products beside them."
    )
    pixels = f"(pixel / 255 - mean) / std, mean {config.pixel_mean}, std {config.pixel_std}"
    taken = "uint8 pixels, normalized inside" if record["images"] == "uint8" else pixels
    axes = "(batch, height, width, channels)"
    made.graph.input[0].doc_string = f"{axes}: {taken}"
    texts = {
        "logits": "a number a class, before any activation",
        "probabilities": f"{record['activation']} of the logits",
        "features": "what the head reads",
    }
    for output in made.graph.output:
        output.doc_string = texts[output.name]
    fields = {
        RECORD: json.dumps(record, ensure_ascii=False),
        "images": f"{axes}: {taken}",
        "resize": f"{config.resize_method}, to {height}x{width}"
        + ("" if config.crop_fraction is None else f", center crop {config.crop_fraction}"),
        "weights": record["quantize"] or record["dtype"],
    }
    if record["labels"] is not None:
        fields["labels"] = "\n".join(record["labels"])
    onnx.helper.set_model_props(made, fields)

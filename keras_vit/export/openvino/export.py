"""Exports a model as OpenVINO's two files, verified in OpenVINO."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_vit.classifier import takes_classifier
from keras_vit.export.arguments import check_choice
from keras_vit.export.file_export import FileExport, check_task
from keras_vit.export.fold import fold
from keras_vit.export.onnx.operators import MAX_BYTES, import_onnx
from keras_vit.export.openvino.convert import PairedOperators, measure_channels, to_openvino
from keras_vit.export.quantization import modes_of, product_names
from keras_vit.export.smoothing import whole_ranges
from keras_vit.model import ViT
from keras_vit.runtime.base import RECORD
from keras_vit.runtime.openvino import (
    HINTS,
    WEIGHTS,
    OpenVINORuntime,
    import_openvino,
    weights_hash,
)

BOUNDS = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.3}
"""The largest difference from the model by `quantize` or `dtype`, as a share of the logits' range.
"""

FILE = ".xml"
UNKNOWN = "0" * 64  # stands for the hash of the weights until they are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenVINOExport(FileExport):
    """What was written, and how it compares with the model.

    `path` is the `.xml` file; the `.bin` file is beside it.
    """

    dtype: str
    """What is computed in, but for products in int8."""


@takes_classifier
def export_openvino(
    model: ViT,
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    labels: Sequence[str] | None = None,
    activation: str | None = None,
    images: str = "float32",
    calibration: Any = None,
    float_layers: Sequence[str] | None = None,
    token_merging: int | None = None,
    accuracy_data: Any = None,
    max_drop: float = 1.0,
    bound: float | None = None,
    verify: Any = None,
    overwrite: bool = False,
) -> OpenVINOExport:
    """Writes a model as an `.xml` and a `.bin` file, for OpenVINO and its model server.

    The files appear only after they were run and compared with the model; if they differ by more
    than `bound`, or lose more accuracy than `max_drop`, this raises `ValueError` and leaves nothing
    behind. The `.xml` file comes last, so it is there only if both are complete; with `overwrite`
    the old one is removed first.

    The inputs and outputs are those of `export_onnx`: `images` (B, H, W, C), and `logits`,
    `probabilities` and `features` for any B. The `.xml` file holds the config, the labels and how
    pixels become images.

    OpenVINO chooses the dtype that it computes in when it compiles a model, and takes bfloat16
    wherever the processor can. `keras_vit.runtime` passes `INFERENCE_PRECISION_HINT` for the dtype
    of the export. Other programs must pass it themselves.

    Args:
        model: A `ViT` on any backend, not quantized. LoRA is merged.
        path: The file, ending in `.xml`. The weights go to the same name with `.bin`.
        dtype: "float32" or "bfloat16": what `keras_vit.runtime` computes in. With "bfloat16" the
            file holds the weights in float16, half the size.
        quantize: None, or "int8" for products in int8, scaled by `calibration`. The rest is
            computed in `dtype`. The patch projection and the head are not quantized.
        labels: Names of the classes; None means the config's, if it has any.
        activation: "softmax" or "sigmoid", from logits to probabilities; None means sigmoid if the
            model has one class or a `classifier_activation` of sigmoid, otherwise softmax.
        images: "float32" if the input is what the model takes, "uint8" if it is pixels of the
            model's size, which the graph normalizes.
        calibration: Images for "int8", typical ones: uint8 pixels of the model's size, or with
            `images="float32"` floats as the model takes them. A hundred are enough.
        float_layers: Layers that stay in float, as `keras_vit.quantization_sweep` names them.
        token_merging: r, the most similar pairs of tokens that each block merges, for speed; None
            means the config's. The export is compared with the model that merges likewise, its
            accuracy with that of `model`.
        accuracy_data: Images and their classes, `(images, labels)` or batches of them, on which the
            accuracy of the export is compared with the model's.
        max_drop: The most percentage points of accuracy that the export may lose on them.
        bound: The largest difference of a logit, as a share of their range; None means 1e-5 in
            float32, 0.05 in bfloat16 and 0.3 in int8. In int8 this only catches broken files: use
            `accuracy_data` to see the cost.
        verify: Images to compare on, as for `calibration`. None means generated images, or in int8
            those of `calibration`, because its ranges fit no others.
        overwrite: Whether to replace existing files.

    Returns:
        An `OpenVINOExport`: path, size, latency, the verification and the accuracy.

    Example:

    >>> export = keras_vit.export_openvino(model, "flowers.xml", dtype="bfloat16")
    >>> keras_vit.runtime.open("flowers.xml").probabilities(images)
    """
    task = check_task(
        model,
        path,
        FILE,
        modes=("int8",),
        companions=(WEIGHTS,),
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
    check_choice("dtype", dtype, tuple(HINTS))
    openvino = import_openvino()  # before any work is done
    import_onnx()
    _check_size(task.model)

    record = task.record("onnx", "openvino", dtype=dtype, weights_sha256=UNKNOWN)
    folded, ops = fold(task.model), None
    if task.calibration is not None:
        how = modes_of("int8", product_names(folded), task.float_layers)
        seen = measure_channels(folded, task.calibration, images)
        ops = PairedOperators(how, whole_ranges(seen))
    made = to_openvino(folded, images=images, activation=task.activation, ops=ops)
    del folded, ops
    made.set_rt_info(json.dumps(record, ensure_ascii=False), [RECORD])
    with task.new_file() as beside:
        openvino.save_model(made, os.fspath(beside), compress_to_fp16=dtype == "bfloat16")
        del made
        _state_hash(beside)
        exported = OpenVINORuntime(beside)
        facts = task.compare(exported, BOUNDS[quantize or dtype])
        size = sum(beside.with_suffix(suffix).stat().st_size for suffix in (FILE, WEIGHTS))
        del exported  # which maps the file of the weights
    return OpenVINOExport(**facts, dtype=dtype, size=size)


def _check_size(model: ViT) -> None:
    """Checked before the weights are copied, which takes as much memory again."""
    size = 4 * model.count_params()
    if size > MAX_BYTES:
        raise ValueError(
            "model must have at most 2 GB of weights in float32, because OpenVINO reads its graph "
            f"as an ONNX file in memory. Received: {size / 1e9:.1f} GB of weights"
        )


def _state_hash(path: Path) -> None:
    """Puts the hash of the weights into the record, so that no other `.bin` file passes for it."""
    text = path.read_bytes()
    before, found, after = text.partition(UNKNOWN.encode())
    if not found or UNKNOWN.encode() in after:
        raise ValueError(f"The .xml file must hold its record once. Received: {path}")
    path.write_bytes(before + weights_hash(path).encode() + after)

"""What int8 costs, layer by layer: each is quantized alone, and the file run on the user's images.

Some layers of a trained ViT see a few values that are far larger than all others, and 256 steps
over such a range leave little for the rest. Which ones they are depends on the model and its
images, so it is measured: those at the top of the table are for `float_layers`.
"""

import dataclasses
import importlib
import io
from typing import Any

import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.export.accuracy import batches
from keras_vit.export.arguments import check_choice, check_count
from keras_vit.export.fold import check_model, fold
from keras_vit.export.quantization import calibration_images
from keras_vit.model import ViT
from keras_vit.preprocessing import model_input
from keras_vit.runtime import KerasRuntime

TARGETS = ("tflite", "onnx", "openvino")
WHAT = ("file", "kind", "operator", "layer")


@dataclasses.dataclass(frozen=True)
class Row:
    """What one way to quantize costs."""

    what: str
    """"file": all layers in a mode; "kind": one layer of every block at once; "operator": one kind
    between the layers, which `quantize="int8"` leaves in float32, in TFLite alone; "layer": a
    single layer."""
    name: str
    """Of a layer, such as "encoder_block_3/mlp/dense_1"."""
    difference: float
    """Root mean square difference of the logits (without a head, of the features) from those of the
    float32 file, as a share of their standard deviation."""
    other_top_class: float | None
    """Share of the images whose top class differs; None without a head."""
    accuracy: float | None
    """Top-1 accuracy on `data`; None without it."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The rows of `quantization_sweep`; as a string, a table."""

    rows: tuple[Row, ...]
    images: int
    """How many images the files were run on."""
    accuracy: float | None
    """Top-1 accuracy of the float32 file on `data`; None without it."""

    def worst(self, count: int = 3) -> tuple[str, ...]:
        """The layers that cost the most, worst first, to pass as `float_layers`."""
        check_count("count", count)
        layers = [row for row in self.rows if row.what == "layer"]
        return tuple(row.name for row in _by_cost(layers)[:count])

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table

        title = f"int8 on {self.images} images"
        if self.accuracy is not None:
            title += f"; float32 is right on {self.accuracy:.2%}"
        table = Table(title=title, box=box.SIMPLE, pad_edge=False)
        table.add_column("quantized")
        table.add_column("")
        for name in ("difference", "other top class", "accuracy"):
            table.add_column(name, justify="right")
        for what in WHAT:
            for row in _by_cost([row for row in self.rows if row.what == what]):
                shares = (row.difference, row.other_top_class, row.accuracy)
                cells = ("" if share is None else f"{share:.2%}" for share in shares)
                table.add_row(row.name, row.what, *cells)
            table.add_section()
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=110, color_system=None).print(self)
        return text.getvalue()


@takes_classifier
def quantization_sweep(
    model: ViT,
    calibration: Any,
    data: Any = None,
    *,
    to: str = "tflite",
    num_threads: int | None = None,
) -> Sweep:
    """Quantizes a model's layers to int8 one at a time, and measures what each costs.

    The model is converted and calibrated once. Each way to quantize it is then a file in memory,
    which is run on all images: for ViT-S/16 at 224 px with 50 images, about a hundred files in a
    few minutes.

    Args:
        model: A `ViT` on any backend, not quantized.
        calibration: Typical images: floats as the model takes them or uint8 pixels of its size.
            A hundred are enough.
        data: Labeled images to run on, `(images, labels)` or batches of them; None means the
            calibration images, and no accuracy.
        to: The export that is tried: "tflite", "onnx" or "openvino". Layers have other names in
            a TFLite file, where query, key and value are not one product.
        num_threads: How many threads run a file; None means the engine's default: one in LiteRT,
            one a core in ONNX Runtime and OpenVINO.

    Returns:
        A `Sweep`: print it to see the table; `worst` returns layers to pass as `float_layers` to
        `export_tflite`, `export_onnx` or `export_openvino`.

    Example:

    >>> sweep = keras_vit.quantization_sweep(model, images)
    >>> print(sweep)
    >>> keras_vit.export_tflite(
    ...     model, path, quantize="int8", calibration=images, float_layers=sweep.worst(2)
    ... )
    """
    check_model(model)
    check_choice("to", to, TARGETS)
    if num_threads is not None:
        check_count("num_threads", num_threads)
    config = model.config
    calibration = calibration_images(calibration, config, "float32")
    images, labels = calibration, None
    if data is not None:
        images, labels = _labeled(model, data)
    target = importlib.import_module(f"keras_vit.export.{to}.sweep")
    wanted, rows = None, []
    for what, name, answers in target.trials(fold(model), calibration, num_threads):
        found = answers(images)
        if wanted is None:  # the first is the float32 file
            wanted = found
            if not np.isfinite(wanted).all():
                raise ValueError("model must give finite logits. Received: NaN or infinite ones")
            continue
        rows.append(_row(what, name, wanted, found, labels, bool(config.num_classes)))
    accuracy = None
    if wanted is not None and labels is not None:
        accuracy = float((wanted.argmax(-1) == labels).mean())
    return Sweep(tuple(rows), len(images), accuracy)


def _labeled(model: ViT, data: Any) -> tuple[np.ndarray, np.ndarray]:
    parts = [
        (model_input(images, model.config, "data"), labels)
        for images, labels in batches(KerasRuntime(model), data)
    ]
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return images, labels


def _row(
    what: str,
    name: str,
    wanted: np.ndarray,
    found: np.ndarray,
    labels: np.ndarray | None,
    has_classes: bool,
) -> Row:
    difference = np.sqrt(np.mean(np.square(found.astype("float64") - wanted)))
    top_class = found.argmax(-1)
    return Row(
        what=what,
        name=name,
        difference=float(difference / (wanted.std(dtype="float64") or 1)),
        other_top_class=float((top_class != wanted.argmax(-1)).mean()) if has_classes else None,
        accuracy=None if labels is None else float((top_class == labels).mean()),
    )


def _by_cost(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.difference)

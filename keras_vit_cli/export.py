"""`keras-vit export`: a trained model or a checkpoint in the form that serves it."""

import enum
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_vit_cli import output as printed
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, AsJson, Debug, check_folder, check_source

if TYPE_CHECKING:
    from keras_vit.config import ViTConfig


class Target(enum.StrEnum):
    """What `export` writes."""

    saved_model = "saved_model"
    tflite = "tflite"
    onnx = "onnx"
    openvino = "openvino"


class Dtype(enum.StrEnum):
    """The dtype of weights and matrix products."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(enum.StrEnum):
    """How a file stores the weights."""

    none = "none"
    float16 = "float16"
    dynamic = "dynamic"
    int8 = "int8"


class Images(enum.StrEnum):
    """The input's dtype."""

    float32 = "float32"
    uint8 = "uint8"


class Output(enum.StrEnum):
    """The outputs of a `.tflite` file."""

    probabilities = "probabilities"
    logits = "logits"
    features = "features"


class Activation(enum.StrEnum):
    """From logits to probabilities."""

    softmax = "softmax"
    sigmoid = "sigmoid"


INT8 = ("quantize", "calibration", "float_layers", "accuracy_data", "max_drop")
OPTIONS = {
    Target.saved_model: (
        *("accuracy_data", "max_drop", "dtype", "version"),
        *("top_k", "max_batch_size", "max_pixels"),
    ),
    Target.tflite: (*INT8, "output", "batch_size", "overwrite"),
    Target.onnx: (*INT8, "dtype", "overwrite"),
    Target.openvino: (*INT8, "dtype", "overwrite"),
}
"""Options for some targets only."""

SUFFIXES = {Target.tflite: ".tflite", Target.onnx: ".onnx", Target.openvino: ".xml"}
OWN_WRITERS = (Target.onnx, Target.openvino)
"""Targets that are written without TensorFlow."""


def export(
    source: Annotated[
        str,
        typer.Argument(help=f"A run folder, a .keras file or a checkpoint: {CHECKPOINT}"),
    ],
    to: Annotated[Target, typer.Option("--to", help="The format to write.")],
    place: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder of all versions, which defaults to savedmodels/NAME; or the file, "
            "which defaults to NAME.tflite, NAME.onnx or NAME.xml.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="saved_model, openvino: float32 or bfloat16; onnx: float32 or float16."),
    ] = None,
    quantize: Annotated[
        Quantize | None,
        typer.Option(
            help="tflite: float16, dynamic or int8; onnx: dynamic or int8; openvino: int8. int8 "
            "needs --calibration."
        ),
    ] = None,
    output: Annotated[
        Output | None,
        typer.Option(help="tflite: defaults to probabilities, or features without a head."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=0, help="tflite: images in a batch; 0 for any number.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A folder of typical images, for int8.")
    ] = None,
    float_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers that stay in float when others become int8, separated by commas."
        ),
    ] = None,
    token_merging: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Pairs of similar tokens that each block merges, for speed; check the accuracy.",
        ),
    ] = None,
    accuracy_data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with a subfolder of images for each class, by name, on which the export "
            "is compared with the model."
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            min=0, help="The most percentage points of accuracy to lose on --accuracy-data."
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(min=1, help="saved_model: a new version number; defaults to the next one."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A text file with the name of one class a line.")
    ] = None,
    activation: Annotated[
        Activation | None,
        typer.Option(help="From logits to probabilities; defaults to the model's."),
    ] = None,
    images: Annotated[
        Images, typer.Option(help="What `images` contains: normalized floats, or uint8 pixels.")
    ] = Images.float32,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="saved_model: classes that `classify` returns.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="saved_model: images in a request.")
    ] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(min=1, help="saved_model: pixels of an image file; larger ones are refused."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="tflite, onnx, openvino: replace the file.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a model for servers, phones and browsers.

    The model is compiled for inference. The export is written only after it was compared with the
    model.

    Example: keras-vit export runs/flowers --to saved_model
    """
    given = {
        "dtype": dtype,
        "quantize": quantize,
        "output": output,
        "batch_size": batch_size,
        "calibration": calibration,
        "float_layers": float_layers,
        "accuracy_data": accuracy_data,
        "max_drop": max_drop,
        "version": version,
        "top_k": top_k,
        "max_batch_size": max_batch_size,
        "max_pixels": max_pixels,
        "overwrite": overwrite or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in OPTIONS[to]:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be left out with --to {to.value}. Received: {option}")
    if max_drop is not None and accuracy_data is None:
        raise ValueError(
            "--max-drop must come with --accuracy-data, on which it is measured. "
            f"Received: --max-drop {max_drop:g}"
        )
    for option, folder in (("--calibration", calibration), ("--accuracy-data", accuracy_data)):
        if folder is not None:
            check_folder(option, folder)
    names = None if labels is None else _lines(labels)
    place = place or _default_place(source, to)
    check_source("source", source)
    # On another backend, a SavedModel is written by a second process.
    with_tensorflow = to not in OWN_WRITERS
    library = load_library("tensorflow" if with_tensorflow else None, tensorflow=with_tensorflow)
    from keras_vit import runtime
    from keras_vit.export.one_file import check_file
    from keras_vit.export.record import as_json as export_json
    from keras_vit.export.requirement import check_tensorflow
    from keras_vit.paths import as_output

    as_output("--out", place)  # before a model is fetched
    if to in SUFFIXES:
        check_file(place, SUFFIXES[to], overwrite, name="--out")
    if to not in OWN_WRITERS:
        check_tensorflow()
    # TensorFlow's "Assets written to" names a temporary folder.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    with printed.step(f"Reading {source}"):
        opened = runtime.open(source)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(f"source must not be an export itself. Received: source={source!r}")
    given |= {"labels": names, "activation": activation, "images": images}
    given |= {"token_merging": token_merging}
    given = {name: getattr(v, "value", v) for name, v in given.items()}
    given = _as_arrays(given, opened.config, names)
    if to is Target.tflite and not opened.config.num_classes:
        given.setdefault("output", "features")
    with printed.step("Exporting"):
        written = getattr(library, f"export_{to.value}")(opened.model, place, **given)
    if as_json:
        printed.print_json(export_json(written))
    elif printed.out.is_terminal:
        printed.print_facts(facts(written))
    else:
        printed.print_rows(facts(written))


def _as_arrays(
    given: dict[str, Any], config: "ViTConfig", names: Sequence[str] | None
) -> dict[str, Any]:
    """The options as the functions take them: folders become arrays of images."""
    from keras_vit.images import labeled_images, sample_images

    given = dict(given)
    if given.get("quantize") == "none":
        given["quantize"] = None
    if given.get("batch_size") == 0:
        given["batch_size"] = None
    if "float_layers" in given:
        given["float_layers"] = [name.strip() for name in given["float_layers"].split(",")]
    if "calibration" in given:
        given["calibration"] = sample_images(given["calibration"], config)
    if "accuracy_data" in given:
        given["accuracy_data"] = labeled_images(given["accuracy_data"], config, names)
    return given


def _lines(file: Path) -> list[str]:
    if file.is_dir() or not file.exists():
        found = "a folder" if file.is_dir() else "which does not exist"
        raise ValueError(
            "--labels must be a text file with the name of a class in each line. "
            f"Received: {file}, {found}"
        )
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()  # Windows may put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"--labels must be a text in UTF-8. Received: {file}, {error}") from error


def facts(export: Any) -> list[tuple[str, str]]:
    """The rows of the table, of what an export function returned."""
    seen = export.verification
    kind = getattr(export, "quantize", None) or getattr(export, "dtype", None) or "float32"
    rows = [
        ("file", f"{export.path}"),
        ("size", f"{export.size / 1e6:,.1f} MB, {kind}"),
        (
            "latency",
            f"{export.latency:.3g} ms for one image; the model itself in float32 "
            f"{export.plain_latency:.3g} ms "
            f"({export.plain_latency / export.latency:.2f} times as long)",
        ),
        (
            "largest difference",
            f"{seen.difference:.2g}, {seen.difference / (seen.logits_range or 1):.1g} of the "
            f"range {seen.logits_range:.3g} (allowed: {seen.bound:g})",
        ),
    ]
    if seen.near_ties:
        rows.append(
            (
                "near ties",
                f"{seen.near_ties} of {seen.images} images differ by more than that, because "
                "rounding merged other tokens, nearly as similar",
            )
        )
    if seen.same_top_class is not None:
        rows.append(("same top class", f"{seen.same_top_class:.1%} of {seen.images} images"))
    if (drop := getattr(export, "accuracy", None)) is not None:
        rows.append(
            (
                "accuracy",
                f"{drop.export.top_1:.2%}, the model's {drop.reference.top_1:.2%}, on "
                f"{drop.export.images} images; same top class {drop.same_top_class:.2%}",
            )
        )
    if seen.files_difference is not None:
        rows.append(("picture files", f"{seen.files_difference:.1g} of the range apart"))
    return [*rows, ("verified on", seen.where)]


def _default_place(source: str, to: Target) -> Path:
    if to is Target.saved_model:
        return Path("savedmodels", _name(source))
    return Path(f"{_name(source)}{SUFFIXES[to]}")


def _name(source: str) -> str:
    """A folder's name for the exports of a source: runs/flowers/model.keras is "flowers"."""
    path = Path(re.sub(r"^\w+://", "", source))
    if path.name == "model.keras":
        path = path.absolute().parent
    name = re.sub(r"\.(keras|npz|safetensors|weights\.h5|h5|pth?|bin)$", "", path.name)
    name = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._-")
    if not name:
        raise ValueError(f"--out must be given for this source. Received: source={source!r}")
    return name

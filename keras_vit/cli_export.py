"""`keras-vit export`: a trained model, or a checkpoint, as what serves it."""

import enum
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_vit import pictures
from keras_vit.export.one_file import check_file
from keras_vit.export.requirement import check_tensorflow

if TYPE_CHECKING:
    from keras_vit.config import ViTConfig

app = typer.Typer()
out = Console()


class Target(enum.StrEnum):
    """What `export` writes."""

    saved_model = "saved_model"
    tflite = "tflite"
    onnx = "onnx"


class Dtype(enum.StrEnum):
    """Of the weights and the products."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(enum.StrEnum):
    """What a `.tflite` file keeps of the weights."""

    none = "none"
    float16 = "float16"
    dynamic = "dynamic"
    int8 = "int8"


class Images(enum.StrEnum):
    """What the input is."""

    float32 = "float32"
    uint8 = "uint8"


class Output(enum.StrEnum):
    """What a `.tflite` file gives."""

    probabilities = "probabilities"
    logits = "logits"
    features = "features"


class Activation(enum.StrEnum):
    """From logits to probabilities."""

    softmax = "softmax"
    sigmoid = "sigmoid"


OPTIONS = {
    Target.saved_model: ("dtype", "version", "top_k", "max_batch_size", "max_pixels"),
    Target.tflite: (
        "quantize",
        "output",
        "batch_size",
        "calibration",
        "float_layers",
        "accuracy_data",
        "max_drop",
        "overwrite",
    ),
    Target.onnx: ("dtype", "overwrite"),
}
"""Those that not every target has."""
CALIBRATION = 200  # pictures of the folder, evenly chosen
BATCH = 64


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, or any checkpoint: a path, a name that "
            "`keras-vit models` lists, hf://organisation/name\\[@revision]\\[/file], https://..."
        ),
    ],
    to: Annotated[Target, typer.Option("--to", help="What to write.")],
    place: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder of all versions, by default savedmodels/NAME; or the file, by default "
            "NAME.tflite or NAME.onnx.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="saved_model: float32 or bfloat16; onnx: float32 or float16."),
    ] = None,
    quantize: Annotated[
        Quantize | None, typer.Option(help="tflite: int8 needs --calibration.")
    ] = None,
    output: Annotated[
        Output | None,
        typer.Option(help="tflite: by default probabilities, or without a head features."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=0, help="tflite: images at a time; 0 for any number.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="tflite: a folder of typical pictures, for int8.")
    ] = None,
    float_layers: Annotated[
        str | None, typer.Option(help="tflite: layers that int8 leaves in float, with commas.")
    ] = None,
    accuracy_data: Annotated[
        Path | None,
        typer.Option(help="tflite: a folder with one of pictures for each class, by its name."),
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(min=0, help="tflite: points of accuracy that may be lost on it.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(min=1, help="saved_model: a number that is free; by default the next one."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A text file with the name of a class in each line.")
    ] = None,
    activation: Annotated[
        Activation | None,
        typer.Option(help="From logits to probabilities; by default as the model says."),
    ] = None,
    images: Annotated[
        Images, typer.Option(help="What `images` are: floats as the model takes them, or pixels.")
    ] = Images.float32,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="saved_model: classes that `classify` names.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="saved_model: images in a request.")
    ] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(min=1, help="saved_model: pixels of a picture file; more are refused."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="tflite, onnx: replace the file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Export a model, verified: keras-vit export runs/flowers --to saved_model.

    It is compiled for inference and compared with the model before it gets its name.
    """
    from keras_vit import cli

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
    names = None if labels is None else _lines(labels)
    folder, ending = ("savedmodels/", "") if to is Target.saved_model else ("", f".{to.value}")
    place = place or Path(f"{folder}{_name(source)}{ending}")
    if ending:
        check_file(place, ending, overwrite)  # before a model is fetched
    if to is not Target.onnx:
        check_tensorflow()
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # else a SavedModel needs a process
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    library = cli._library()
    logging.getLogger("tensorflow").setLevel(logging.WARNING)  # "Assets written to" another name
    from keras_vit import runtime
    from keras_vit.export.record import as_json as facts_as_json

    with cli._step(f"Reading {source}"):
        opened = runtime.open(source)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(f"source must not be an export itself. Received: source={source!r}")
    given |= {"labels": names, "activation": activation, "images": images}
    given = {name: getattr(v, "value", v) for name, v in given.items()}
    if to is Target.tflite:
        given = _for_tflite(given, opened.config, names)
    with cli._step("Exporting"):
        written = getattr(library, f"export_{to.value}")(opened.model, place, **given)
    if as_json:
        print(json.dumps(facts_as_json(written), indent=2))
        return
    if not out.is_terminal:  # for grep and cut
        for row in facts(written):
            print(*row, sep="\t")
        return
    out.print(_table(facts(written)))


def _for_tflite(
    given: dict[str, Any], config: "ViTConfig", names: Sequence[str] | None
) -> dict[str, Any]:
    """The options as `export_tflite` takes them: folders become pictures."""
    given = dict(given)
    if not config.num_classes:
        given.setdefault("output", "features")
    if given.get("quantize") == "none":
        given["quantize"] = None
    if given.get("batch_size") == 0:
        given["batch_size"] = None
    if "float_layers" in given:
        given["float_layers"] = [name.strip() for name in given["float_layers"].split(",")]
    if "calibration" in given:
        found = _pictures_in("--calibration", given["calibration"])
        places = np.linspace(0, len(found) - 1, min(len(found), CALIBRATION)).astype(int)
        given["calibration"] = np.stack([pictures.pixels(found[i], config) for i in places])
    if "accuracy_data" in given:
        folder, classes = given["accuracy_data"], names or config.labels
        if classes is None:
            classes = [str(i) for i in range(config.num_classes)]
        given["accuracy_data"] = _labelled(folder, config, list(classes))
    return given


def _labelled(
    folder: Path, config: "ViTConfig", classes: list[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of the pictures in a folder of folders, with the numbers of their classes."""
    if not classes:
        raise ValueError(
            "--accuracy-data must be left out for a model without a head. Received: num_classes=0"
        )
    if not folder.is_dir():
        raise ValueError(f"--accuracy-data must be a folder. Received: {folder}")
    unknown = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes)
    if unknown:
        raise ValueError(
            f"--accuracy-data must hold folders named as classes: {', '.join(classes[:10])}. "
            f"Received: {', '.join(unknown[:10])}"
        )
    files = [
        (path, number)
        for number, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in _pictures_in("--accuracy-data", folder / name)
    ]
    if not files:
        raise ValueError(f"--accuracy-data must hold pictures. Received: {folder}")

    def batches():
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            pixels = np.stack([pictures.pixels(path, config) for path, _ in part])
            yield pixels, np.array([number for _, number in part])

    return batches()


def _pictures_in(option: str, folder: Path) -> list[str]:
    found = list(pictures.find([str(folder)]))
    for item in found:
        if item.problem:
            raise ValueError(
                f"{option} must hold pictures. Received: {item.path}, but {item.problem}"
            )
    return [item.path for item in found]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()  # Windows may put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"--labels must be a text in UTF-8. Received: {file}, {error}") from error


def facts(export: Any) -> list[tuple[str, str]]:
    """The rows of the table, of an `Export` of any kind."""
    seen = export.verification
    kind = getattr(export, "dtype", None) or getattr(export, "quantize", None) or "float32"
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
    if seen.same_top_class is not None:
        rows.append(("same top class", f"{seen.same_top_class:.1%} of {seen.images} images"))
    if (drop := getattr(export, "accuracy", None)) is not None:
        rows.append(
            (
                "accuracy",
                f"{drop.export.top_1:.2%}, the model's {drop.reference.top_1:.2%}, on "
                f"{drop.export.images} pictures; same top class {drop.same_top_class:.2%}",
            )
        )
    if seen.files_difference is not None:
        rows.append(("picture files", f"{seen.files_difference:.1g} of the range apart"))
    return [*rows, ("verified on", seen.where)]


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in rows:
        table.add_row(title, Text(value))
    return table


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

"""`keras-vit predict`: the classes of images."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, check_source

if TYPE_CHECKING:
    import numpy as np

    from keras_vit.images import FoundImage
    from keras_vit.runtime import Runtime

CHANNELS = (1, 3)


class Score(NamedTuple):
    """A class and its probability; the label is the number if the model has no names."""

    number: int
    label: str
    score: float


class Prediction(NamedTuple):
    """The best classes of an image, or the error that it caused."""

    image: str
    classes: list[Score]
    error: str | None = None


def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, an export (the folder of a SavedModel, .tflite, "
            f".onnx, .xml) or a checkpoint: {CHECKPOINT}"
        ),
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE",
            help="Image files, folders and their subfolders, globs such as 'photos/**/*.jpg'.",
        ),
    ],
    top_k: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each image.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Classify images.

    Prints the best classes and their probabilities. On a terminal they have bars; in a pipe, each
    line is an image, a class and a score, separated by tabs. An image that cannot be read is
    reported on stderr (with --json also as an object with "error"), the others are classified,
    and the exit code is 1.

    Example: keras-vit predict runs/flowers photos
    """
    if not any(os.path.lexists(name) or glob.has_magic(name) for name in images):
        _show([Prediction(name, [], "there is no such file") for name in images], as_json)
        raise typer.Exit(1)
    check_source("model", model)
    load_library(tensorflow=any(Path(model).glob("**/saved_model.pb")))
    from keras_vit import runtime
    from keras_vit.images import find_images

    found = list(find_images(images))
    if all(item.problem for item in found):  # no need to read the model
        _show([Prediction(item.path, [], item.problem) for item in found], as_json)
        raise typer.Exit(1)
    with output.step(f"Reading {model}"):
        opened = runtime.open(model)
    _check(opened)
    failed = False
    with output.progress("Predicting", len(found)) as advance:
        for predictions in _predictions(opened, found, top_k, batch_size):
            failed |= any(prediction.error for prediction in predictions)
            advance(len(predictions), lambda done=predictions: _show(done, as_json))
    if failed:
        raise typer.Exit(1)


def _check(opened: "Runtime") -> None:
    config, path = opened.config, str(opened.path)
    if not config.num_classes:
        raise ValueError(
            f"model must have a head to name classes; this one returns features. Received: {path}"
        )
    if config.pooling is None:
        raise ValueError(
            f"model must pool its tokens to classify an image. Received: {path}, with pooling=None"
        )
    if config.in_channels not in CHANNELS:
        raise ValueError(
            "model must take gray or RGB images. "
            f"Received: {path}, with in_channels={config.in_channels}"
        )


def _predictions(
    opened: "Runtime", found: "Sequence[FoundImage]", top_k: int, batch_size: int
) -> Iterator[list[Prediction]]:
    """Predictions in the order of the files, a batch at a time; one batch is in memory."""
    from keras_vit.images import ImageFileError, read_pixels

    batch: list[tuple[str, np.ndarray | None, str]] = []
    count = 0
    for path, problem in found:
        array = None
        if problem is None:
            try:
                array = read_pixels(path, opened.config)
            except ImageFileError as error:
                problem = error.reason
        batch.append((path, array, problem or ""))
        count += array is not None
        if count == batch_size:
            yield _predict(opened, batch, top_k)
            batch, count = [], 0
    if batch:
        yield _predict(opened, batch, top_k)


def _predict(
    opened: "Runtime", batch: "Sequence[tuple[str, np.ndarray | None, str]]", top_k: int
) -> list[Prediction]:
    import numpy as np

    arrays = [array for _, array, _ in batch if array is not None]
    rows = iter(opened.probabilities(np.stack(arrays)) if arrays else ())
    predictions = []
    for path, array, problem in batch:
        if array is None:
            predictions.append(Prediction(path, [], problem))
            continue
        row = next(rows)
        if not np.isfinite(row).all():
            error = "a probability is not a finite number"
            predictions.append(Prediction(path, [], error))
            continue
        best = np.argsort(-row, kind="stable")[:top_k].tolist()
        predictions.append(Prediction(path, [_score(opened, i, row) for i in best]))
    return predictions


def _score(opened: "Runtime", number: int, row: "np.ndarray") -> Score:
    label = str(number) if opened.labels is None else opened.labels[number]
    return Score(number, label, float(row[number]))


# -- what is printed


def _show(predictions: Sequence[Prediction], as_json: bool) -> None:
    """Prints results to stdout, and a line to stderr for each error."""
    for prediction in predictions:
        image, classes, error = prediction
        if error is not None:
            output.print_error(f"{output.printable(image)}: {error}")
        if as_json:
            output.print_json(_record(prediction), indent=None)
        elif output.out.is_terminal and not error:
            output.out.print(Text(output.printable(image), "bold"), soft_wrap=True)
            output.out.print(_table(classes))
        else:
            output.print_rows((image, label, f"{score:.6f}") for _, label, score in classes)


def _record(prediction: Prediction) -> dict[str, Any]:
    if prediction.error is not None:
        return {"image": prediction.image, "error": prediction.error}
    classes = [
        {"class": number, "label": label, "score": score}
        for number, label, score in prediction.classes
    ]
    return {"image": prediction.image, "classes": classes}


def _table(classes: Sequence[Score]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    table.add_column(overflow="fold", min_width=16)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=output.BAR)
    for _, label, score in classes:
        output.add_score(table, label, score=score)
    return table

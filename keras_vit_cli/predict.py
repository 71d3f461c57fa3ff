"""`keras-vit predict`: the classes of images."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from keras_vit_cli import image_files, output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, check_source

if TYPE_CHECKING:
    from keras_vit.bulk.rows import Score
    from keras_vit.images import FoundImage
    from keras_vit.runtime import Runtime

OUT = (".jsonl", ".parquet")


class Prediction(NamedTuple):
    """The best classes of an image, or the error that it caused."""

    image: str
    classes: "list[Score]"
    error: str | None = None


def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, an export (the folder of a SavedModel, .tflite, "
            f".onnx, .xml) or a checkpoint: {CHECKPOINT}"
        ),
    ],
    images: image_files.Images = None,
    files_from: image_files.FilesFrom = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The .jsonl or .parquet file to write, instead of printing."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    batch_size: image_files.BatchSize = 32,
    workers: image_files.Workers = None,
    overwrite: image_files.Overwrite = False,
    ray: image_files.Ray = None,
    ray_cpus: image_files.RayCPUs = None,
    ray_gpus: image_files.RayGPUs = None,
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

    With --out, many images are written to a file. A killed run resumes when the same command is
    started again. Parquet needs `pip install 'keras3-vit[bulk]'`, --ray `'keras3-vit[ray]'`.

    Example: keras-vit predict runs/flowers photos --out classes.jsonl
    """
    names = image_files.named(images, files_from)
    image_files.check_ray(ray, ray_cpus, ray_gpus)
    if out is None and (ray is not None or overwrite):
        raise ValueError("out must be given for --ray and --overwrite. Received: no --out")
    if out is not None and as_json:
        raise ValueError("out must be left out for --json; a .jsonl file has the same lines")
    if out is not None:
        image_files.check_out(out, overwrite, OUT)
    if not image_files.any_exists(names):
        _show([Prediction(name, [], "there is no such file") for name in names], as_json)
        raise typer.Exit(1)
    check_source("model", model)
    load_library(tensorflow=any(Path(model).glob("**/saved_model.pb")))
    from keras_vit import runtime
    from keras_vit.bulk import predict as predict_files
    from keras_vit.bulk.stream import check_wanted
    from keras_vit.images import find_images
    from keras_vit.paths import as_output

    if out is not None:
        as_output("out", out)
    found = list(find_images(names))
    if all(item.problem for item in found):  # no need to read the model
        _show([Prediction(item.path, [], item.problem) for item in found], as_json)
        raise typer.Exit(1)
    with output.step(f"Reading {model}"):
        opened = runtime.open(model)
    check_wanted(opened, "probabilities")
    if out is not None:
        image_files.write(
            predict_files,
            "Predicting",
            found,
            model=opened if ray is None else model,  # which each worker opens
            out=out,
            top_k=top_k,
            batch_size=batch_size,
            workers=workers,
            overwrite=overwrite,
            ray=image_files.ray_workers(ray, ray_cpus, ray_gpus),
        )
        return
    failed = False
    with output.progress("Predicting", len(found)) as advance:
        for predictions in _predictions(opened, found, top_k, batch_size, workers):
            failed |= any(prediction.error for prediction in predictions)
            advance(len(predictions), lambda done=predictions: _show(done, as_json))
    if failed:
        raise typer.Exit(1)


def _predictions(
    opened: "Runtime",
    found: "Sequence[FoundImage]",
    top_k: int,
    batch_size: int,
    workers: int | None,
) -> Iterator[list[Prediction]]:
    """Predictions in the order of the files, a batch at a time."""
    from keras_vit.bulk import stream
    from keras_vit.bulk.rows import best_classes

    for rows in stream(opened, found, batch_size=batch_size, workers=workers):
        yield [
            Prediction(image, [], error)
            if values is None
            else Prediction(image, best_classes(values, opened.labels, top_k))
            for image, values, error in rows
        ]


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
    from keras_vit.bulk.formats import class_record

    return class_record(prediction.image, prediction.classes)


def _table(classes: "Sequence[Score]") -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    table.add_column(overflow="fold", min_width=16)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=output.BAR)
    for _, label, score in classes:
        output.add_score(table, label, score=score)
    return table

"""`keras-vit benchmark`: which export of a model is the fastest on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, AsJson, Debug, check_folder, check_source

if TYPE_CHECKING:
    from keras_vit.benchmark import Comparison, Measured

MEGA = 1e6


def benchmark(
    model: Annotated[
        str,
        typer.Argument(help=f"A run folder, a .keras file or a checkpoint: {CHECKPOINT}"),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Targets (onnx) or kinds of them (onnx:dynamic); defaults to all."),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Images of a call; defaults to 1 8 32."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long each file is timed with each batch size.")
    ] = 3.0,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A folder of typical images; int8 needs it."),
    ] = None,
    accuracy_data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with a subfolder of images for each class, by name, on which the "
            "accuracy is measured."
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The most points of accuracy that the fastest file may lose; defaults to 1.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a model in every way, and find the fastest file for this machine.

    Each file is verified, and timed twice in a process of its own. The table shows images a second
    for each batch size, the median and the 99th percentile of the time for a batch of the first
    one, the file's size, the memory it takes to run, and how far its logits are from the model's
    (or the points of accuracy that it loses).

    Run nothing else meanwhile. For one core: taskset -c 0 keras-vit benchmark ...

    Example: keras-vit benchmark runs/flowers --accuracy-data flowers/test
    """
    if max_drop is not None and accuracy_data is None:
        raise ValueError(
            "--max-drop must come with --accuracy-data, on which it is measured. "
            f"Received: --max-drop {max_drop:g}"
        )
    for option, folder in (("--calibration", calibration), ("--accuracy-data", accuracy_data)):
        if folder is not None:
            check_folder(option, folder)
    check_source("model", model)
    load_library(tensorflow=True)
    from keras_vit import runtime
    from keras_vit.benchmark import compare
    from keras_vit.benchmark.comparison import BATCH_SIZES
    from keras_vit.benchmark.kinds import chosen
    from keras_vit.images import labeled_images, sample_images

    chosen(only or None)  # before a model is read
    with output.step(f"Reading {model}"):
        opened = runtime.open(model)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(f"model must not be an export itself. Received: model={model!r}")
    config = opened.config
    with output.steps() as show:
        found = compare(
            opened.model,
            only=only or None,
            batch_sizes=tuple(batch_size or BATCH_SIZES),
            seconds=seconds,
            calibration=None if calibration is None else sample_images(calibration, config),
            accuracy_data=None if accuracy_data is None else labeled_images(accuracy_data, config),
            max_drop=1.0 if max_drop is None else max_drop,
            progress=show,
        )
    if as_json:
        output.print_json(found.as_json())
        return
    if output.out.is_terminal:
        output.out.print(_table(found))
    else:
        output.print_rows([_titles(found), *(_cells(found, row) for row in found.rows)])
    for row in found.rows:
        if row.problem is not None:
            output.note(f"{row.kind.name}: {output.one_line(row.problem)}")
    output.note(found.machine)
    for size in found.batch_sizes:
        output.note(_verdict(found, size, model))


def _titles(found: "Comparison") -> list[str]:
    first = found.batch_sizes[0]
    speeds = [f"images/s, {size} at once" for size in found.batch_sizes]
    lost = "points lost" if found.images else "difference"
    return ["", *speeds, f"p50 ms, {first}", f"p99 ms, {first}", "file MB", "memory MB", lost]


def _cells(found: "Comparison", row: "Measured") -> list[str]:
    if not row.times:
        return [row.kind.name, *[""] * (len(found.batch_sizes) + 5)]
    first = found.batch_sizes[0]
    lost = row.points if found.images else row.difference
    return [
        row.kind.name,
        *(f"{row.speed(size):.4g}" for size in found.batch_sizes),
        f"{row.latency(first, 50):.3g}",
        f"{row.latency(first, 99):.3g}",
        f"{(row.size or 0) / MEGA:,.1f}",
        f"{(row.memory or 0) / MEGA:,.0f}",
        "" if lost is None else f"{lost:.2f}" if found.images else f"{lost:.1g}",
    ]


def _table(found: "Comparison") -> Table:
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(_titles(found)):
        table.add_column(title, justify="right" if number else "left", no_wrap=not number)
    best = {found.winner(size).kind.name for size in found.batch_sizes}
    for row in found.rows:
        if row.times:
            style = "bold" if row.kind.name in best else None
            table.add_row(*_cells(found, row), style=style)
    return table


def _verdict(found: "Comparison", size: int, model: str) -> str:
    """Names the fastest file for a batch size, and the command that writes it."""
    row = found.winner(size)
    images = "one image" if size == 1 else f"{size} images at once"
    if row is found.rows[0]:
        return f"Fastest for {images}: the model itself."
    times = row.speed(size) / found.rows[0].speed(size)
    unknown = "" if found.images else " (accuracy not measured: give --accuracy-data)"
    return (
        f"Fastest for {images}: {row.kind.name}, {times:.1f} times as fast as the model itself"
        f"{unknown}: keras-vit export {model} {row.command()}"
    )

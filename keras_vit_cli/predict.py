"""`keras-vit predict`: what a model says of pictures."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from keras_vit import pictures

if TYPE_CHECKING:
    from keras_vit.runtime import Runtime

app = typer.Typer()
out = Console()
err = Console(stderr=True)

BAR = 24
TAKES_PICTURES = (1, 3)


class Score(NamedTuple):
    """A class and its probability; the label is the number where the model has no names."""

    number: int
    label: str
    score: float


class Answer(NamedTuple):
    """What came of a picture: its best classes, or why there are none."""

    image: str
    classes: list[Score]
    error: str | None = None


@app.command()
def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, an export (a SavedModel's folder, .tflite, .onnx) "
            "or any checkpoint: a path, a name that `keras-vit models` lists, "
            "hf://organisation/name\\[@revision]\\[/file], https://..."
        ),
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Picture files; folders, with those inside; globs such as 'photos/**/*.jpg'.",
        ),
    ],
    top_k: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures run at a time.")] = 32,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each picture.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Name the classes of pictures: keras-vit predict runs/flowers photos.

    Prints the best classes and their probabilities: with bars on a terminal, else a line for each
    class, of picture, class and score between tabs. A picture that cannot be read gets a line on
    stderr, and with --json an object with "error"; the others go on, and the exit code is 1.
    """
    found = list(pictures.find(images))
    if all(item.problem for item in found):  # nothing to import a backend for
        _show([_failed(item.path, item.problem) for item in found], as_json)
        raise typer.Exit(1)
    from keras_vit import cli

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cli._library()
    from keras_vit import runtime

    with cli._step(f"Reading {model}"):
        opened = runtime.open(model)
    _check(opened)
    failed = False
    with _progress(len(found)) as advance:
        for answers in _answers(opened, found, top_k, batch_size):
            failed |= any(answer.error for answer in answers)
            advance(len(answers), lambda answers=answers: _show(answers, as_json))
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
            "model must pool its tokens to say one thing of a picture. "
            f"Received: {path}, with pooling=None"
        )
    if config.in_channels not in TAKES_PICTURES:
        raise ValueError(
            "model must take grey or RGB pictures. "
            f"Received: {path}, with in_channels={config.in_channels}"
        )


def _answers(
    opened: "Runtime", found: Sequence[pictures.Found], top_k: int, batch_size: int
) -> Iterator[list[Answer]]:
    """The answers in the order of the files, batch after batch; only one batch is in memory."""
    batch: list[tuple[str, np.ndarray | None, str]] = []
    count = 0
    for path, problem in found:
        array = None
        if problem is None:
            try:
                array = pictures.pixels(path, opened.config)
            except pictures.PictureError as error:
                problem = error.reason
        batch.append((path, array, problem or ""))
        count += array is not None
        if count == batch_size:
            yield _answer(opened, batch, top_k)
            batch, count = [], 0
    if batch:
        yield _answer(opened, batch, top_k)


def _answer(
    opened: "Runtime", batch: Sequence[tuple[str, np.ndarray | None, str]], top_k: int
) -> list[Answer]:
    arrays = [array for _, array, _ in batch if array is not None]
    rows = iter(opened.probabilities(np.stack(arrays)) if arrays else ())
    answers = []
    for path, array, problem in batch:
        if array is None:
            answers.append(_failed(path, problem))
            continue
        row = next(rows)
        if not np.isfinite(row).all():
            answers.append(_failed(path, "the model's answer is not a finite number"))
            continue
        best = np.argsort(-row, kind="stable")[:top_k].tolist()
        answers.append(Answer(path, [_score(opened, i, row) for i in best]))
    return answers


def _score(opened: "Runtime", number: int, row: np.ndarray) -> Score:
    label = str(number) if opened.labels is None else opened.labels[number]
    return Score(number, label, float(row[number]))


def _failed(path: str, problem: str | None) -> Answer:
    return Answer(path, [], problem)


# -- what is printed


def _show(answers: Sequence[Answer], as_json: bool) -> None:
    """Results to stdout, and a line on stderr for each failure."""
    for answer in answers:
        if answer.error is not None:
            line = f"keras-vit: error: {_printable(answer.image)}: {_printable(answer.error)}"
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps(_as_json(answer)), flush=True)
        elif out.is_terminal and not answer.error:
            out.print(Text(_printable(answer.image), "bold"), soft_wrap=True)
            out.print(_table(answer.classes))
        else:  # for grep and cut
            for _, label, score in answer.classes:
                fields = (_printable(answer.image), _printable(label), f"{score:.6f}")
                print(*fields, sep="\t", flush=True)


def _as_json(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        return {"image": answer.image, "error": answer.error}
    classes = [
        {"class": number, "label": label, "score": score} for number, label, score in answer.classes
    ]
    return {"image": answer.image, "classes": classes}


def _table(classes: Sequence[Score]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    table.add_column(overflow="fold", min_width=16)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=BAR)
    for _, label, score in classes:
        bar = "━" * round(BAR * min(max(score, 0.0), 1.0))
        table.add_row(Text(_printable(label)), f"{score:.4f}", bar)
    return table


def _printable(text: str) -> str:
    """Tabs, line ends and what steers a terminal as escapes: a file's name may hold them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """A bar on stderr, and what moves it on and prints while it is out of the way."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=err,
        transient=True,
        redirect_stdout=False,  # it would go where the bar is
        disable=not err.is_terminal or total < 2,
    ) as progress:
        task = progress.add_task("Predicting", total=total)

        def advance(count: int, show: Callable[[], None]) -> None:
            progress.stop()
            show()
            progress.advance(task, count)
            progress.start()

        yield advance

"""What the command prints: results on stdout; progress, the log and errors on stderr."""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

BAR = 24  # characters of a score's bar

out = Console()
err = Console(stderr=True)


def set_log(verbose: bool) -> None:
    """Sends the library's log to stderr: its warnings, or all of it."""
    log = logging.getLogger("keras_vit")
    log.handlers[:] = [RichHandler(console=err, show_path=False, show_time=False)]
    log.propagate = False  # TensorFlow Datasets gives the root logger a handler of its own
    log.setLevel(logging.INFO if verbose else logging.WARNING)


# -- results


def print_json(value: Any, indent: int | None = 2) -> None:
    """Prints a value as JSON; with `indent=None` on one line."""
    print(json.dumps(value, indent=indent), flush=True)


def print_rows(rows: Iterable[Iterable[object]]) -> None:
    """Prints rows for grep and cut: fields between tabs."""
    for row in rows:
        print(*(printable(str(field)) for field in row), sep="\t", flush=True)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Prints titles and values as a table of two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in facts:
        table.add_row(title, Text(str(value)))
    out.print(table)


def add_score(table: Table, *cells: str, score: float) -> None:
    """Adds a row that ends in a score and its bar."""
    bar = "━" * round(BAR * min(max(score, 0.0), 1.0))
    table.add_row(*(Text(printable(cell)) for cell in cells), f"{score:.4f}", bar)


def printable(text: str) -> str:
    """Escapes tabs, line ends and terminal codes, which a file's name may contain."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# -- errors and progress


def print_error(text: str) -> None:
    """Prints an error on one line of stderr."""
    line = f"keras-vit: error: {printable(one_line(text))}"
    err.print(line, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Prints a line about the command's work on stderr."""
    err.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def one_line(text: str) -> str:
    """A text of several lines on one, its lines separated by semicolons."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"(?<=[:.,]); ", " ", "; ".join(line for line in lines if line))


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Shows on a terminal that something is running, and for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield


@contextlib.contextmanager
def steps() -> Iterator[Callable[[int, int, str], None]]:
    """Shows a bar on a terminal while different things are done one after another.

    Yields:
        A function that takes how many are done, how many there are, and what comes next.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not err.is_terminal
    with Progress(*columns, *times, console=err, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show


class _Speed(ProgressColumn):
    """Images a second, over the last seconds."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f} images/s")


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Shows a bar on a terminal while results are printed.

    Yields:
        A function that moves the bar by a count, and calls a function that prints while the bar is
        hidden.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        _Speed(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        redirect_stdout=False,  # results would be written where the bar is
        disable=not err.is_terminal or total < 2,
    ) as bar:
        task = bar.add_task(text, total=total)

        def advance(count: int, show: Callable[[], None]) -> None:
            bar.stop()
            show()
            bar.advance(task, count)
            bar.start()

        yield advance

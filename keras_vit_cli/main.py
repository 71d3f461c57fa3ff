"""The `keras-vit` command: each line of it calls the library.

Results go to stdout; progress, the log and errors to stderr. An error is one line and exit code 1,
or 2 where the command was called in a wrong way.
"""

import contextlib
import enum
import importlib
import importlib.metadata
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from keras_vit import backend, cli_explain, cli_export, cli_info, cli_predict, cli_serve, runs
from keras_vit.weights import hub, known

# Keras, and what needs it, is imported by `_library`, when a command has come that far.
if TYPE_CHECKING:
    from keras_vit.model import ViT
    from keras_vit.weights.load import Checkpoint

DISTRIBUTION = "keras3-vit"

app = typer.Typer(
    name="keras-vit",
    help="Vision Transformers for Keras 3: find, convert, ask, explain, export and serve them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_export.app)
app.add_typer(cli_serve.app)
app.add_typer(cli_predict.app)
app.add_typer(cli_explain.app)
out = Console()
err = Console(stderr=True)


class Target(enum.StrEnum):
    """What `convert` writes: the formats of `keras_vit.save_pretrained`, and Keras' own."""

    timm = "timm"
    huggingface = "huggingface"
    google = "google"
    big_vision = "big_vision"
    torchvision = "torchvision"
    vit_pytorch = "vit_pytorch"
    keras = "keras"


def main() -> None:
    """Runs the command."""
    try:
        app(prog_name="keras-vit")
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        known_kind = isinstance(error, ValueError | OSError | ImportError)
        text = str(error) if known_kind else f"{type(error).__name__}: {error} (see --debug)"
        print("keras-vit: error: " + " ".join(text.split()), file=sys.stderr)
        sys.exit(1)


def _set_log(verbose: bool) -> bool:
    log = logging.getLogger("keras_vit")
    log.handlers[:] = [RichHandler(console=err, show_path=False, show_time=False)]
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    return verbose


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        version = _library().__version__
    print(f"keras-vit {version}")
    raise typer.Exit()


Source = Annotated[
    str,
    typer.Argument(
        help="A path, a name that `keras-vit models` lists, "
        "hf://organisation/name\\[@revision]\\[/file], or https://..."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_set_log, help="Show the log as well.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


@app.command()
def models(
    text: Annotated[list[str] | None, typer.Argument(help="Words that a row must have.")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """List the known checkpoints, or those with every word of TEXT: keras-vit models b16 in21k."""
    words = " ".join(text or [])
    rows = known.search(words)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    if not rows:
        near = ", ".join(known.nearest(words)) or "see keras-vit models"
        raise ValueError(f"text must be in some row of the table: {near}. Received: text={words!r}")
    if not out.is_terminal:  # for grep and cut
        for row in rows:
            print(*row, sep="\t")
        return
    out.print(_table(rows))


@app.command()
def info(
    source: Source, as_json: AsJson = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Say what SOURCE is: its format, its model, its pixels, and whether every array has a place.

    It is fetched if it is not here; of a file only the headers are read. Of a run folder: how far
    the run is, and whether all it left is whole. If something is broken, the exit code is 1.
    """
    if runs.is_run(source):
        _show_run(Path(source), as_json)
        return
    path = hub.fetch(source)
    _library()
    from keras_vit.weights import load

    checkpoint = _inspect_keras(path) if path.suffix == ".keras" else load.inspect(path)
    row = known.find(source)
    if as_json:
        print(json.dumps(cli_info.as_json(source, path, row, checkpoint), indent=2))
        return
    _print_lines(cli_info.facts(source, path, row, checkpoint))


@app.command()
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="The folder or file to write.")],
    to: Annotated[Target, typer.Option("--format", help="Whose format to write.")],
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="Classes of a new head of zeros; 0 for none.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="384 or 192x320: the position table is resampled.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write SOURCE in another format: keras-vit convert ViT-B_16.npz b16 --format timm."""
    size = _size(image_size)
    _check_target(target, to, overwrite)
    path = hub.fetch(source)
    library = _library()
    with _step(f"Reading {source}"):
        if path.suffix == ".keras":
            if num_classes is not None or size is not None:
                raise ValueError(
                    "num_classes and image_size must be left out where source is a .keras file. "
                    f"Received: num_classes={num_classes}, image_size={image_size}"
                )
            model = _load_keras(path)
        else:
            model = library.from_pretrained(path, num_classes=num_classes, image_size=size)
    with _step(f"Writing {target}"):
        if to is Target.keras:
            written = _save_keras(model, target)
        else:
            written = library.save_pretrained(model, target, format=to.value)
    print(written)


# -- the parts of the commands


def _table(rows: list[known.Known]) -> Table:
    """The rows for a terminal. A name is to be copied, so it is never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True, min_width=max(len(row.name) for row in rows))
    for title in ("size", "classes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("trained on")
    if wide := out.width >= 110:
        table.add_column("format", no_wrap=True)
        table.add_column("license", no_wrap=True, overflow="ellipsis", max_width=16)
    for row in rows:
        cells = [row.name, str(row.image_size), str(row.num_classes or "-"), row.pretraining]
        table.add_row(*cells, *((row.format, row.license) if wide else ()))
    return table


def _library() -> Any:
    """`keras_vit` itself, with Keras, in place of the bare package of keras_vit_cli.py."""
    if hasattr(sys.modules["keras_vit"], "__version__"):
        return sys.modules["keras_vit"]
    backend.choose()
    del sys.modules["keras_vit"]
    library = importlib.import_module("keras_vit")
    for name, module in list(sys.modules.items()):  # what was imported without it is part of it
        if re.fullmatch(r"keras_vit\.\w+", name):
            setattr(library, name.partition(".")[2], module)
    return library


def _size(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    if not (found := re.fullmatch(r"(\d+)(?:x(\d+))?", text)):
        raise typer.BadParameter("it must be 384 or 192x320", param_hint="--image-size")
    height, width = found.groups()
    return (int(height), int(width)) if width else int(height)


def _check_target(target: Path, to: Target, overwrite: bool) -> None:
    """Raises before anything is fetched or read."""
    if to is Target.keras and target.suffix != ".keras":
        raise ValueError(
            f"target must end in .keras for format 'keras'. Received: target={str(target)!r}"
        )
    # A format of one file gets its suffix where the name has none.
    named = [target, *(target.with_name(target.name + s) for s in (".npz", ".safetensors"))]
    there = [p for p in named if p.is_file() or (p.is_dir() and any(p.iterdir()))]
    if there and not overwrite:
        raise FileExistsError(
            f"target must not exist, or --overwrite be given. Received: {there[0]}"
        )


def _load_keras(path: Path) -> "ViT":
    from keras_vit.runtime.keras_model import load_keras

    return load_keras(path)


def _save_keras(model: "ViT", target: Path) -> Path:
    from keras_vit.weights import arrays

    with arrays.atomic_path(target) as temporary:
        model.save(temporary)
    return target


@contextlib.contextmanager
def _step(text: str) -> Iterator[None]:
    """A bar that moves while the block runs; nothing where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield


def _print_lines(lines: Iterable[tuple[str, object]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in lines:
        table.add_row(title, Text(str(value)))
    out.print(table)


def _show_run(folder: Path, as_json: bool) -> None:
    """`info` of a run folder. Keras is imported only where there is a model to open."""
    run, lines = runs.read(folder), []
    path = folder / runs.MODEL
    run["model"] = None
    if path.is_file():
        _library()
        try:
            checkpoint = _inspect_keras(path)
        except Exception as error:  # whatever Keras makes of a damaged file
            run["problems"].append(f"{path} cannot be opened: {type(error).__name__}: {error}")
        else:
            run["model"] = cli_info.as_json(str(path), path, None, checkpoint)
            lines = list(cli_info.facts(str(path), path, None, checkpoint))
    if as_json:
        print(json.dumps(run, indent=2))
    else:
        _print_lines([*cli_info.run_lines(run), *lines])
    if run["problems"]:
        raise typer.Exit(1)


def _inspect_keras(path: Path) -> "Checkpoint":
    """The same of a .keras file, which `load.inspect` leaves to Keras."""
    from keras_vit.weights.load import Checkpoint

    model = _load_keras(path)
    return Checkpoint(
        format="keras",
        config=model.config,
        num_arrays=len(model.weights),
        nbytes=path.stat().st_size,
        parameters=model.count_params(),
        loaded=tuple(weight.path for weight in model.weights),
        dropped={},
    )


if __name__ == "__main__":
    main()

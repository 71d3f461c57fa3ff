"""What `predict` and `embed` share: which images they read, and a file of results."""

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_vit_cli import output

if TYPE_CHECKING:
    from keras_vit.bulk import Progress, RayWorkers, Row, Summary
    from keras_vit.images import FoundImage

SHOWN = 20
"""Errors of a run that are printed; the file has them all."""

Images = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IMAGE",
        help="Image files, folders and their subfolders, globs such as 'photos/**/*.jpg'.",
    ),
]
FilesFrom = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A text file with an image, folder or glob a line."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Threads that decode images; defaults to the cores.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file, and the parts of another killed run.")
]
Ray = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Run N workers on a Ray cluster, or on this machine."),
]
RayCPUs = Annotated[int | None, typer.Option(min=1, help="Cores of a Ray worker; defaults to one.")]
RayGPUs = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs of a Ray worker, or a part of one; defaults to none."),
]


def named(images: list[str] | None, files_from: Path | None) -> list[str]:
    """The names on the command line, then those in the file."""
    names = list(images or ())
    if files_from is not None:
        if not files_from.is_file():
            raise FileNotFoundError(
                f"files_from must be a text file. Received: files_from={str(files_from)!r}"
            )
        try:
            text = files_from.read_bytes().decode("utf-8-sig")  # Windows writes a mark first
        except UnicodeDecodeError as error:
            raise ValueError(f"files_from must be a text file in UTF-8. {error}") from None
        # A name may hold what `splitlines` takes for the end of a line.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        names += [line for line in lines if line.strip()]
    if not names:
        raise typer.BadParameter("images must be named, or --files-from be given")
    return names


def any_exists(names: Iterable[str]) -> bool:
    """Whether a name may be that of a file, which is known before Keras is imported."""
    return any(os.path.lexists(name) or glob.has_magic(name) for name in names)


def check_out(out: Path, overwrite: bool, suffixes: tuple[str, ...]) -> None:
    """Raises before anything is read if a file cannot be written."""
    if out.suffix not in suffixes:
        raise ValueError(f"out must end in {' or '.join(suffixes)}. Received: out={str(out)!r}")
    # Beside the parts of a run the library decides: it may have been killed at the very end.
    if out.exists() and not overwrite and not out.with_name(f"{out.name}.parts").exists():
        raise FileExistsError(
            f"out must not exist, or overwrite be True. Received: out={str(out)!r}"
        )


def check_ray(count: int | None, cpus: int | None, gpus: float | None) -> None:
    """Raises for options of Ray's workers without any."""
    for option, value in (("--ray-cpus", cpus), ("--ray-gpus", gpus)):
        if count is None and value is not None:
            raise ValueError(
                f"{option} must come with --ray, whose workers it is for. "
                f"Received: {option} {value:g}"
            )


def ray_workers(count: int | None, cpus: int | None, gpus: float | None) -> "RayWorkers | None":
    """The workers that the options describe; None for this process."""
    if count is None:
        return None
    from keras_vit.bulk import RayWorkers

    return RayWorkers(count, 1 if cpus is None else cpus, gpus or 0)


def write(
    run: Callable[..., "Summary"], title: str, found: "list[FoundImage]", **options: Any
) -> None:
    """Runs `keras_vit.bulk.predict` or `embed`; shows its progress, its errors and its result.

    Args:
        run: The function with a model in it.
        title: What the bar says.
        found: The images.
        **options: Further arguments of the function.
    """
    shown = 0

    def print_errors(rows: "Iterable[Row]") -> None:
        nonlocal shown
        for row in rows:
            shown += 1
            if shown <= SHOWN:
                output.print_error(f"{output.printable(row.image)}: {row.error}")

    with output.progress(title, len(found)) as advance:
        done: int | None = None

        def report(state: "Progress") -> None:
            nonlocal done
            if done is None:  # before the first batch
                done = 0
                if state.done:
                    output.note(f"Resumes after {state.done:,} of {state.total:,} images.")
            advance(state.done - done, lambda: print_errors(state.failed))
            done = state.done

        summary = run(images=found, progress=report, **options)
    if shown > SHOWN:
        output.note(f"{shown - SHOWN:,} more errors are in {summary.path}.")
    output.note(
        f"{summary.images:,} images, {summary.failed:,} with an error; "
        f"{summary.images_per_second:.1f} images a second."
    )
    print(summary.path)
    if summary.failed:
        raise typer.Exit(1)

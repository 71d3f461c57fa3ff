"""`keras-vit train`: trains by a recipe."""

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import Debug, Verbose


def train(
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A name that --list shows, or the path of a .py file; defaults to folder with "
            "--data.",
            show_default=False,
        ),
    ] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run folder: a new one, or that of a run to resume, which knows its recipe.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Resume an existing run.")] = True,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume even if the recipe has changed.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field of the recipe, such as optimizer.learning_rate=3e-4; may be "
            "repeated.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where the data is (the same as data.path)."),
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="auto (a cluster that the environment names, all GPUs, or the CPU), one, all, or "
            "model:N (JAX: weights split over N devices).",
        ),
    ] = "auto",
    preview: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw augmented training images with their labels into FILE, a .png, and exit.",
            show_default=False,
        ),
    ] = None,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the recipes and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a model by a recipe.

    The run folder gets model.keras, report.md with its figures, recipe.json, log.jsonl and files
    for TensorBoard. KERAS_BACKEND chooses the backend.

    Example: keras-vit train --data flowers --workdir runs/flowers
    """
    if list_recipes:
        _list()
        return
    is_run = workdir is not None and (workdir / "recipe.json").is_file()
    if recipe is None and data is not None and not is_run:
        recipe = "folder"
    if preview is not None:
        if recipe is None:
            raise typer.BadParameter("--recipe or --data is required with --preview")
        written = load_library(datasets=True).train.preview(
            recipe, preview, overrides=settings or (), data=data
        )
        print(f"wrote {written}")
        return
    if workdir is None:
        raise typer.BadParameter("--workdir is required, with --data or --recipe; or --list")
    if recipe is None and not is_run:
        raise typer.BadParameter(f"--data or --recipe is required: there is no run in {workdir}")
    if recipe is not None and recipe.endswith(".py") and not Path(recipe).is_file():
        raise FileNotFoundError(f"recipe must be a file that exists. Received: {recipe!r}")
    library = load_library(datasets=True)
    try:
        library.train.train(
            recipe,
            workdir,
            overrides=settings or (),
            data=data,
            devices=devices,
            resume=resume,
            accept_changes=accept_changes,
            verbose=0 if quiet else "auto",
            say=None if quiet else functools.partial(print, flush=True),
        )
    except KeyboardInterrupt:
        output.err.print("\nkeras-vit: stopped", highlight=False)
        raise typer.Exit(130) from None


def _list() -> None:
    recipes = {path.stem: _title(path) for path in sorted(_folder().glob("*.py"))}
    width = max(map(len, recipes))
    for name, description in recipes.items():
        if name != "__init__":
            print(f"{name:{width}}  {description}")


def _folder() -> Path:
    """The folder of our recipes, without an import: Keras takes seconds."""
    spec = importlib.util.find_spec("keras_vit")
    if spec is None or spec.origin is None:
        raise ImportError("keras_vit must be installed: pip install keras3-vit")
    package = Path(spec.origin).parent
    # The wheel has the recipes in the first folder, a checkout in the second.
    folders = (package / "train" / "recipes", package.parent / "training" / "recipes")
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _title(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]

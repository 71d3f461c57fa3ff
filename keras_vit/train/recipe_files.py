"""Recipes as files: which there are, and loading one by its name or its path.

A recipe file defines a function of its own name that returns a `Recipe`. Ours open with the paper,
the command and the number to reach.
"""

import dataclasses
import difflib
import inspect
import os
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from keras_vit.train.recipe import Recipe, override

# The wheel has the recipes in the first folder, a checkout in the second.
FOLDERS = (
    Path(__file__).parent / "recipes",
    Path(__file__).parents[2] / "training" / "recipes",
)


def list_recipes() -> dict[str, str]:
    """The recipes that come with the package.

    Returns:
        Name of a recipe -> the first line of its description.
    """
    return {path.stem: (_module(path).__doc__ or "").strip().split("\n")[0] for path in _files()}


def load_recipe(recipe: str | os.PathLike, data: str | os.PathLike | None = None) -> Recipe:
    """Loads a recipe.

    Args:
        recipe: A name of `list_recipes`, or the path of a Python file, ending in ".py", which is
            run. `my_flowers.py` must define `my_flowers()`, which returns a `Recipe`. If it is
            `my_flowers(data=None)`, it gets the path of the data, and may choose by it.
        data: Path of the data; the same as an override of data.path.

    Example:

    >>> recipe = keras_vit.train.load_recipe("digits")
    """
    path = Path(recipe)
    if path.suffix != ".py":
        files = {file.stem: file for file in _files()}
        if str(recipe) not in files:
            near = difflib.get_close_matches(str(recipe), files, n=3)
            hint = f"near: {', '.join(near)}" if near else f"there are: {', '.join(files)}"
            raise ValueError(
                "recipe must be one of ours, or the path of a file that ends in .py; "
                f"{hint}. Received: {str(recipe)!r}"
            )
        path = files[str(recipe)]
    elif not path.is_file():
        raise FileNotFoundError(f"recipe must be a file that exists. Received: {str(recipe)!r}")
    name = path.stem.replace("-", "_")
    function = getattr(_module(path), name, None)
    found = None
    if callable(function):
        takes = "data" in inspect.signature(function).parameters
        found = function(data=data and os.fspath(data)) if takes else function()
    if not isinstance(found, Recipe):
        raise ValueError(
            f"recipe must be a file that defines {name}(), which returns a Recipe. "
            f"Received: {str(recipe)!r}"
        )
    if data is not None:
        found = dataclasses.replace(
            found, data=dataclasses.replace(found.data, path=os.fspath(data))
        )
    return found.checked()


def resolve_recipe(
    recipe: Recipe | str | os.PathLike,
    overrides: Iterable[str] = (),
    data: str | os.PathLike | None = None,
) -> Recipe:
    """A recipe, or the one of a name or a path, with changes.

    Args:
        recipe: A `Recipe`, or what `load_recipe` takes.
        overrides: Changes to its fields, such as "optimizer.learning_rate=3e-4".
        data: Path of the data; the same as an override of data.path.
    """
    overrides = list(overrides)
    if not isinstance(recipe, Recipe):
        paths = [s.partition("=")[2] for s in overrides if s.startswith("data.path=")]
        data = data if data is not None or not paths else paths[-1]
        recipe = load_recipe(recipe, data)
    recipe = override(recipe, overrides)
    if data is None:
        return recipe
    changed = dataclasses.replace(recipe.data, path=os.fspath(data))
    return dataclasses.replace(recipe, data=changed)


def _files() -> list[Path]:
    """The files of our recipes, in the order of their names."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    return sorted(path for path in folder.glob("*.py") if path.stem != "__init__")


def _module(path: Path) -> ModuleType:
    """Runs a recipe file."""
    loader = SourceFileLoader(f"recipe_{path.stem}", str(path))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module

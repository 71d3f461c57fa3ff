"""What several commands share: options, and checks of paths before Keras is imported."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from keras_vit_cli import output

CHECKPOINT = (
    "a path, a name that `keras-vit models` lists, "
    "hf://organization/name\\[@revision]\\[/file] or https://..."
)
EXPORTS = (".tflite", ".onnx", ".xml")
MODEL_FILES = (".keras", ".npz", ".safetensors", ".h5", *EXPORTS, ".bin", ".pt", ".pth")


def _set_log(verbose: bool) -> bool:
    output.set_log(verbose)
    return verbose


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_set_log, help="Show the log as well.")
]
# Read by `main`, which reports the errors.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class Command(TyperCommand):
    """A command whose repeatable options also take several values: `--few-shot 1 5 10`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeats the option before each further value, as typer wants it."""
        repeatable = {
            name
            for param in self.params
            if getattr(param, "multiple", False)
            for name in param.opts
        }
        given, option = [], None
        for position, arg in enumerate(args):
            if arg.startswith("-"):
                option = arg if arg in repeatable else None
            elif option and args[position - 1] != option:
                given.append(option)
            given.append(arg)
        return super().parse_args(ctx, given)


def check_source(name: str, source: str) -> None:
    """Raises if a source is the path of a file that does not exist.

    Anything that may be the name of a known checkpoint passes.

    Args:
        name: Name of the argument.
        source: Its value.
    """
    path = Path(source)
    is_path = path.is_absolute() or source.startswith((".", "~"))
    is_path |= source.lower().endswith(MODEL_FILES)
    if is_path and "://" not in source and not path.expanduser().exists():
        raise FileNotFoundError(
            f"{name} must be a path that exists, a name that `keras-vit models` lists, hf://... or "
            f"https://... Received: {name}={source!r}, which does not exist."
        )


def check_folder(name: str, folder: Path) -> None:
    """Raises if a folder does not exist."""
    if not folder.is_dir():
        raise ValueError(f"{name} must be a folder. Received: {folder}")

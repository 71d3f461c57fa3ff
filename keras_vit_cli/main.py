"""The entry point of `keras-vit`: its commands, and how an error ends one.

The exit code is 0, 1 after an error, which is one line on stderr, or 2 after a usage error.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from keras_vit_cli import (
    backend,
    benchmark,
    convert,
    embed,
    evaluate,
    explain,
    export,
    info,
    models,
    output,
    predict,
    request,
    serve,
    serve_config,
    train,
    wording,
)
from keras_vit_cli.options import Command

DISTRIBUTION = "keras3-vit"
# By the heading of `keras-vit --help`.
COMMANDS = {
    "Checkpoints": (models.models, info.info, convert.convert),
    "Training": (train.train, evaluate.evaluate),
    "Use": (predict.predict, embed.embed, explain.explain),
    "Deployment": (
        *(export.export, benchmark.benchmark, serve.serve, serve_config.serve_config),
        request.request,
    ),
}

app = typer.Typer(
    name="keras-vit",
    help="Vision Transformers for Keras 3: find, train, use, explain and deploy them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    pretty_exceptions_enable=False,
)
for _heading, _functions in COMMANDS.items():
    for _function in _functions:
        app.command(cls=Command, rich_help_panel=_heading)(_function)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits.

    Args:
        arguments: What follows `keras-vit`; defaults to the arguments of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    output.set_log(verbose=False)
    try:
        app(arguments, prog_name="keras-vit")
    except Exception as error:
        if "--debug" in arguments:
            raise
        expected = isinstance(error, ValueError | OSError | ImportError | FloatingPointError)
        text = _in_options(str(error), arguments)
        output.print_error(text if expected else f"{type(error).__name__}: {text} (see --debug)")
        sys.exit(1)


def _in_options(text: str, arguments: Sequence[str]) -> str:
    """An error of the library in the words of the command that was called."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = next((word for word in arguments if word in commands), None)
    return wording.in_options(text, wording.options_of(commands[name])) if name else text


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    import importlib.metadata

    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        version = backend.load_library().__version__
    print(f"keras-vit {version}")
    raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...

"""`python -m training.train --recipe NAME_OR_FILE.py --workdir DIR`: trains by a recipe.

The run folder gets model.keras, report.md with its figures, recipe.json, log.jsonl and files for
TensorBoard. `--set section.field=value` changes any field of the recipe; KERAS_BACKEND chooses the
backend.
"""

import argparse
import functools
import os
import re
import sys
from pathlib import Path

# Keras and TensorFlow are imported when they are needed, so that `--help` is immediate.


def main(argv: list[str] | None = None) -> int:
    """Trains, and prints where the results are."""
    options = _options(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings
    try:
        return _list() if options.list else _train(options)
    except KeyboardInterrupt:
        print("\ntraining.train: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError, RuntimeError) as error:
        if options.debug:
            raise
        print(f"training.train: error: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(error: Exception) -> str:
    """The message in one line, the items of a list separated by semicolons."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return re.sub(r"(?<=[:.,]); ", " ", "; ".join(line for line in lines if line))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Trains a Vision Transformer by a recipe.",
        epilog="example: python -m training.train --recipe digits --workdir runs/digits "
        "--set run.epochs=10",
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help="a name that --list shows, or the path of a .py file"
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the run folder: a new one, or that of a run to resume (--recipe is optional then)",
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="resume an existing run (the default)",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume even if the recipe has changed"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="change a field of the recipe, such as optimizer.learning_rate=3e-4; may be repeated",
    )
    parser.add_argument("--data", metavar="PATH", help="where the data is (the same as data.path)")
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="WHICH",
        help="auto (a cluster that the environment names, all GPUs, or the CPU), one, all, or "
        "model:N (JAX: weights split over N devices)",
    )
    parser.add_argument("--list", action="store_true", help="list the recipes and exit")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    if options.list:
        return options
    if not options.workdir:
        parser.error("--recipe and --workdir are required, or --list")
    if not options.recipe and not (options.workdir / "recipe.json").is_file():
        parser.error(f"--recipe is required: there is no run in {options.workdir}")
    return options


def _list() -> int:
    from keras_vit.train import list_recipes

    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, description in recipes.items():
        print(f"{name:{width}}  {description}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from keras_vit import backend

    backend.choose()
    from keras_vit import train

    train.train(
        options.recipe,
        options.workdir,
        overrides=options.set,
        data=options.data,
        devices=options.devices,
        resume=options.resume,
        accept_changes=options.accept_changes,
        verbose=0 if options.quiet else "auto",
        say=None if options.quiet else functools.partial(print, flush=True),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

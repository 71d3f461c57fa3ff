"""`python -m training.train --recipe NAME --workdir DIR`: trains by a recipe.

The run folder gets model.keras, report.md with its pictures, recipe.json, log.jsonl and files for
TensorBoard. `--set section.field=value` changes any field of the recipe; KERAS_BACKEND chooses the
backend.
"""

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path

# Keras and TensorFlow are imported when a command has come that far: `--help` is immediate.


def main(argv: list[str] | None = None) -> int:
    """Trains, and says where things are."""
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
    """What it says; the items of a list are told apart."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return re.sub(r"(?<=[:.,]); ", " ", "; ".join(line for line in lines if line))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Trains a Vision Transformer by a recipe.",
        epilog="example: python -m training.train --recipe digits --workdir runs/digits "
        "--set run.epochs=10",
    )
    parser.add_argument("--recipe", metavar="NAME", help="one that --list shows")
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the run folder: new, or that of a run, which goes on (then --recipe may be left out)",
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on with a run that is there (the default)",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on though the recipe is another"
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
        "model:N (JAX: weights cut into N)",
    )
    parser.add_argument("--list", action="store_true", help="show the recipes and end")
    parser.add_argument("--quiet", action="store_true", help="print errors and nothing else")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    options = parser.parse_args(argv)
    if options.list:
        return options
    if not options.workdir:
        parser.error("--recipe and --workdir are needed, or --list")
    if not options.recipe and not (options.workdir / "recipe.json").is_file():
        parser.error(f"--recipe is needed: there is no run in {options.workdir}")
    return options


def _list() -> int:
    import importlib

    from training import recipes

    width = max(map(len, recipes.NAMES))
    for name in recipes.NAMES:
        module = importlib.import_module(f"training.recipes.{name}")
        print(f"{name:{width}}  {(module.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from keras_vit_cli import backend

    backend.choose()
    from training import recipe as recipes_
    from training import run_folder
    from training.recipes import NAMES, load

    if options.recipe is None:
        recipe = run_folder.read_recipe(options.workdir)
    else:
        if options.recipe not in NAMES:
            print(f"The recipes are: {', '.join(NAMES)}", file=sys.stderr)
        recipe = load(options.recipe)
    recipe = recipes_.override(recipe, options.set)
    if options.data is not None:
        recipe = dataclasses.replace(
            recipe, data=dataclasses.replace(recipe.data, path=options.data)
        )
    from training import fit

    begun = []

    def on_start(plan):
        begun.append(plan)
        if not options.quiet:
            print(_summary(plan), flush=True)

    reached = fit.run(
        recipe,
        options.workdir,
        devices=options.devices,
        resume=options.resume,
        accept_changes=options.accept_changes,
        verbose=0 if options.quiet else "auto",
        on_start=on_start,
    )
    if reached and not options.quiet:
        if not begun:
            print("This run was finished before, and is left alone.")
        top5 = "" if reached["top5"] is None else f", top-5 {reached['top5']:.2%}"
        print(
            f"\nTest: top-1 {reached['top1']:.2%}{top5}, after {reached['seconds'] / 60:.1f} "
            f"minutes\n{options.workdir}/report.md    curves, mistakes and how to go on\n"
            f"{options.workdir}/model.keras  the model"
        )
    return 0


def _summary(plan) -> str:
    """What is about to be trained, on what."""
    from training import fit

    recipe, source, devices = plan.recipe, plan.source, plan.devices
    batch = recipe.run.batch_size
    lines = [
        f"{recipe.name}: {plan.model.count_params():,} parameters, "
        f"{source.train.num_examples:,} training and {source.test.num_examples:,} test "
        f"pictures of {source.num_classes} classes",
        fit.machine(devices),
    ]
    update = batch * recipe.optimizer.accumulate
    line = f"{plan.steps:,} steps of {batch:,} in {plan.epochs:,} epochs"
    if devices.replicas > 1:
        line += f", {batch // devices.replicas:,} a device"
    if update != batch:
        line += f", an update every {update:,}"
    line += f"; learning rate {recipe.learning_rate:g} for the whole"
    if recipe.optimizer.base_batch is not None:
        given, base = recipe.optimizer.learning_rate, recipe.optimizer.base_batch
        line += f" ({given:g} for {base:,})"
    if plan.start.step:
        epoch = min(plan.start.epoch + 1, plan.epochs)
        line += f"\ngoes on at step {plan.start.step:,}, in epoch {epoch:,}"
    return "\n".join([*lines, line])


if __name__ == "__main__":
    sys.exit(main())

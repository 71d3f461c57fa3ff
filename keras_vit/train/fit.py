"""A recipe as plain Keras: `run` builds, compiles, fits, and leaves a run folder.

In a notebook:

>>> recipe = training.recipes.load("digits")
>>> source = open_source(recipe.data)
>>> model = build_model(recipe, source)
>>> compile_model(model, recipe, steps=1000)
>>> batches = train_batches(source, model.config, recipe.augment, recipe.run.batch_size, seed=0)
>>> model.fit(batches, epochs=10, steps_per_epoch=100, shuffle=False)
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.runs import CHECKPOINTS, LOG, MODEL, RECIPE, RESULTS
from keras_vit.weights.atomic import TEMPORARY, atomic_path
from training import callbacks as watch
from training import distribution, few_shot, plain, recipe, report, run_folder, seen
from training.build import build_model, compile_model
from training.checkpoint import Checkpoint
from training.data import Part, Source, open_source, test_batches, train_batches
from training.optimizers import PerUpdate, make_schedule
from training.recipe import Recipe
from training.sigterm import CODE
from training.snapshots import Lock, Start

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Plan:
    """What is about to be trained."""

    recipe: Recipe
    source: Source
    devices: distribution.Devices
    model: keras_vit.ViT
    steps: int
    """Batches in the whole run."""
    epochs: int
    steps_per_epoch: int
    start: Start = Start()
    """Where it begins, or goes on."""


def epochs_of(steps: int, num_examples: int, batch_size: int, multiple: int = 1) -> tuple[int, int]:
    """Epochs, and steps in each but the last, which has what is left of the whole run's steps.

    Args:
        steps: Batches in the whole run.
        num_examples: Training samples.
        batch_size: Samples in a batch.
        multiple: `steps_per_execution`, which must divide both.
    """
    if steps % multiple:
        raise ValueError(
            f"run.steps_per_execution must divide the {steps} steps of the run, or run.steps be "
            f"set to {max(steps - steps % multiple, multiple)}. "
            f"Received: run.steps_per_execution={multiple}"
        )
    epochs = max(1, round(steps * batch_size / num_examples))
    each = math.ceil(steps / epochs / multiple) * multiple
    return math.ceil(steps / each), each


def run(
    recipe: Recipe,
    workdir: str | os.PathLike,
    *,
    devices: str = "auto",
    resume: bool = True,
    accept_changes: bool = False,
    verbose: int | str = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    on_start: Callable[[Plan], None] | None = None,
) -> dict[str, Any]:
    """Trains by a recipe with `model.fit` and leaves everything in one folder.

    What can be wrong is found before the first step: the folder, the data, the batch, the disk. A
    run that was cut off goes on where its last checkpoint was made, and one that is finished is
    left alone.

    Args:
        recipe: A `Recipe`.
        workdir: The run folder: new, empty, or that of a run.
        devices: As of `training.distribution.scope`. Of several processes the first one writes.
        resume: Whether a run that is there already is gone on with; otherwise it is an error.
        accept_changes: Whether it is when its recipe was another, too.
        verbose: As of `fit`, but "auto" is a bar on a terminal, one line an epoch elsewhere.
        callbacks: Further callbacks for `fit`.
        on_start: Called by the first process before the first step.

    Returns:
        What was reached: "top1", "top5", "steps", "seconds", "images_per_second", and "few_shot"
        where the recipe asks for it. In other processes than the first, nothing.
    """
    workdir = Path(workdir)
    lock, checkpoint = Lock(workdir), None
    try:
        with distribution.scope(devices) as where:
            if where.is_chief:
                run_folder.check_folder(workdir, resume)
            _check_same_recipe(recipe, where)
            changed = run_folder.check_changes(recipe, workdir, accept_changes)
            if not changed and (found := run_folder.read_results(workdir)) is not None:
                return found if where.is_chief else {}
            plan = _plan(recipe, where)
            if where.is_chief:
                run_folder.check_space(workdir, plan.model)
                lock.acquire()  # nothing has been written yet
            checkpoint = Checkpoint(
                workdir / CHECKPOINTS,
                every_minutes=recipe.run.checkpoint_minutes,
                monitor="val_accuracy",
                mode="max",
                devices=where,
            )
            run_folder.check_shared(workdir, where)
            plan.start = checkpoint.restore(plan.model)
            _go_on(plan)
            checkpoint.extra = _facts_of(plan)
            if where.is_chief:
                _begin(plan, workdir)
                if on_start is not None:
                    on_start(plan)
            # Where this very run has come to its end, it only has to be reported.
            if plan.start.stopped and plan.start.extra["recipe"] == recipe.to_dict():
                plan.epochs = plan.start.epoch
            reached = _fit(plan, workdir, checkpoint, verbose, callbacks)
            weights = plain.plain_weights(plan.model)
        return _finish(plan, workdir, weights, reached) if where.is_chief else {}
    except ConnectionError as error:
        if checkpoint is None or not checkpoint.interrupted:
            raise
        # The first process has saved and gone, as it was told to.
        logger.warning("SIGTERM: the run ends, as process 0 has, which saves: %s", error)
        sys.exit(CODE)
    finally:
        if checkpoint is not None:
            checkpoint.close()
        lock.release()


def _plan(recipe: Recipe, devices: distribution.Devices) -> Plan:
    """Data and model, or an error about what does not fit."""
    if not devices.is_chief:
        devices.barrier()  # one process downloads, the others find it done
    source = open_source(recipe.data)
    if devices.is_chief:
        devices.barrier()
    batch = recipe.run.batch_size
    num_examples = source.train.num_examples
    if not 0 < batch <= num_examples:
        raise ValueError(
            f"run.batch_size must be from 1 to the {num_examples} training samples. "
            f"Received: run.batch_size={batch}"
        )
    devices.check_batch(batch, "run.batch_size")
    steps, looks = recipe.steps(num_examples), recipe.evaluation
    for name, value in (
        ("run.steps", steps),
        ("run.steps_per_execution", recipe.run.steps_per_execution),
        ("evaluation.batch_size", batch if looks.batch_size is None else looks.batch_size),
        ("evaluation.every", looks.every),
        ("evaluation.few_shot", min(looks.few_shot, default=1)),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {name}={value}")
    epochs, each = epochs_of(steps, num_examples, batch, recipe.run.steps_per_execution)
    keras.utils.set_random_seed(recipe.run.seed)
    model = build_model(recipe, source)
    compile_model(model, recipe, steps, devices)
    return Plan(recipe, source, devices, model, steps, epochs, each)


def _go_on(plan: Plan) -> None:
    """Keeps the epochs of a run that goes on, as many as its steps now are.

    Raises:
        ValueError: The steps that are done would mean something else than when they were done.
    """
    start, run = plan.start, plan.recipe.run
    if start.step == 0:
        return
    each, before = start.extra["steps_per_epoch"], start.extra["recipe"]["run"]["batch_size"]
    if run.batch_size != before:
        raise ValueError(
            f"run.batch_size must stay {before} in a run that goes on. "
            f"Received: run.batch_size={run.batch_size}"
        )
    if start.step % run.steps_per_execution or each % run.steps_per_execution:
        raise ValueError(
            f"run.steps_per_execution must divide the {start.step} steps that are done and the "
            f"{each} of an epoch. Received: run.steps_per_execution={run.steps_per_execution}"
        )
    least = start.step + (start.step_in_epoch > 0)  # an epoch that was begun gets one more
    if plan.steps < least:
        raise ValueError(
            f"run.steps must be at least {least}, where {start.step} are done. "
            f"Received: run.steps={plan.steps}"
        )
    left = plan.steps - start.step + start.step_in_epoch
    plan.steps_per_epoch, plan.epochs = each, start.epoch + math.ceil(left / each)


def _facts_of(plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    return {
        "devices": str(plan.devices),
        "steps": plan.steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "recipe": plan.recipe.to_dict(),
    }


def _begin(plan: Plan, workdir: Path) -> None:
    """What is in the folder before the first step."""
    start, now = plan.start, str(plan.devices)
    if start.step == 0:  # what a run left that never came to a checkpoint
        (workdir / LOG).unlink(missing_ok=True)
        shutil.rmtree(workdir / "logs", ignore_errors=True)
    elif (before := start.extra["devices"]) != now:
        logger.warning(
            "The run goes on, but not bit for bit: it was on %s, and is on %s", before, now
        )
    (workdir / RESULTS).unlink(missing_ok=True)
    for path in workdir.glob(f"{TEMPORARY}*"):  # of a process that was killed; we have the lock
        path.unlink()
    with atomic_path(workdir / RECIPE) as temporary:
        text = json.dumps(plan.recipe.to_dict(), indent=2) + "\n"
        temporary.write_text(text, encoding="utf-8")


def _fit(plan: Plan, workdir: Path, checkpoint, verbose, callbacks) -> dict[str, Any]:
    """Trains; every process does."""
    recipe, devices, config = plan.recipe, plan.devices, plan.model.config
    batch, every = recipe.run.batch_size, recipe.evaluation.every
    schedule = make_schedule(
        recipe.schedule, recipe.learning_rate, plan.steps // recipe.optimizer.accumulate
    )
    progress = watch.Progress(batch, plan.steps, PerUpdate(schedule, recipe.optimizer.accumulate))
    observers = [watch.StopAfter(plan.steps), progress]
    if recipe.optimizer.ema_momentum is not None:
        observers.append(watch.EvaluateAverage())
    if devices.is_chief:
        observers += [watch.JsonLines(workdir / LOG), watch.EventFiles(workdir / "logs")]
    else:
        verbose = 0
    one = (devices.process, devices.processes)
    batches = train_batches(
        plan.source, config, recipe.augment, batch, recipe.run.seed, plan.start.step, *one
    )
    size, part = _evaluation_batch(plan), None
    if devices.replicas > 1:
        part = Part.of(size, *one)
    tests = test_batches(plan.source.test, config, size, plan.source.num_classes, part)
    plan.model.fit(
        devices.distribute(batches),
        epochs=plan.epochs,
        initial_epoch=plan.start.epoch,
        steps_per_epoch=plan.steps_per_epoch,
        validation_data=devices.distribute(tests),
        validation_freq=sorted({*range(every, plan.epochs + 1, every), plan.epochs}),
        callbacks=checkpoint.around([*observers, *callbacks]),
        shuffle=False,  # the batches are shuffled already, and Keras would say so
        # Keras' own "auto" is a bar in a file too.
        verbose=(1 if sys.stdout.isatty() else 2) if verbose == "auto" else verbose,
    )
    return {
        "steps": progress.step,
        "seconds": progress.seconds,
        "images_per_second": progress.images_per_second,
    }


def _finish(plan: Plan, workdir: Path, weights, reached: dict[str, Any]) -> dict[str, Any]:
    """Saves the model, looks at it, and reports; one process does, on one device."""
    recipe, source = plan.recipe, plan.source
    model = plain.plain_model(plan.model, weights)
    size = _evaluation_batch(plan)
    tests = test_batches(source.test, model.config, size, source.num_classes)
    model = plain.save_plain(model, workdir / MODEL, recipe.loss.name, tests)
    predictions = report.predict(model, tests)
    reached = {"top1": predictions.top1, "top5": predictions.top5, **reached}
    if shots := recipe.evaluation.few_shot:
        pictures = test_batches(source.train, model.config, size, source.num_classes)
        reached["few_shot"] = few_shot.evaluate(model, pictures, tests, shots)
    batch, num_examples = recipe.run.batch_size, source.train.num_examples
    steps = reached["steps"]
    facts = {
        "training": f"{steps:,} steps of {batch}, {steps * batch / num_examples:.4g} "
        f"epochs of {num_examples:,} pictures",
        "time": f"{reached['seconds'] / 60:.1f} minutes, evaluation included",
        "images a second": f"{reached['images_per_second']:,.0f}, without evaluation",
        "parameters": f"{model.count_params():,}",
        "machine": machine(plan.devices),
    }
    for name, value in reached.get("few_shot", {}).items():
        facts[f"linear, {name.removeprefix('few_shot_')} pictures a class"] = f"{value:.2%}"
    looked_at = seen.draw(model, source.test.ordered().as_numpy_iterator(), workdir)
    report.write(workdir, recipe, predictions, facts, model.config.labels, looked_at)
    with atomic_path(workdir / RESULTS) as temporary:  # the last of all: the run is finished
        temporary.write_text(json.dumps(reached, indent=2) + "\n", encoding="utf-8")
    return reached


def _evaluation_batch(plan: Plan) -> int:
    """What the recipe says, or a little more, so that all devices get the same."""
    size, replicas = plan.recipe.evaluation.batch_size, plan.devices.replicas
    return -(-(size or plan.recipe.run.batch_size) // replicas) * replicas


def machine(devices: distribution.Devices) -> str:
    """One line on what a run ran on."""
    name = keras.backend.backend()
    version = __import__(name).__version__
    return f"{devices}; Keras {keras.__version__} on {name} {version}"


# -- what can be wrong at the start


def _check_same_recipe(ours: Recipe, devices: distribution.Devices) -> None:
    """Raises in every process where one of them has been given something else."""
    text = json.dumps(ours.to_dict()).encode()
    size = int(devices.gather(np.array(len(text), "int32")).max())
    rows = devices.gather(np.frombuffer(text.ljust(size), "uint8"))
    first, *others = (Recipe.from_dict(json.loads(row.tobytes())) for row in rows)
    for number, other in enumerate(others, 1):
        if lines := recipe.differences(first, other):
            raise ValueError(
                "recipe must be the same in every process. Received, in process 0 and "
                f"{number}: {'; '.join(lines)}"
            )

"""A recipe as plain Keras: `train` builds, compiles, fits, and leaves a run folder.

The same step by step, in a notebook:

>>> recipe = train.load_recipe("digits")  # after: from keras_vit import train
>>> source = train.open_source(recipe.data)
>>> model = train.build_model(recipe, source)
>>> train.compile_model(model, recipe, steps=1000)
>>> batches = train.train_batches(source, model.config, recipe.augment, 32, seed=0)
>>> model.fit(batches, epochs=10, steps_per_epoch=100, shuffle=False)
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit.atomic import TEMPORARY, atomic_path, remove
from keras_vit.lock import Lock
from keras_vit.paths import as_output
from keras_vit.train import distribution, finish, run_batches
from keras_vit.train.build import build_model, build_objective, compile_model
from keras_vit.train.checkpoint.checkpoint import Checkpoint
from keras_vit.train.checkpoint.files import Start
from keras_vit.train.checkpoint.sigterm import CODE
from keras_vit.train.data.sources import Source, open_source
from keras_vit.train.optim.schedule import PerUpdate, make_schedule
from keras_vit.train.recipe import Augment, Recipe, changed_fields
from keras_vit.train.recipe_files import resolve_recipe
from keras_vit.train.run import callbacks as watch
from keras_vit.train.run import run_folder
from keras_vit.train.run.run_status import CHECKPOINTS, LOG, RECIPE, RESULTS
from keras_vit.train.run.summary import summary_of_plan, summary_of_results

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RunPlan:
    """What is about to be trained."""

    recipe: Recipe
    source: Source
    devices: distribution.Devices
    model: keras.Model
    """What `fit` trains: a `ViT`, or an objective around one."""
    steps: int
    """Batches in the whole run."""
    epochs: int
    steps_per_epoch: int
    start: Start = Start()
    """Where it begins or resumes."""

    @property
    def vit(self) -> keras_vit.ViT:
        """The model that is trained, without the objective's other parts."""
        return getattr(self.model, "vit", self.model)

    @property
    def views(self) -> dict[str, Any] | None:
        """The arguments of `multi_crop`, if the model is trained on views of each image."""
        return run_batches.views_of(self.recipe)

    @property
    def knn(self) -> int:
        """How many images the k-NN evaluation reads; 0 for none."""
        labels = self.recipe.objective.needs_labels
        return 0 if labels or not self.source.num_classes else self.recipe.evaluation.knn

    @property
    def monitor(self) -> str | None:
        """The value in the logs that tells the best epoch; None if nothing does."""
        if self.recipe.objective.needs_labels:
            return "val_accuracy"
        if self.views is None:
            return "val_loss"
        # The loss of views compares a model with itself: it is lower for one that learns nothing.
        return "val_knn" if self.knn and self.devices.replicas == 1 else None

    @property
    def evaluation_batch(self) -> int:
        """The recipe's batch size for evaluation, rounded up to a multiple of the devices."""
        size, replicas = self.recipe.evaluation.batch_size, self.devices.replicas
        return -(-(size or self.recipe.run.batch_size) // replicas) * replicas


def epochs_of(steps: int, num_examples: int, batch_size: int, multiple: int = 1) -> tuple[int, int]:
    """Epochs, and the steps of each. The last one has the remaining steps of the whole run.

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


def train(
    recipe: Recipe | str | os.PathLike | None,
    workdir: str | os.PathLike,
    *,
    overrides: Iterable[str] = (),
    data: str | os.PathLike | None = None,
    devices: str = "auto",
    resume: bool = True,
    accept_changes: bool = False,
    verbose: int | str = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains by a recipe with `model.fit` and leaves everything in one folder.

    Errors of the folder, the data, the batch or the disk are raised before the first step. A run
    that was cut off resumes from its last checkpoint. A finished run is left alone.

    Args:
        recipe: A `Recipe`, the name of one of `list_recipes`, or the path of a recipe file. None
            is the recipe of the run in `workdir`.
        workdir: The run folder: new, empty, or that of a run.
        overrides: Changes to the recipe's fields, such as "optimizer.learning_rate=3e-4".
        data: Path of the data; the same as an override of data.path.
        devices: See `keras_vit.train.scope`. Of several processes the first one writes.
        resume: Whether to resume an existing run. If False, an existing run is an error.
        accept_changes: Whether to resume even if the recipe has changed.
        verbose: See Keras' `fit`; "auto" is a bar on a terminal, and one line an epoch elsewhere.
        callbacks: Further callbacks for `fit`.
        say: Called by the first process with what a user wants to read, such as `print`: what is
            about to be trained, and where the results are.

    Returns:
        The results: "top1", "top5", "steps", "seconds", "images_per_second", and "few_shot" if the
        recipe asks for it. Of an objective that needs no labels, "val_loss" and, if the data has
        labels, "knn" instead of the first two. Empty in all processes but the first.

    Example:

    >>> results = keras_vit.train.train("digits", "runs/digits", overrides=["run.epochs=10"])
    """
    workdir = as_output("workdir", workdir)
    recipe = run_folder.read_recipe(workdir) if recipe is None else recipe
    recipe = resolve_recipe(recipe, overrides, data)
    say = say or _say_nothing
    lock, checkpoint, created = Lock(workdir), None, []
    try:
        with distribution.scope(devices) as where:
            if where.is_chief:
                created = run_folder.check_workdir(workdir, resume)
            _check_same_recipe(recipe, where)
            changed = run_folder.check_changes(recipe, workdir, accept_changes)
            if not changed and (results := run_folder.read_results(workdir)) is not None:
                if not where.is_chief:
                    return {}
                say("This run was finished before, and is left alone.")
                say(summary_of_results(results, workdir))
                return results
            plan = _plan(recipe, where)
            if where.is_chief:
                run_folder.check_space(workdir, plan.model)
                lock.acquire()  # nothing has been written yet
            checkpoint = Checkpoint(
                workdir / CHECKPOINTS,
                every_minutes=recipe.run.checkpoint_minutes,
                monitor=plan.monitor,
                mode="min" if plan.monitor == "val_loss" else "max",
                devices=where,
            )
            run_folder.check_shared(workdir, where)
            plan.start = checkpoint.restore(plan.model)
            _keep_epochs(plan)
            checkpoint.extra = _facts_of(plan)
            if where.is_chief:
                _begin(plan, workdir)
                say(summary_of_plan(plan))
            # If this very run has reached its end, only the report is missing.
            if plan.start.stopped and plan.start.extra["recipe"] == recipe.to_dict():
                plan.epochs = plan.start.epoch
            results = _fit(plan, workdir, checkpoint, verbose, callbacks)
            weights = finish.trained_weights(plan)
        if not where.is_chief:
            return {}
        results = finish.finish(plan, workdir, weights, results)
        say(summary_of_results(results, workdir))
        return results
    except ConnectionError as error:
        if checkpoint is None or not checkpoint.interrupted:
            raise
        # The first process has saved and ended, as SIGTERM asked.
        logger.warning("SIGTERM: the run ends, as process 0 has, which saved it: %s", error)
        sys.exit(CODE)
    finally:
        if checkpoint is not None:
            checkpoint.close()
        lock.release()
        run_folder.remove_empty(created)


def _plan(recipe: Recipe, devices: distribution.Devices) -> RunPlan:
    """Opens the data and builds the model, or raises if they do not fit the recipe."""
    if not devices.is_chief:
        devices.barrier()  # one process downloads, the others wait
    source = open_source(recipe.data, needs_labels=recipe.objective.needs_labels)
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
    steps, evaluation = recipe.steps(num_examples), recipe.evaluation
    size = evaluation.batch_size
    if recipe.objective.name == "dino" and recipe.augment != Augment():
        raise ValueError(
            "augment must be left out for objective.name='dino', whose views are set by "
            f"objective.options. Received: augment={recipe.augment}"
        )
    if evaluation.few_shot and not source.num_classes:
        raise ValueError(
            "evaluation.few_shot must be () for images without labels. "
            f"Received: evaluation.few_shot={evaluation.few_shot}"
        )
    if evaluation.knn < 0:
        raise ValueError(
            f"evaluation.knn must be at least 0. Received: evaluation.knn={evaluation.knn}"
        )
    for name, value in (
        ("run.steps", steps),
        ("run.steps_per_execution", recipe.run.steps_per_execution),
        ("evaluation.batch_size", batch if size is None else size),
        ("evaluation.every", evaluation.every),
        ("evaluation.few_shot", min(evaluation.few_shot, default=1)),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {name}={value}")
    epochs, each = epochs_of(steps, num_examples, batch, recipe.run.steps_per_execution)
    keras.utils.set_random_seed(recipe.run.seed)
    model = build_objective(build_model(recipe, source), recipe, steps)
    compile_model(model, recipe, steps, devices)
    return RunPlan(recipe, source, devices, model, steps, epochs, each)


def _keep_epochs(plan: RunPlan) -> None:
    """Keeps the length of an epoch of a resumed run, and sets how many there are.

    Raises:
        ValueError: The steps that are done would mean something else now.
    """
    start, run = plan.start, plan.recipe.run
    if start.step == 0:
        return
    each, before = start.extra["steps_per_epoch"], start.extra["recipe"]["run"]["batch_size"]
    if run.batch_size != before:
        raise ValueError(
            f"run.batch_size must stay {before} in a resumed run. "
            f"Received: run.batch_size={run.batch_size}"
        )
    if start.step % run.steps_per_execution or each % run.steps_per_execution:
        raise ValueError(
            f"run.steps_per_execution must divide the {start.step} steps that are done and the "
            f"{each} of an epoch. Received: run.steps_per_execution={run.steps_per_execution}"
        )
    least = start.step + (start.step_in_epoch > 0)  # an epoch that has begun needs one more
    if plan.steps < least:
        raise ValueError(
            f"run.steps must be at least {least}, where {start.step} are done. "
            f"Received: run.steps={plan.steps}"
        )
    left = plan.steps - start.step + start.step_in_epoch
    plan.steps_per_epoch, plan.epochs = each, start.epoch + math.ceil(left / each)


def _facts_of(plan: RunPlan) -> dict[str, Any]:
    """What a checkpoint records about its run."""
    return {
        "devices": str(plan.devices),
        "steps": plan.steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "recipe": plan.recipe.to_dict(),
    }


def _begin(plan: RunPlan, workdir: Path) -> None:
    """Prepares the folder for the first step."""
    start, now = plan.start, str(plan.devices)
    if start.step == 0:  # left by a run that never reached a checkpoint
        (workdir / LOG).unlink(missing_ok=True)
        shutil.rmtree(workdir / "logs", ignore_errors=True)
    elif (before := start.extra["devices"]) != now:
        logger.warning(
            "The run resumes, but not bit for bit: it ran on %s, and now on %s", before, now
        )
    (workdir / RESULTS).unlink(missing_ok=True)
    for path in workdir.glob(f"{TEMPORARY}*"):  # left by a killed process: we hold the lock
        remove(path)
    with atomic_path(workdir / RECIPE) as temporary:
        text = json.dumps(plan.recipe.to_dict(), indent=2) + "\n"
        temporary.write_text(text, encoding="utf-8")


def _fit(plan: RunPlan, workdir: Path, checkpoint, verbose, callbacks) -> dict[str, Any]:
    """Trains, in every process."""
    recipe, devices = plan.recipe, plan.devices
    batch, every = recipe.run.batch_size, recipe.evaluation.every
    schedule = make_schedule(
        recipe.schedule, recipe.learning_rate, plan.steps // recipe.optimizer.accumulate
    )
    progress = watch.Progress(batch, plan.steps, PerUpdate(schedule, recipe.optimizer.accumulate))
    observers: list[keras.callbacks.Callback] = [watch.StopAfter(plan.steps), progress]
    if plan.knn and devices.replicas == 1:
        observers.append(run_batches.knn(plan))
    elif plan.knn and devices.is_chief:
        logger.warning("val_knn is not computed on several devices, but once, after training")
    if recipe.optimizer.ema_momentum is not None:
        observers.append(watch.EvaluateAverage())
    if devices.is_chief:
        observers += [watch.JsonLines(workdir / LOG), watch.EventFiles(workdir / "logs")]
    else:
        verbose = 0
    plan.model.fit(
        devices.distribute(run_batches.training(plan)),
        epochs=plan.epochs,
        initial_epoch=plan.start.epoch,
        steps_per_epoch=plan.steps_per_epoch,
        validation_data=devices.distribute(run_batches.evaluation(plan)),
        validation_freq=sorted({*range(every, plan.epochs + 1, every), plan.epochs}),
        callbacks=checkpoint.around([*observers, *callbacks]),
        shuffle=False,  # the batches are shuffled already, and Keras would warn
        # Keras' own "auto" shows a bar in a file too.
        verbose=(1 if sys.stdout.isatty() else 2) if verbose == "auto" else verbose,
    )
    return {
        "steps": progress.step,
        "seconds": progress.seconds,
        "images_per_second": progress.images_per_second,
    }


def _say_nothing(message: str) -> None:
    del message


# -- checks at the start


def _check_same_recipe(ours: Recipe, devices: distribution.Devices) -> None:
    """Raises in every process if one of them has another recipe."""
    text = json.dumps(ours.to_dict()).encode()
    size = int(devices.gather(np.array(len(text), "int32")).max())
    rows = devices.gather(np.frombuffer(text.ljust(size), "uint8"))
    first, *others = (Recipe.from_dict(json.loads(row.tobytes())) for row in rows)
    for number, other in enumerate(others, 1):
        if lines := changed_fields(first, other):
            raise ValueError(
                "recipe must be the same in every process. Received, in process 0 and "
                f"{number}: {'; '.join(lines)}"
            )

"""Checks of a run folder before its run, and reading what an earlier run left there."""

import logging
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.atomic import TEMPORARY
from keras_vit.lock import LOCK
from keras_vit.train.checkpoint.manifest import FACTS, SUMMARY, listing, read_facts
from keras_vit.train.distribution.devices import Devices
from keras_vit.train.recipe import Recipe, changed_fields
from keras_vit.train.run.run_status import CHECKPOINTS, MODEL, RECIPE, RESULTS
from keras_vit.weights.files.documents import OBJECT, read_document, stated

logger = logging.getLogger(__name__)


def check_workdir(workdir: Path, resume: bool) -> list[Path]:
    """Creates the folder, and returns which folders were created, the innermost first.

    Raises if it holds anything but a run, or cannot be written.
    """
    created = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    there = sorted(p.name for p in workdir.iterdir()) if workdir.is_dir() else []
    is_run = RECIPE in there
    # A run that ended before its first step leaves locks and temporary files.
    paths = (p for p in workdir.rglob("*") if p != workdir / CHECKPOINTS)
    other = any(p.name != LOCK and not p.name.startswith(TEMPORARY) for p in paths)
    if (is_run and not resume) or (not is_run and other):
        more = f" and {len(there) - 6} more" if len(there) > 6 else ""
        raise FileExistsError(
            f"workdir must be a new or empty folder{', or that of a run' if resume else ''}. "
            f"Received: workdir={str(workdir)!r}, which holds {', '.join(there[:6])}{more}"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise OSError(
            "workdir must be a folder that can be written. "
            f"Received: workdir={str(workdir)!r}: {error.strerror}"
        ) from error
    return created


def remove_empty(created: Sequence[Path]) -> None:
    """Removes the folders that `check_workdir` created, if nothing was written into them."""
    for folder in created:
        try:
            folder.rmdir()
        except OSError:  # it is not empty
            return


def check_shared(workdir: Path, devices: Devices) -> None:
    """Raises in every process if one of them does not see the files of the first one."""
    if devices.processes == 1:
        return
    devices.barrier()
    seen = devices.gather(np.array((workdir / LOCK).exists()))
    if not seen.all():
        raise ValueError(
            "workdir must be shared by all processes. Received: "
            f"workdir={str(workdir)!r}, which process {int(np.argmin(seen))} does not see"
        )


def check_space(workdir: Path, model: keras.Model) -> None:
    """Raises if the disk lacks room for four checkpoints, the model, logs and figures."""
    variables = (*model.variables, *model.optimizer.variables)
    state = 4 * sum(math.prod(v.shape) for v in variables)
    needed = 4 * state + 3 * 4 * model.count_params() + 2**20
    there = (p.stat().st_size for p in (workdir / CHECKPOINTS).glob("ckpt-*/*"))
    free = shutil.disk_usage(workdir).free + sum(there)  # they will be pruned
    if free < needed:
        raise OSError(
            f"workdir must have {needed / 1e6:,.0f} MB of free space. "
            f"Received: workdir={str(workdir)!r} with {free / 1e6:,.0f} MB"
        )


def check_changes(ours: Recipe, workdir: Path, accepted: bool) -> bool:
    """Whether the recipe has changed since the run began. Raises if that is not accepted."""
    if not (workdir / RECIPE).exists():
        return False
    lines = changed_fields(read_recipe(workdir), ours)
    if lines and not accepted:
        raise ValueError(
            f"recipe must be that of the run in {workdir}. To resume with the changes, use "
            "--accept-changes; to resume without them, omit --recipe and --set. "
            f"Received changes: {'; '.join(lines)}"
        )
    return bool(lines)


def read_recipe(workdir: Path) -> Recipe:
    """The recipe of a run: from its file, or if that is damaged from the newest checkpoint."""
    try:
        return Recipe.from_file(workdir / RECIPE)
    except ValueError as error:
        for entry in reversed(listing(workdir / CHECKPOINTS, hashes=True)):
            if entry["whole"]:
                logger.warning("%s; using the one in %s", error, entry["path"])
                path = Path(entry["path"])
                shape = {**SUMMARY, "extra": stated(OBJECT, {"recipe": stated(OBJECT)})}
                fields = read_facts(path, shape)["extra"]["recipe"]
                return Recipe.from_file_fields(path / FACTS, fields)
        raise


def read_results(workdir: Path) -> dict[str, Any] | None:
    """The results of a finished run; None if it is not finished, or must be finished again."""
    if not (workdir / RESULTS).exists():
        return None
    try:
        found = read_document(workdir / RESULTS)
    except ValueError as error:
        logger.warning("%s cannot be read, and is created again: %s", workdir / RESULTS, error)
        return None
    if not (workdir / MODEL).is_file():
        logger.warning("%s is missing, and is created again", workdir / MODEL)
        return None
    return found

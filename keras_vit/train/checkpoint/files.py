"""Checkpoints on disk: written atomically, verified by hash, pruned.

    ckpt-000123/state.safetensors    every array of the state
                state.json           everything else, with a summary at its head
                MANIFEST.json        sizes and SHA-256 of the two, written last
    ckpt-000123.tmp-4711/            being written, or left by a kill; the next run removes it
    ckpt-000124.broken/              failed verification when a run resumed; kept for inspection
    lock                             held by the process that writes here

A folder gets its name by one rename, after everything in it has reached the disk. So no
pointer file is needed, which could be wrong: the highest number that verifies is the newest.

Why not Orbax or tf.train.Checkpoint, which store as safely? Neither knows what a Keras run needs to
resume bit for bit (metrics, callbacks, the position), which is most of the work.
tf.train.Checkpoint has no hashes and needs TensorFlow variables. Orbax writes from many hosts at
once, which this does not, but brings tensorstore and some ten packages, and writes many files per
checkpoint. This is one array file that any safetensors reader opens, running no code.
"""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.atomic import atomic_path, flush_folder, remove
from keras_vit.train.checkpoint.manifest import (
    ARRAYS,
    FACTS,
    MANIFEST,
    STATE,
    BrokenCheckpointError,
    file_record,
    folders,
    manifest_text,
    read_facts,
    read_format,
    step_of,
    verify_checkpoint,
)
from keras_vit.weights.files.arrays import open_arrays
from keras_vit.weights.files.writers import write_safetensors

FORMAT = 1

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins or resumes.

    Attributes:
        epoch: For `initial_epoch`.
        step_in_epoch: Batches of that epoch that are done.
        step: Batches of the whole run that are done. The data starts there.
        stopped: Whether a callback had ended the run. Then call `fit` with `epochs=epoch` at most.
        extra: The `extra` of the `Checkpoint` that saved.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    stopped: bool = False
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was read and verified.

    Attributes:
        path: Its folder.
        facts: What state.json holds.
        arrays: All arrays by name; bfloat16 comes as float32.
        dtypes: Every array's dtype as it was.
    """

    path: Path
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    dtypes: dict[str, str]


def write(
    folder: str | os.PathLike, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> Path:
    """Writes the checkpoint of a step atomically.

    Args:
        folder: Where the checkpoints are.
        step: Batches trained so far.
        arrays: Arrays by name.
        facts: A JSON object.

    Returns:
        The folder of the checkpoint.
    """
    folder = Path(folder)
    target = folder / f"ckpt-{step:06d}"
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        write_safetensors(temporary / ARRAYS, arrays)
        _write_text(temporary / FACTS, json.dumps({"format": FORMAT, **facts}, indent=1))
        files = {name: file_record(temporary / name) for name in (ARRAYS, FACTS)}
        _write_text(temporary / MANIFEST, manifest_text(files))
        os.replace(temporary, target)
        flush_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    return target


def read(path: str | os.PathLike) -> Snapshot:
    """Reads a checkpoint after comparing every byte with the manifest.

    Raises:
        BrokenCheckpointError: A file is missing, cut short, or altered.
    """
    path = Path(path)
    verify_checkpoint(path)
    if (found := read_format(path)) != FORMAT:
        raise ValueError(
            f"A checkpoint must have format {FORMAT}. Received: {str(path)!r}, "
            f"which has format {found}"
        )
    facts = read_facts(path, STATE)
    with open_arrays(path / ARRAYS) as arrays:
        return Snapshot(path, facts, dict(arrays), arrays.dtypes)


def newest(folder: str | os.PathLike) -> tuple[Snapshot | None, list[Path]]:
    """The newest checkpoint that verifies. The log names the files of newer ones that do not.

    It may be called while another process writes: a checkpoint that is pruned meanwhile does not
    count as broken.

    Returns:
        The checkpoint, or None, and the folders of those that are newer but broken.
    """
    broken: list[Path] = []
    while True:
        for path in reversed(folders(folder)):
            if path in broken:
                continue
            try:
                return read(path), broken
            except (BrokenCheckpointError, FileNotFoundError) as error:
                if not path.exists():
                    break  # pruned between the listing and now: there are newer ones
                logger.warning("A checkpoint is skipped: %s", error)
                broken.append(path)
        else:
            return None, broken


def prune(folder: str | os.PathLike, keep: int, best: int | None = None) -> None:
    """Removes all but the newest checkpoints and the best one.

    Args:
        folder: Where the checkpoints are.
        keep: How many of the newest stay.
        best: The step of one that stays as well.
    """
    for path in folders(folder)[:-keep]:
        if step_of(path) != best:
            # A folder that is being removed must not look like a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            os.replace(path, doomed)
            shutil.rmtree(doomed)


def remove_partial(folder: str | os.PathLike) -> None:
    """Removes what killed processes left half-written. The caller must hold the lock."""
    for path in Path(folder).glob("ckpt-*.tmp-*"):
        remove(path)  # this process writes nothing now: see writer.wait_for_writer


def mark_broken(path: Path) -> Path:
    """Renames a broken checkpoint, which keeps it for inspection."""
    number = 0
    while (aside := path.with_name(f"{path.name}.broken{number or ''}")).exists():
        number += 1
    os.replace(path, aside)
    return aside


def _write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

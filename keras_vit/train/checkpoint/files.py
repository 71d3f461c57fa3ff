"""Checkpoints on disk: written whole or not at all, checked by hash, listed, pruned.

    ckpt-000123/state.safetensors    every array of the state
                state.json           all the rest, and a summary at its head
                MANIFEST.json        sizes and SHA-256 of the two, written last
    ckpt-000123.tmp-4711/            being written, or left over by a kill; swept up by the next run
    ckpt-000124.broken/              did not verify when a run was resumed; for you to look at
    lock                             held by the process that writes here

A folder gets its name by one rename, after everything in it has reached the disk. So there is no
pointer file that could point to nothing: the highest number that verifies is the newest.

Why not Orbax or tf.train.Checkpoint, which store as safely? Neither knows what makes a Keras run go
on bit for bit (metrics, callbacks, the position), and that is most of the work. tf.train.Checkpoint
has no hashes and needs TensorFlow variables. Orbax writes from many hosts at once, which this does
not, but brings tensorstore and some ten packages, and a folder of many files a checkpoint. This is
one array file that any safetensors reader opens, running no code.
"""

import dataclasses
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.runs import (
    ARRAYS,
    FACTS,
    LOCK,
    MANIFEST,
    BrokenSnapshotError,
    check,
    check_step,
    folders,
    listing,
    manifest_text,
    measure,
    step_of,
    steps,
)
from keras_vit.weights.arrays import open_arrays, write_safetensors
from keras_vit.weights.atomic import atomic_path, flush_folder

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out there
    fcntl = None

__all__ = [  # with what the library itself reads of checkpoints
    "ARRAYS",
    "FACTS",
    "LOCK",
    "MANIFEST",
    "BrokenSnapshotError",
    "Lock",
    "Snapshot",
    "Start",
    "check",
    "listing",
    "newest",
    "prune",
    "read",
    "set_aside",
    "steps",
    "sweep",
    "write",
]
FORMAT = 1

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins, or goes on.

    Attributes:
        epoch: For `initial_epoch`.
        step_in_epoch: Batches of that epoch that are done.
        step: Batches of the whole run that are done: where the data goes on.
        stopped: Whether a callback had ended the run. Give `fit` no more than `epochs=epoch` then.
        extra: What `Checkpoint` was given as `extra` by the run that saved.
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
    """Writes the checkpoint of a step, which appears whole or not at all.

    Args:
        folder: Where the checkpoints are.
        step: Batches trained so far.
        arrays: Arrays by name.
        facts: What JSON can hold.

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
        files = {name: measure(temporary / name) for name in (ARRAYS, FACTS)}
        _write_text(temporary / MANIFEST, manifest_text(files))
        os.replace(temporary, target)
        flush_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    return target


def read(path: str | os.PathLike) -> Snapshot:
    """Reads a checkpoint, having compared every byte with the manifest.

    Raises:
        BrokenSnapshotError: A file is missing, cut short, or altered.
    """
    path = Path(path)
    check(path)
    facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    if facts["format"] != FORMAT:
        raise ValueError(
            f"A checkpoint must have format {FORMAT}. Received: {str(path)!r}, "
            f"which has format {facts['format']}"
        )
    check_step(path, facts)
    with open_arrays(path / ARRAYS) as arrays:
        return Snapshot(path, facts, dict(arrays), arrays.dtypes)


def newest(folder: str | os.PathLike) -> tuple[Snapshot | None, list[Path]]:
    """The newest checkpoint that verifies. The log names each file that kept one from it.

    It may be called while another process writes: a checkpoint that is taken away meanwhile is no
    broken one.

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
            except (BrokenSnapshotError, FileNotFoundError) as error:
                if not path.exists():
                    break  # pruned between the listing and now: there are newer ones
                logger.warning("A checkpoint is passed over: %s", error)
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


def sweep(folder: str | os.PathLike) -> None:
    """Removes what killed processes left half-written. The caller must hold the lock."""
    for path in Path(folder).glob("ckpt-*.tmp-*"):
        shutil.rmtree(path)  # this process writes nothing now: see background.settle


def _lock(handle: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # `keras-vit info` may have looked just now
        time.sleep(0.1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def set_aside(path: Path) -> Path:
    """Renames a broken checkpoint, so that it is in nobody's way and not lost."""
    number = 0
    while (aside := path.with_name(f"{path.name}.broken{number or ''}")).exists():
        number += 1
    os.replace(path, aside)
    return aside


class Lock:
    """Keeps a second process from writing into a folder. A kill frees it.

    Args:
        folder: The folder, which is made if need be.
    """

    _held: dict[str, int] = {}  # of this process: its own objects do not shut each other out

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(os.path.realpath(folder), LOCK)

    def acquire(self) -> None:
        """Takes it, or raises a `BlockingIOError` that says who has it."""
        if str(self.path) in self._held:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"The folder of the checkpoints must be one that can be written: {error.strerror}",
                str(self.path.parent),
            ) from error
        try:
            _lock(handle)
        except BlockingIOError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(
                error.errno,
                f"One process at a time may write checkpoints here, and {owner} does",
                str(self.path.parent),
            ) from error
        os.ftruncate(handle, 0)
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {moment}".encode())
        self._held[str(self.path)] = handle

    def release(self) -> None:
        """Gives it back; the file stays."""
        handle = self._held.pop(str(self.path), None)
        if handle is not None:
            os.ftruncate(handle, 0)
            os.close(handle)

    @classmethod
    def _forget(cls) -> None:
        """In a forked process, which may live longer than the one that took the lock."""
        for handle in cls._held.values():
            os.close(handle)
        cls._held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=Lock._forget)


def _write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

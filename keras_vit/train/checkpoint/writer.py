"""Writes checkpoints in a thread of its own, one at a time, while training continues."""

import concurrent.futures
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.train.checkpoint import files, manifest, model_state

_running: dict[str, concurrent.futures.Future] = {}  # by folder


def wait_for_writer(folder: str | os.PathLike) -> None:
    """Waits until no writer of this process is writing to a folder.

    A run that ended with an error may still be writing when the same process starts another one.
    """
    if writing := _running.pop(os.path.realpath(folder), None):
        concurrent.futures.wait([writing])


class Writer:
    """Writes checkpoints and prunes their folder.

    An error in the thread, or one set as `failure`, is raised by the next `check`.

    Args:
        folder: Where the checkpoints are.
        keep: How many of the newest checkpoints stay.
    """

    def __init__(self, folder: str | os.PathLike, keep: int):
        self.folder = Path(folder)
        self.keep = keep
        self.failure: BaseException | None = None
        self._executor: concurrent.futures.Executor | None = None
        self._writing: concurrent.futures.Future | None = None

    def write(self, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Starts to write once the previous checkpoint is done, so that one copy exists at most."""
        self.wait()
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._executor.submit(self._write, step, arrays, facts)
        _running[os.path.realpath(self.folder)] = self._writing

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self.failure is None and self._writing is not None and self._writing.done():
            self.failure, self._writing = self._writing.exception(), None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait(self) -> None:
        """Waits for the checkpoint being written, and raises its error."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        self.check()

    def close(self) -> None:
        """Ends the thread once it has written. `check` still raises its error."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def not_a_number(self, what: str, step: int) -> FloatingPointError:
        """The error for a loss or a variable that is infinite or NaN."""
        return FloatingPointError(
            "The loss and the variables of a run must stay finite. Received: "
            f"{what}, found after {step} steps; {self._newest()}. Lower the learning rate, or clip "
            "the gradients"
        )

    def _write(self, step, arrays, facts):
        if path := model_state.find_non_finite(arrays):
            raise self.not_a_number(path, step)
        try:
            files.write(self.folder, step, arrays, facts)
        except OSError as error:
            reason = f"The checkpoint of step {step} cannot be written: {error.strerror}"
            raise OSError(error.errno, f"{reason}; {self._newest()}", str(self.folder)) from error
        best = facts["best"]
        files.prune(self.folder, self.keep, best and best["step"])

    def _newest(self):
        steps = manifest.steps(self.folder)
        return f"the last checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"

"""Writing checkpoints in a thread of its own, one at a time, while the run goes on."""

import concurrent.futures
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import runs
from keras_vit.train.checkpoint import files, model_state

_running: dict[str, concurrent.futures.Future] = {}  # by folder


def wait_for_writer(folder: str | os.PathLike) -> None:
    """Waits until this process writes nothing to a folder.

    A run that ended with an error may still be writing when the same process begins anew.
    """
    if writing := _running.pop(os.path.realpath(folder), None):
        concurrent.futures.wait([writing])


class Writer:
    """Writes checkpoints and prunes their folder.

    What goes wrong, in the thread or elsewhere (`failure`), is raised by the next `check`.

    Args:
        folder: Where the checkpoints are.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: str | os.PathLike, keep: int):
        self.folder = Path(folder)
        self.keep = keep
        self.failure: BaseException | None = None
        self._executor: concurrent.futures.Executor | None = None
        self._writing: concurrent.futures.Future | None = None

    def write(self, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Begins to write, when the one before is done, so that there is one copy at most."""
        self.wait()
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._executor.submit(self._write, step, arrays, facts)
        _running[os.path.realpath(self.folder)] = self._writing

    def check(self) -> None:
        """Raises what went wrong."""
        if self.failure is None and self._writing is not None and self._writing.done():
            self.failure, self._writing = self._writing.exception(), None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait(self) -> None:
        """Waits for what is being written, and raises what went wrong."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        self.check()

    def close(self) -> None:
        """Ends the thread, when it has written. What went wrong can still be asked for."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def not_a_number(self, what: str, step: int) -> FloatingPointError:
        """The error for a loss or a state that is infinite or NaN."""
        return FloatingPointError(
            "The loss and the state of a run must stay numbers. Received: "
            f"{what}, found after {step} steps; {self._there()}. Lower the learning rate, or clip "
            "the gradients"
        )

    def _write(self, step, arrays, facts):
        if path := model_state.non_finite(arrays):
            raise self.not_a_number(path, step)
        try:
            files.write(self.folder, step, arrays, facts)
        except OSError as error:
            reason = f"The checkpoint of step {step} cannot be written: {error.strerror}"
            raise OSError(error.errno, f"{reason}; {self._there()}", str(self.folder)) from error
        best = facts["best"]
        files.prune(self.folder, self.keep, best and best["step"])

    def _there(self):
        steps = runs.steps(self.folder)
        return f"the last checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"

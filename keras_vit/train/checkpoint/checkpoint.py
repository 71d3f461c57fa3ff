"""A killed run resumes where it was, bit for bit: a Keras callback that saves and restores.

    checkpoint = Checkpoint("runs/x/checkpoints")
    start = checkpoint.restore(model)                      # compiled; does nothing in a new folder
    model.fit(
        batches_from(start.step),
        epochs=10, steps_per_epoch=100, initial_epoch=start.epoch,
        callbacks=checkpoint.around([EarlyStopping(), ...]),
    )

Keras' `fit` cannot begin in the middle of an epoch. The first epoch after a restart therefore runs
only its remaining steps, with the metrics it had. A checkpoint holds the state with which the next
step begins: it is taken before the other callbacks' hooks of that step, or after all of their hooks
of an epoch's end.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_vit.lock import Lock
from keras_vit.paths import as_output
from keras_vit.train.checkpoint import files, manifest, model_state, random_state
from keras_vit.train.checkpoint.best_epoch import BestEpoch
from keras_vit.train.checkpoint.callback_state import SavedCallbacks
from keras_vit.train.checkpoint.files import Start
from keras_vit.train.checkpoint.resume import (
    PendingRestore,
    ResumedBar,
    check_same_step,
    restarting_data,
)
from keras_vit.train.checkpoint.sigterm import CODE, Sigterm
from keras_vit.train.checkpoint.writer import Writer, wait_for_writer
from keras_vit.train.distribution.devices import Devices

# What `model.stop_training` is set to at the end of a shortened epoch. Any callback that wants to
# stop the run replaces it.
PAUSE = "the epoch is over"
# In the logs of an epoch whose metrics do not count all of its steps: the first one they count.
COUNTED_FROM = "metrics_from_step"
# How long callbacks in other threads may take to finish a batch that the device has done.
CALLBACK_SECONDS = 30

logger = logging.getLogger(__name__)


class Checkpoint(keras.callbacks.Callback):
    """Saves everything a run needs to resume, and restores it.

    It saves weights, dropout's seeds, optimizers, metrics, the state of the callbacks, the
    position, and the global random generators. The state is copied between two steps and written by
    another thread. An error there, such as a full disk, ends the run at the next batch; the last
    checkpoint stays.

    A loss in the logs that is infinite or NaN ends the run with a `FloatingPointError`. A weight or
    optimizer slot that is does so when it would be saved, and is not saved. At SIGTERM, the run is
    saved before its next step and ends with `SystemExit(143)`, without further evaluation or logs.

    Keras restarts some data with each epoch, such as arrays. A run on such data can only resume at
    the beginning of an epoch, and checkpoints are made when epochs end.

    With several processes, the first one writes and all of them read. On TensorFlow, reading a
    metric needs all processes, so the logs of an interrupted epoch count its second part only, and
    say so: "metrics_from_step" is the first step of the epoch that they count. Weights are not
    affected.

    Args:
        folder: Where the checkpoints go. It should hold nothing else.
        every_minutes: Minutes between two checkpoints, or None.
        save_freq: Steps between two checkpoints, or "epoch", as in Keras' `ModelCheckpoint`. The
            end of the run is always saved.
        keep: How many of the newest checkpoints are kept.
        monitor: A name in the logs, such as "val_accuracy"; the best epoch's checkpoint is kept.
        mode: "min", "max", or "auto" to let the metric decide.
        extra: Any JSON value, such as the recipe; `restore` returns it.
        devices: What `keras_vit.train.scope` yields; None is one process.
    """

    async_safe = True  # Keras need not wait for the device after each batch

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every_minutes: float | None = 10.0,
        save_freq: int | str | None = None,
        keep: int = 2,
        monitor: str | None = None,
        mode: str = "auto",
        extra: Any = None,
        devices: Devices | None = None,
    ):
        super().__init__()
        if not (type(keep) is int and keep > 0):
            raise ValueError(f"keep must be a number of checkpoints above 0. Received: {keep=}")
        number = isinstance(every_minutes, (int, float))
        if every_minutes is not None and not (number and every_minutes > 0):
            raise ValueError(f"every_minutes must be None or above 0. Received: {every_minutes=}")
        if save_freq not in (None, "epoch") and not (type(save_freq) is int and save_freq > 0):
            raise ValueError(
                f'save_freq must be None, "epoch" or a number of steps. Received: {save_freq=}'
            )
        json.dumps(extra)  # raises now, not at the first save
        as_output("folder", folder)
        self.folder = Path(os.path.abspath(folder))  # the program may change its folder
        self.every_minutes = every_minutes
        self.save_freq = save_freq
        self.keep = keep
        self.extra = extra
        self.devices = Devices(["this"]) if devices is None else devices

        self._writer = Writer(self.folder, keep)
        self._lock = Lock(self.folder)
        self._others = SavedCallbacks()
        self._bar: ResumedBar | None = None
        self._opened = False
        self._pending: PendingRestore | None = None
        self._random: tuple[dict, dict] | None = None
        self._counted_from: int | None = None  # the first step in the metrics of this epoch
        self._torch: Any = None  # torch's generator when an epoch began
        self._restarting: str | None = None  # data that Keras restarts with each epoch
        self._best = BestEpoch(monitor, mode)
        self._sigterm = Sigterm()
        self._count = _StepCounter()
        self._warned = False  # about SIGTERM in a process that does not save
        self._saved_step = 0
        self._saved_at = time.monotonic()

    @property
    def interrupted(self) -> bool:
        """Whether SIGTERM has come."""
        return self._sigterm.came

    @property
    def step(self) -> int:
        """Batches of the whole run that have begun."""
        return self._count.step

    def around(self, callbacks: Sequence[keras.callbacks.Callback] = ()) -> list:
        """The callbacks for `fit`: those given, with this one before and after them.

        Their state is saved, for example the best value and the patience of EarlyStopping. Keras'
        History and progress bar are added if they are missing.
        """
        callbacks = list(callbacks)
        if not any(isinstance(c, keras.callbacks.History) for c in callbacks):
            callbacks.append(keras.callbacks.History())
        others = [c for c in callbacks if not isinstance(c, keras.callbacks.ProgbarLogger)]
        self._others = SavedCallbacks(others)
        if len(others) == len(callbacks):
            self._bar = ResumedBar()
            callbacks.append(self._bar)
        return [_Opening(self), *callbacks, self]

    def restore(self, model: keras.Model) -> Start:
        """Restores a model from the newest whole checkpoint; call it before `fit`.

        Checkpoints that fail verification are renamed to `.broken`, and the log names the file.

        Args:
            model: Built and compiled, as it was.

        Returns:
            Where to resume; the beginning if there is no checkpoint.

        Raises:
            ValueError: The model or its optimizer differs from the saved one. Nothing is changed;
                the message lists all differences.
        """
        model_state.build_optimizer(model)
        if self.devices.is_chief:
            self._lock.acquire()
            wait_for_writer(self.folder)
            files.remove_partial(self.folder)
        try:
            return self._restore(model)
        except BaseException:
            self.close()
            raise

    def _restore(self, model):
        snapshot, broken = files.newest(self.folder)
        check_same_step(snapshot, self.folder, self.devices)
        if snapshot is None and broken:
            raise manifest.BrokenCheckpointError(
                f"None of the checkpoints in {self.folder} is whole: "
                f"{', '.join(path.name for path in broken)}. To start over, move them away"
            )
        if snapshot is None:
            return Start()
        model_state.restore_model(model, snapshot)
        if self.devices.is_chief:
            for path in broken:
                files.mark_broken(path)
        facts = snapshot.facts
        start = Start(**facts["position"], extra=facts["extra"])
        self._pending = PendingRestore(start, snapshot)
        self._count.step = self._saved_step = start.step
        self._best.found = facts["best"]
        return start

    # -- before the other callbacks (see _Opening)

    def _open_training(self):
        if self.devices.is_chief:
            self._lock.acquire()
            wait_for_writer(self.folder)
            files.remove_partial(self.folder)
            if any(step > self.step for step in manifest.steps(self.folder)):
                raise FileExistsError(
                    "folder must be new, or restore() must be called before fit. Received: "
                    f"folder={str(self.folder)!r}, which has checkpoints of later steps"
                )
        self._sigterm.watch()
        self._saved_at = time.monotonic()
        self._restarting = restarting_data()
        within = self.every_minutes or type(self.save_freq) is int
        if (self.params["steps"] is None or self._restarting) and within:
            why = (
                f"Keras restarts {self._restarting} with each epoch"
                if self._restarting
                else "the length of an epoch is not known"
            )
            logger.warning(
                "Checkpoints are made at the end of epochs only: %s. For checkpoints at any step, "
                "pass fit batches that can start at any step, and steps_per_epoch",
                why,
            )
        self._opened = True
        if self._pending is not None:
            self._pending.keep(self.model)

    def _open_epoch(self, epoch):
        steps, executed = self.params["steps"], self.model.steps_per_execution
        if executed > 1 and (steps is None or steps % executed):
            raise ValueError(
                f"steps_per_epoch must be a multiple of steps_per_execution={executed}, so that a "
                f"checkpoint knows its step. Received: steps_per_epoch={steps}"
            )
        skipped = 0
        if self._pending is not None:
            self._pending.open_epoch(self.model, epoch, steps)
            skipped = self._pending.start.step_in_epoch
        self._count.open_epoch(epoch, skipped)
        if self._bar is not None:
            self._bar.skipped = skipped

    def _open_batch(self, batch):
        if self._random is not None:  # again: data loaders have drawn since
            random_state.restore_random(*self._random)
        else:
            random_state.restore_torch_generator(self._torch)
        self._random = self._torch = None
        self._check()
        count = self._count
        step, done = count.step_of(batch), count.skipped + batch
        within = self.params["steps"] is not None and not self._restarting  # or only at its end
        if (within and self._is_due(step)) or (self._must_stop() and not self._restarting):
            self._save(count.epoch, done, step, inside=True)
        if self._must_stop():
            self._stop()
        executed = self._model.steps_per_execution
        count.begin(batch, executed)
        if count.skipped and done + executed >= self.params["steps"]:
            self._model.stop_training = self._model.stop_training or PAUSE

    def _close_epoch(self, logs):
        if self._counted_from is not None and logs is not None:
            logs[COUNTED_FROM] = self._counted_from
        self._counted_from = None
        if self._model.stop_training == PAUSE:  # no callback asked to stop
            self._model.stop_training = False
        self._count.close_epoch()
        self._check()

    # -- after the other callbacks

    def on_train_begin(self, logs=None):
        if not self._opened:
            raise ValueError("callbacks must be those that around([...]) returns. Received: others")
        self._opened = False
        self._others.begin()
        if self._pending is not None:
            gone = self._pending.restore(self.model, self._others.callbacks)
            if gone and self.devices.is_chief:  # the other processes lack those that write files
                logger.warning(
                    "The checkpoint has the state of callbacks that are missing now: %s",
                    ", ".join(gone),
                )

    def on_epoch_begin(self, epoch, logs=None):
        if self._pending is not None:
            self._random = self._pending.begin(self.model, self._others.callbacks)
            if self._pending.lacks_metrics:
                self._counted_from = self._count.skipped
                if self.devices.is_chief:
                    logger.warning(
                        "The metrics of epoch %d count its steps from %d on: on several TensorFlow "
                        "workers they are not saved. Weights are not affected",
                        *(epoch + 1, self._counted_from),
                    )
            self._pending = None
        if self._random is None:
            self._torch = random_state.torch_generator()

    # Some backends call this later, in another thread: it must not touch the model.
    def on_train_batch_end(self, batch, logs=None):
        self._check_loss(logs, self._count.step_of(batch) + 1)
        self._count.end(batch)

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        self._check_loss(logs, self.step)
        self._check()
        stopped = bool(self._model.stop_training)
        last = stopped or epoch + 1 >= self.params["epochs"]
        improved = self._best.update(self.model, logs, self.step, last)
        wanted = improved or last or self.save_freq == "epoch" or self._must_stop()
        # After a shortened epoch, Keras may refuse to begin the next one on a PyDataset.
        wanted = wanted or self._count.skipped > 0
        if wanted or self._is_due(self.step):
            self._save(epoch + 1, 0, self.step, stopped=stopped)
        if self._must_stop():
            self._stop()

    def on_train_end(self, logs=None):
        self._check(wait=True)
        self.close()

    # -- saving

    def _is_due(self, step: int) -> bool:
        if step == self._saved_step:
            return False
        if type(self.save_freq) is int and step - self._saved_step >= self.save_freq:
            return True
        minutes = (time.monotonic() - self._saved_at) / 60
        return self.every_minutes is not None and minutes >= self.every_minutes

    def _save(self, epoch, step_in_epoch, step, inside=False, stopped=False):
        """Copies the state and starts to write it."""
        if step == self._saved_step or not self.devices.is_chief:
            return
        self._check(wait=True)
        groups = list(model_state.STATE)
        if inside and self.devices.reads_metrics_alone:
            groups.append(model_state.METRICS)
        arrays = model_state.collect(self.model, groups)  # waits for the device
        if not self._count.wait():  # a callback raised an error, which Keras will show
            logger.warning("No checkpoint at step %d: a callback did not finish its batch", step)
            return
        self._check()
        position = Start(epoch, step_in_epoch, step, stopped)
        facts = {
            "time": time.time(),
            "position": {k: v for k, v in vars(position).items() if k != "extra"},
            "steps_per_epoch": self.params["steps"],
            "inside_epoch": inside,
            "best": self._best.found,
            "versions": model_state.versions(),
            "extra": self.extra,
            "optimizer": model_state.optimizer_name(self.model),
            "callbacks": self._others.pack(arrays),
            "random": random_state.collect_random(arrays),
        }
        self._writer.write(step, arrays, facts)
        self._saved_step, self._saved_at = step, time.monotonic()

    def _check_loss(self, logs, step):
        for name, value in (logs or {}).items():
            # Other metrics may start at infinity.
            if "loss" in name and not math.isfinite(value) and self._writer.failure is None:
                self._writer.failure = self._writer.not_a_number(f"{name}={value}", step)

    def _check(self, wait=False):
        """Raises the error of the writer thread, if there is one."""
        try:
            if wait:
                self._writer.wait()
            self._writer.check()
        except BaseException:
            self.close()
            raise

    # -- the end

    def _must_stop(self) -> bool:
        # Of several processes the first one saves and stops, which ends the others.
        if self.interrupted and not self.devices.is_chief and not self._warned:
            self._warned = True
            logger.warning(
                "SIGTERM: process %d waits for process 0 to save and stop; send SIGTERM to it too",
                self.devices.process,
            )
        return self.interrupted and self.devices.is_chief

    def _stop(self):
        self._check(wait=True)
        self.close()
        saved = f"saved at step {self._saved_step}" if self._saved_step else "nothing was saved"
        logger.warning("SIGTERM: the run ends, %s", saved)
        raise SystemExit(CODE)

    def close(self) -> None:
        """Waits for the writer, then releases the folder and SIGTERM.

        The end of `fit` calls it. Call it yourself after a `fit` that ended with an error.
        """
        self._sigterm.release()
        self._writer.close()
        self._lock.release()


class _Opening(keras.callbacks.Callback):
    """The checkpoint's hooks that run before those of all other callbacks."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def on_train_begin(self, logs=None):
        self.checkpoint._open_training()

    def on_epoch_begin(self, epoch, logs=None):
        self.checkpoint._open_epoch(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        self.checkpoint._open_batch(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.checkpoint._close_epoch(logs)


class _StepCounter:
    """Counts the batches of a whole run, over its epochs, restarts and calls of `fit`.

    Attributes:
        step: Batches that have begun.
        epoch: The current epoch.
        skipped: Batches of that epoch that were done before a restart; Keras does not count them.
    """

    def __init__(self):
        self.step = 0
        self.epoch = 0
        self.skipped = 0
        self._first = 0  # the step of Keras' batch 0
        self._begun = self._ended = self._reached = 0
        self._ends = threading.Condition()

    def open_epoch(self, epoch: int, skipped: int) -> None:
        """Before the first batch of an epoch."""
        self.epoch, self.skipped, self._first = epoch, skipped, self.step
        self._begun = self._ended = self._reached = 0

    def step_of(self, batch: int) -> int:
        """The step of the whole run at which a batch of Keras' count begins."""
        return self._first + batch

    def begin(self, batch: int, executed: int) -> None:
        """Counts one call of the training function, which runs `executed` batches."""
        self.step = self._first + batch + executed
        self._begun += 1

    def end(self, batch: int) -> None:
        """Notes the end of that call; `batch` is its last one. Any thread may call it, late."""
        with self._ends:
            self._ended += 1
            self._reached = max(self._reached, batch + 1)
            self._ends.notify_all()

    def wait(self) -> bool:
        """Waits until all calls have ended. Returns False if one of them does not."""
        with self._ends:
            return self._ends.wait_for(lambda: self._ended >= self._begun, CALLBACK_SECONDS)

    def close_epoch(self) -> None:
        """After the last batch. TensorFlow begins one more to see that there is none."""
        self.step, self._begun = self._first + self._reached, self._ended

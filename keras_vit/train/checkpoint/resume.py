"""What a restart gives back while `fit` begins: callbacks, metrics, random generators.

Keras begins an epoch that was cut off as if it were new, and a run too, and tells the callbacks,
which did before the kill what they do then, such as to lower the learning rate. So it is undone.
"""

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.train.checkpoint import callback_state, model_state, random_state
from keras_vit.train.checkpoint.files import Snapshot, Start
from keras_vit.train.distribution.devices import Devices

# What Keras begins anew with each epoch: always, or without steps_per_epoch.
ANEW = {"ArrayDataAdapter": "arrays", "PyDatasetAdapter": "a PyDataset"}
WITHOUT_STEPS = {
    "TFDatasetAdapter": "a tf.data.Dataset without steps_per_epoch",
    "TorchDataLoaderAdapter": "a DataLoader without steps_per_epoch",
}

logger = logging.getLogger(__name__)


class PendingRestore:
    """The rest of a checkpoint, once model and optimizer have their values.

    Args:
        start: Where the run goes on.
        snapshot: The checkpoint.
    """

    def __init__(self, start: Start, snapshot: Snapshot):
        arrays = snapshot.arrays.items()
        rest = {n: a for n, a in arrays if n.split("/")[0] not in model_state.STATE}
        self.start = start
        self.snapshot = dataclasses.replace(snapshot, arrays=rest)
        self._kept: dict[str, np.ndarray] = {}

    def keep(self, model: keras.Model) -> None:
        """Before other callbacks hear of a beginning."""
        name, steps = _data_of_fit()
        if steps and name in ANEW:
            logger.warning(
                "The run goes on, but not bit for bit: Keras begins %s at the first sample, and "
                "not where the run was. Leave steps_per_epoch out, or give fit batches that can "
                "begin at any step",
                ANEW[name],
            )
        self._kept = model_state.collect(model, model_state.STATE)

    def put_back(
        self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
    ) -> list[str]:
        """After that: model and optimizer are as they were before, and callbacks as they were.

        Returns:
            Classes of callbacks that there are no more.
        """
        model_state.assign(model, model_state.STATE, self._kept)
        self._kept = {}
        facts = self.snapshot.facts["callbacks"]
        return callback_state.restore_callbacks(callbacks, facts, self.snapshot.arrays)

    def open_epoch(self, model: keras.Model, epoch: int, steps: int | None) -> None:
        """Before other callbacks hear of the first epoch.

        Raises:
            ValueError: It is another epoch, or one of another length.
        """
        before, done = self.snapshot.facts["steps_per_epoch"], self.start.step_in_epoch
        if epoch != self.start.epoch:
            raise ValueError(
                f"initial_epoch must be {self.start.epoch}, where the run goes on. "
                f"Received: initial_epoch={epoch}"
            )
        if done and (steps is None or steps <= done or before not in (None, steps)):
            raise ValueError(
                f"steps_per_epoch must be {before or f'more than {done}'}, as in the epoch that is "
                f"gone on with. Received: steps_per_epoch={steps}"
            )
        if done and (anew := restarting_data()):
            raise ValueError(
                f"x must be data that goes on at step {self.start.step}, in an epoch's middle. "
                f"Received: {anew}, which Keras begins anew with each epoch"
            )
        random_state.restore_random(self.snapshot.facts["random"], self.snapshot.arrays)
        self._kept = model_state.collect(model, model_state.STATE)

    def begin(
        self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """After that.

        Returns:
            In the middle of an epoch, what the random generators shall know when its first step
            begins: data loaders draw when they begin, which they did long ago.
        """
        if not self.snapshot.facts["inside_epoch"]:
            return None
        self.put_back(model, callbacks)
        model_state.restore_metrics(model, self.snapshot)
        return self.snapshot.facts["random"], self.snapshot.arrays


class ResumedBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, which after a restart begins in the middle of the epoch."""

    async_safe = True
    skipped = 0

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(self.skipped + batch, logs)


def restarting_data() -> str | None:
    """What `fit` was given, where Keras begins it anew with each epoch, or goes on in no known way.

    Keras tells its callbacks nothing of the data. So this looks for it in the frames of its `fit`,
    which calls them; where it is not there, nothing is known.
    """
    name, steps = _data_of_fit()
    return ANEW.get(name) or (None if steps else WITHOUT_STEPS.get(name))


def _data_of_fit() -> tuple[str, int | None]:
    """The class of Keras' adapter, and steps_per_epoch."""
    frame = inspect.currentframe()
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    iterator = frame.f_locals["epoch_iterator"] if frame is not None else None
    adapter = getattr(iterator, "data_adapter", None)
    return type(adapter).__name__, getattr(iterator, "steps_per_epoch", None)


def check_same_step(snapshot: Snapshot | None, folder: Path, devices: Devices) -> None:
    """Raises in every process where they have not found the same."""
    step = -1 if snapshot is None else snapshot.facts["position"]["step"]
    found = devices.gather(np.asarray(step, "int32"))
    if np.any(found != step):
        names = ["nothing" if one < 0 else f"step {one}" for one in found.tolist()]
        raise ValueError(
            "folder must be one that all processes share. "
            f"Received: folder={str(folder)!r}, where they find {', '.join(names)}"
        )

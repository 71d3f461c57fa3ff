"""Restores the state that the start of `fit` resets: callbacks, metrics, random generators.

Keras starts a resumed run, and an epoch that was cut off, as if they were new. Its hooks reset the
state of callbacks, and callbacks may repeat a change, such as lowering the learning rate. Both are
undone here.
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

# By adapter: the data that Keras restarts with each epoch, always or without steps_per_epoch.
ALWAYS = {"ArrayDataAdapter": "arrays", "PyDatasetAdapter": "a PyDataset"}
WITHOUT_STEPS = {
    "TFDatasetAdapter": "a tf.data.Dataset without steps_per_epoch",
    "TorchDataLoaderAdapter": "a DataLoader without steps_per_epoch",
}

logger = logging.getLogger(__name__)


class PendingRestore:
    """What remains to be restored once model and optimizer have their values.

    Args:
        start: Where the run resumes.
        snapshot: The checkpoint.
    """

    def __init__(self, start: Start, snapshot: Snapshot):
        arrays = snapshot.arrays.items()
        rest = {n: a for n, a in arrays if n.split("/")[0] not in model_state.STATE}
        self.start = start
        self.snapshot = dataclasses.replace(snapshot, arrays=rest)
        self._kept: dict[str, np.ndarray] = {}

    @property
    def lacks_metrics(self) -> bool:
        """Whether the run resumes in the middle of an epoch whose metrics were not saved."""
        saved = model_state.names(model_state.METRICS, self.snapshot.arrays)
        return bool(self.snapshot.facts["inside_epoch"]) and not saved

    def keep(self, model: keras.Model) -> None:
        """Call before the `on_train_begin` of other callbacks."""
        name, steps = _data_of_fit()
        if steps and name in ALWAYS:
            logger.warning(
                "The run resumes, but not bit for bit: Keras starts %s at the first sample, and "
                "not where the run was. Omit steps_per_epoch, or pass fit batches that can "
                "start at any step",
                ALWAYS[name],
            )
        self._kept = model_state.collect(model, model_state.STATE)

    def restore(
        self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
    ) -> list[str]:
        """Call after it: restores model, optimizer and callbacks.

        Returns:
            Classes of saved callbacks that are missing now.
        """
        model_state.assign(model, model_state.STATE, self._kept)
        self._kept = {}
        facts = self.snapshot.facts["callbacks"]
        return callback_state.restore_callbacks(callbacks, facts, self.snapshot.arrays)

    def open_epoch(self, model: keras.Model, epoch: int, steps: int | None) -> None:
        """Call before the `on_epoch_begin` of other callbacks.

        Raises:
            ValueError: The epoch, or its length, is not the saved one.
        """
        before, done = self.snapshot.facts["steps_per_epoch"], self.start.step_in_epoch
        if epoch != self.start.epoch:
            raise ValueError(
                f"initial_epoch must be {self.start.epoch}, where the run resumes. "
                f"Received: initial_epoch={epoch}"
            )
        if done and (steps is None or steps <= done or before not in (None, steps)):
            raise ValueError(
                f"steps_per_epoch must be {before or f'more than {done}'}, as in the epoch that "
                f"resumes. Received: steps_per_epoch={steps}"
            )
        if done and (data := restarting_data()):
            raise ValueError(
                f"x must be data that can start at step {self.start.step}, in the middle of an "
                f"epoch. Received: {data}, which Keras restarts with each epoch"
            )
        random_state.restore_random(self.snapshot.facts["random"], self.snapshot.arrays)
        self._kept = model_state.collect(model, model_state.STATE)

    def begin(
        self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """Call after it.

        Returns:
            In the middle of an epoch, the state of the random generators to restore at its first
            step: data loaders draw from them when they start. Otherwise None.
        """
        if not self.snapshot.facts["inside_epoch"]:
            return None
        self.restore(model, callbacks)
        model_state.restore_metrics(model, self.snapshot)
        return self.snapshot.facts["random"], self.snapshot.arrays


class ResumedBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, which starts in the middle of a resumed epoch."""

    async_safe = True
    skipped = 0

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(self.skipped + batch, logs)


def restarting_data() -> str | None:
    """The kind of data that `fit` was given, if Keras restarts it with each epoch; else None.

    Keras tells its callbacks nothing about the data, so this looks for it in the frames of `fit`,
    which calls them.
    """
    name, steps = _data_of_fit()
    return ALWAYS.get(name) or (None if steps else WITHOUT_STEPS.get(name))


def _data_of_fit() -> tuple[str, int | None]:
    """The class name of Keras' data adapter, and steps_per_epoch."""
    frame = inspect.currentframe()
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    iterator = frame.f_locals["epoch_iterator"] if frame is not None else None
    adapter = getattr(iterator, "data_adapter", None)
    return type(adapter).__name__, getattr(iterator, "steps_per_epoch", None)


def check_same_step(snapshot: Snapshot | None, folder: Path, devices: Devices) -> None:
    """Raises in every process if they found different checkpoints."""
    step = -1 if snapshot is None else snapshot.facts["position"]["step"]
    found = devices.gather(np.asarray(step, "int32"))
    if np.any(found != step):
        names = ["nothing" if one < 0 else f"step {one}" for one in found.tolist()]
        raise ValueError(
            "folder must be shared by all processes. "
            f"Received: folder={str(folder)!r}, where they find {', '.join(names)}"
        )

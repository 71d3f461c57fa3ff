"""Keras callbacks that show and log a running run. Each one is usable alone."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import keras


class Progress(keras.callbacks.Callback):
    """Adds learning rate, images a second and the time left to the logs, so to Keras' own bar.

    Place it before the callbacks that should see them. It also raises a `FloatingPointError` when
    the loss is infinite or NaN.

    Args:
        batch_size: Images in a batch.
        steps: Batches in the whole run.
        learning_rate: A float, or the Keras schedule of the optimizer. (The optimizer itself cannot
            be read in the middle of an epoch: on JAX its variables are elsewhere.)
        interval: Seconds between two updates within an epoch.

    Example:

    >>> progress = Progress(64, 1000, schedule)
    >>> model.fit(batches, epochs=10, steps_per_epoch=100, callbacks=[progress])
    """

    async_safe = True  # Keras need not wait for the device after each batch

    def __init__(
        self,
        batch_size: int,
        steps: int,
        learning_rate: float | Callable = 0.0,
        interval: float = 1.0,
    ):
        super().__init__()
        self.batch_size = batch_size
        self.steps = steps
        self.schedule = learning_rate
        self.interval = interval
        self.step = 0
        self.seconds = 0.0
        self.images_per_second = 0.0
        self._warm = False

    def get_state(self):
        """The state that a checkpoint saves."""
        return {"step": self.step, "seconds": self._elapsed(), "images": self.images_per_second}

    def set_state(self, state):
        """Restores the state of a checkpoint."""
        self.step = self._epoch_step = self._counted_from = state["step"]
        self.images_per_second = state["images"]
        self._began = time.monotonic() - state["seconds"]

    def on_train_begin(self, logs=None):
        self._began = time.monotonic()

    def on_train_end(self, logs=None):
        self.seconds = self._elapsed()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch_step = self._counted_from = self.step
        self._start = self._updated = time.monotonic()
        self._stop = None

    def on_train_batch_begin(self, batch, logs=None):
        if batch and not self._warm:  # the first step compiles, which would distort the rate
            self._start, self._counted_from, self._warm = time.monotonic(), self.step, True
        self.step = self._epoch_step + batch + self.model.steps_per_execution

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if logs is None or not self._warm or now - self._updated < self.interval:
            return
        self._updated = now
        self._add(logs, self._epoch_step + batch + 1, now)

    def on_test_begin(self, logs=None):
        self._stop = self._stop or time.monotonic()  # evaluation is not training

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            self._add(logs, self.step, self._stop or time.monotonic())

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _add(self, logs: dict, step: int, now: float) -> None:
        """Adds our values to the logs, which later callbacks read."""
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(
                f"loss must stay finite. Received: loss={logs['loss']} after {step} steps: lower "
                "optimizer.learning_rate, or set optimizer.global_clipnorm"
            )
        rate = self.schedule(step - 1) if callable(self.schedule) else self.schedule
        logs["learning_rate"] = float(keras.ops.convert_to_numpy(rate))
        if step > self._counted_from:
            seconds = max(now - self._start, 1e-9)
            self.images_per_second = (step - self._counted_from) * self.batch_size / seconds
        logs["images_per_second"] = self.images_per_second
        # With evaluation, which the remaining time includes too.
        logs["minutes_left"] = self._elapsed() / 60 * (self.steps - step) / step


class StopAfter(keras.callbacks.Callback):
    """Ends `fit` after so many batches, even in the middle of an epoch.

    Args:
        steps: Batches.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.done = 0

    # At the beginning of a batch: the hook at its end may run later, in another thread.
    def on_train_batch_begin(self, batch, logs=None):
        self.done += self.model.steps_per_execution
        if self.done >= self.steps:
            self.model.stop_training = True  # after this batch


class EvaluateAverage(keras.callbacks.Callback):
    """Evaluates the optimizer's moving average of the weights, then restores the weights.

    Keras' `SwapEMAWeights` swaps by addition on TensorFlow, which changes the weights by a rounding
    error, and on JAX it leaves both variables with the same array.
    """

    def __init__(self):
        super().__init__()
        self._kept = None

    def on_test_begin(self, logs=None):
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        averages = optimizer._model_variables_moving_average
        if self._kept is not None or not averages:
            return
        # Not by int(), which fails for a variable on several TensorFlow devices.
        if not keras.ops.convert_to_numpy(optimizer.iterations):
            return  # before the first update there is no average
        variables = optimizer._trainable_variables
        self._kept = [(v, keras.ops.copy(v)) for v in variables]
        for variable, average in zip(variables, averages, strict=True):
            variable.assign(keras.ops.copy(average))

    def on_test_end(self, logs=None):
        for variable, value in self._kept or ():
            variable.assign(value)
        self._kept = None


class JsonLines(keras.callbacks.Callback):
    """One line of JSON per epoch: its number from 1, the seconds since the start, and the logs.

    Args:
        path: The file; lines are appended.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        self.path = Path(path)

    def get_state(self):
        """The state that a checkpoint saves."""
        size = self.path.stat().st_size if self.path.exists() else 0
        return {"seconds": time.monotonic() - self._start, "size": size}

    def set_state(self, state):
        """Restores the state of a checkpoint, and removes the lines of later epochs."""
        self._start = time.monotonic() - state["seconds"]
        if self.path.exists():  # and a damaged last line
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n", 0, state["size"]) + 1)

    def on_train_begin(self, logs=None):
        self._start = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        line = {"epoch": epoch + 1, "seconds": round(time.monotonic() - self._start, 3)}
        for name, value in (logs or {}).items():
            if name != "minutes_left":
                line[name] = float(value) if math.isfinite(value) else None  # JSON has no NaN
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint records its length, and is on the disk


class EventFiles(keras.callbacks.Callback):
    """The logs of each epoch for TensorBoard, in train/ and validation/ as by Keras' callback.

    Keras' callback needs the package `tensorboard`, which TensorFlow no longer installs.

    Args:
        folder: Where the two folders are created.
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.folder = Path(folder)
        self._writers = {}

    def on_epoch_end(self, epoch, logs=None):
        parts = {"train": {}, "validation": {}}
        for name, value in (logs or {}).items():
            part = "validation" if name.startswith("val_") else "train"
            parts[part][f"epoch_{name.removeprefix('val_')}"] = value
        for part, values in parts.items():
            if values:
                self._write(part, values, epoch)

    def on_train_end(self, logs=None):
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, part: str, values: dict[str, float], epoch: int) -> None:
        import tensorflow as tf

        if part not in self._writers:
            self._writers[part] = tf.summary.create_file_writer(str(self.folder / part))
        one = tf.compat.v1.Summary.Value
        summary = tf.compat.v1.Summary(
            value=[one(tag=k, simple_value=v) for k, v in values.items()]
        )
        with self._writers[part].as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=epoch)
        self._writers[part].flush()

"""What a run trains on: one device, or several that together compute what one would."""

import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


class Devices:
    """One device, and the parent class of several. `keras_vit.train.scope` makes it.

    A global batch is split into `replicas` equal parts, in order. With several processes, each one
    holds the parts of its own devices.

    Args:
        names: Devices of this process that compute; None is the one that Keras uses.
        replicas: Parts of a global batch, over all processes.
        processes: Number of processes.
        process: Number of this process. Process 0 writes files and prints.
    """

    kind = "one device"

    def __init__(
        self,
        names: Sequence[str] | None = None,
        replicas: int = 1,
        processes: int = 1,
        process: int = 0,
    ):
        self.names = tuple(names or accelerators()[:1] or [cpu()])
        self.replicas = replicas
        self.processes = processes
        self.process = process

    @property
    def reads_metrics_alone(self) -> bool:
        """Whether a process can read metrics by itself, in the middle of an epoch."""
        return True

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and prints."""
        return self.process == 0

    def check_batch(self, batch_size: int, name: str = "batch_size") -> None:
        """Raises if a global batch cannot be split into equal parts."""
        if batch_size % self.replicas:
            raise ValueError(
                f"{name} must be a multiple of the {self.replicas} devices. "
                f"Received: {name}={batch_size}"
            )

    def jit_compile(self, setting: bool | None = None) -> bool | str:
        """The `jit_compile` for `compile`; None chooses for these devices."""
        return jit_compile(setting)

    def optimizer(self, make: Callable[[], keras.optimizers.Optimizer], precision: str) -> Any:
        """The optimizer of `make()`, changed if needed to compute the same as on one device.

        Args:
            make: Makes the optimizer.
            precision: The name of the model's dtype policy: with "mixed_float16" the loss is
                scaled.
        """
        del precision  # `compile` scales the loss by itself
        return make()

    def prepare(self, model: keras.Model) -> None:
        """Call once a model is built and compiled, before `fit`."""

    def distribute(self, dataset: Any) -> Any:
        """Converts a dataset of this process' part of each global batch into the data for `fit`.

        A dataset of whole global batches is passed to `fit` directly.
        """
        return dataset

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The arrays of all processes, of one shape and dtype, stacked by process.

        Every process must call it, and waits for the others.
        """
        return np.asarray(values)[None]

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Context for what one process does alone, such as saving a copy of the model."""
        return contextlib.nullcontext()

    def barrier(self) -> None:
        """Waits until every process has called it."""
        self.gather(np.zeros((), "int32"))

    def __str__(self):
        """For the log: "4 devices (...), data parallel over 2 processes"."""
        names = ", ".join(dict.fromkeys(self.names))
        if self.replicas == 1 and self.processes == 1:
            return names
        several = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{self.kind}, {self.replicas} parts{several}: {names}"


def in_replica() -> bool:
    """Whether this runs in a replica of tf.distribute, which updates weights one by one."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def jit_compile(setting: bool | None = None) -> bool | str:
    """The `jit_compile` for `compile`: the setting, or Keras' choice.

    TensorFlow on a CPU is an exception: XLA is slower there, so it is off.
    """
    if setting is not None:
        return setting
    slower = keras.backend.backend() == "tensorflow" and not accelerators()
    return False if slower else "auto"


def accelerators() -> list[str]:
    """GPUs and TPUs of this machine that Keras' backend sees."""
    name = keras.backend.backend()
    if name == "tensorflow":
        import tensorflow as tf

        return [d.name for d in tf.config.list_physical_devices() if d.device_type != "CPU"]
    if name == "jax":
        import jax

        return [str(d) for d in jax.local_devices() if d.platform != "cpu"]
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def cpu() -> str:
    """The name of the CPU in logs."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"

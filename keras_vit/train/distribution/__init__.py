"""Training on whatever there is: one device, all of a machine's, or several machines.

    with distribution.scope("auto") as devices:
        model = keras_vit.vit_b16(num_classes=10)
        model.compile(...)
        model.fit(batches, epochs=10)      # global batches: each device takes its part

Nothing outside of this package asks tf.distribute, keras.distribution or torch.distributed.
"""

import contextlib
import re
from collections.abc import Iterator

import keras

from keras_vit.train.distribution import cluster
from keras_vit.train.distribution.devices import Devices

__all__ = ["Devices", "scope"]


@contextlib.contextmanager
def scope(devices: str = "auto") -> Iterator[Devices]:
    """Makes what is built, compiled and fitted inside run on these devices.

    Args:
        devices: "auto" is the cluster that the environment names (TF_CONFIG, Slurm, torchrun,
            KERAS_DISTRIBUTION_*), or else all local accelerators, or else the CPU. "one" is one
            device. "all" is all local devices of the best kind, logical CPUs too. "model:4" cuts
            the weights into 4, on JAX, and the batch over what devices are left.

    Yields:
        The `Devices`.
    """
    found = re.fullmatch(r"auto|one|all|model:([1-9]\d*)", devices)
    if not found:
        raise ValueError(
            f'devices must be "auto", "one", "all" or "model:N". Received: devices={devices!r}'
        )
    backend = keras.backend.backend()
    parts = int(found[1]) if found[1] else 1
    if found[1] and backend != "jax":
        raise ValueError(
            f'devices must be "auto", "one" or "all" on {backend}: only JAX cuts weights. '
            f"Received: devices={devices!r}"
        )
    several = None if devices == "one" else cluster.find(backend)
    if backend == "tensorflow":
        from keras_vit.train.distribution import tensorflow as backend_
    elif backend == "jax":
        from keras_vit.train.distribution import jax as backend_
    else:
        from keras_vit.train.distribution import torch as backend_
    with backend_.scope(devices, several, parts) as made:
        yield made

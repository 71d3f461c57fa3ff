"""Training on one device, all devices of a machine, or several machines.

    with keras_vit.train.scope("auto") as devices:
        model = keras_vit.vit_b16(num_classes=10)
        model.compile(...)
        model.fit(batches, epochs=10)      # global batches; each device takes its part

Only this package uses tf.distribute, keras.distribution and torch.distributed.
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
    """Puts everything that is built, compiled and fitted inside on these devices.

    Args:
        devices: "auto" is the cluster that the environment names (TF_CONFIG, Slurm, torchrun,
            KERAS_DISTRIBUTION_*), or else all local accelerators, or else the CPU. "one" is one
            device. "all" is all local devices of the best kind, logical CPUs too. "model:4" splits
            the weights over 4 devices, on JAX, and the batch over the groups of 4.

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
            f'devices must be "auto", "one" or "all" on {backend}: only JAX splits weights. '
            f"Received: devices={devices!r}"
        )
    peers = None if devices == "one" else cluster.find_cluster(backend)
    if backend == "tensorflow":
        from keras_vit.train.distribution import tensorflow_devices as backend_
    elif backend == "jax":
        from keras_vit.train.distribution import jax_devices as backend_
    else:
        from keras_vit.train.distribution import torch_devices as backend_
    with backend_.scope(devices, peers, parts) as made:
        yield made

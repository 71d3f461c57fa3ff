"""Several processes on torch, one per device, started by torchrun or Slurm.

    torchrun --nproc-per-node=4 -m training.train ...

Keras' `fit` on torch supports one process only. Inside the scope its training and test steps are
replaced by these:

- a process predicts its part of the batch, and gets the predictions of the others;
- each process computes the loss and metrics of the whole global batch, whatever they are;
- torch's DistributedDataParallel sums the gradients while they are computed.

So the values that `fit` logs and `evaluate` returns are those of one device, in each process.
`predict` is unchanged: every process predicts all that it is given.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from keras_vit.train.distribution import cluster, torch_steps
from keras_vit.train.distribution.devices import Devices

logger = logging.getLogger(__name__)

_entered = itertools.count()  # scopes of several processes


@contextlib.contextmanager
def scope(devices: str, peers: cluster.Cluster | None, parts: int = 1) -> Iterator[Devices]:
    """Makes Keras train in several processes if the environment names them.

    Args:
        devices: "auto", "one" or "all".
        peers: The processes.
        parts: Always 1: torch does not split weights here.
    """
    del parts
    if peers is None:
        yield _one_device(devices)
        return
    torch_steps.check_keras()
    name, kind = _own_device(peers)
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must not be initialized before the scope, which does it. Received: "
            "it is, by the program or by an outer scope"
        )
    _join(peers, kind)
    made = TorchDevices([name], peers.processes, peers.processes, peers.process)
    ended = False
    try:
        with torch_steps.replaced(made):
            yield made
            made.barrier()  # process 0 serves the others and must not leave before them
        ended = True
    except Exception as error:
        if not _is_of_peer(error):
            raise
        seconds = cluster.seconds(cluster.WAIT)
        raise ConnectionError(
            f"process {peers.process} of {peers.processes} has lost another one, which died, "
            f"ended before it, or did not answer for {seconds} seconds ({cluster.WAIT}). "
            "See its own log"
        ) from error
    finally:
        if ended or kind == "cpu":  # with GPUs it would wait for a process that is gone
            dist.destroy_process_group()


class TorchDevices(Devices):
    """Several processes with one device each."""

    kind = "data parallel"

    def jit_compile(self, setting: bool | None = None) -> bool | str:
        if setting is True:
            raise ValueError(
                "jit_compile must not be True with several processes on torch: "
                "the step compares batches across processes, which torch.compile cannot trace. "
                "Received: jit_compile=True"
            )
        return False

    def distribute(self, dataset: Iterable) -> Any:
        """A loader whose batches are marked as this process' part: `torch_steps.OwnPart`."""
        number = getattr(dataset, "cardinality", lambda: -1)()  # of tf.data; negative if unknown
        if number < 0 and hasattr(dataset, "__len__") and not hasattr(dataset, "cardinality"):
            number = len(dataset)
        return torch_steps.own_parts(dataset, number)

    def gather(self, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values)
        # As bytes, so that any dtype works.
        own = torch.from_numpy(np.frombuffer(values.tobytes(), "uint8").copy())
        parts = [torch.empty_like(own) for _ in range(self.processes)]
        dist.all_gather(parts, own)
        parts = [np.frombuffer(p.numpy().tobytes(), values.dtype) for p in parts]
        return np.stack([part.reshape(values.shape) for part in parts])


# -- processes and devices


def _one_device(devices):
    """The one device that Keras uses. Warns if there are more."""
    count = torch.cuda.device_count()
    kind = keras.ops.convert_to_tensor(0).device.type
    if count > 1 and kind == "cuda":
        how = f"torchrun --nproc-per-node={count} -m ..."
        if devices == "all":
            raise ValueError(
                'devices must not be "all" in one process on torch, which trains on one of the '
                f'{count} GPUs: start it with "{how}". Received: devices="all"'
            )
        if devices == "auto":
            logger.warning('One of %d GPUs trains. For all of them: "%s"', count, how)
    if kind == "cuda":
        return Devices([f"cuda:0 ({torch.cuda.get_device_name()})"])
    return Devices([f"{kind.upper()}:0"])


def _own_device(peers):
    """Name and kind of this process' device, which becomes the current one."""
    device = keras.ops.convert_to_tensor(0).device
    if device.type == "cpu":
        return "CPU:0", "cpu"
    if device.type != "cuda":
        raise ValueError(
            f"KERAS_TORCH_DEVICE must be cuda or cpu with several processes. Received: {device}"
        )
    if os.environ.get("KERAS_TORCH_DEVICE", "cuda") != "cuda":
        raise ValueError(
            "KERAS_TORCH_DEVICE must be cuda, without a number, with several processes: each has "
            f"its own GPU. Received: KERAS_TORCH_DEVICE={os.environ['KERAS_TORCH_DEVICE']}"
        )
    count = torch.cuda.device_count()
    number = 0 if count == 1 else peers.local  # Slurm may show each task only its own GPU
    if number >= count:
        raise ValueError(
            f"there must be a GPU for each process of a machine. Received: {count} GPUs, and this "
            f"is process {number} (from 0) of the machine"
        )
    torch.cuda.set_device(number)  # what Keras calls "cuda"
    return f"cuda:{number} ({torch.cuda.get_device_name(number)})", "cuda"


def _join(peers, kind):
    """Waits for all processes and connects them."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, on this port
    if peers.process == 0 and not served and not _store.cache_info().currsize:
        cluster.check_port(peers)
    seconds, everyone = cluster.seconds(cluster.START), range(peers.processes)
    address = peers.addresses[0]
    try:
        store = _store(address, peers.process == 0 and not served, seconds)
    except dist.DistError as error:
        raise ConnectionError(
            f"process 0, which the others of {peers.processes} meet at {address}, was not there "
            f"within {seconds} seconds ({cluster.START}), says process {peers.process}"
        ) from error
    # A unique name: torchrun restarts all after a failure, and a program may enter twice.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"scope {again} {next(_entered)}", store)
    store.set(f"here {peers.process}", "")
    try:
        store.wait([f"here {n}" for n in everyone], timedelta(seconds=seconds))
    except dist.DistError as error:
        missing = [str(n) for n in everyone if not store.check([f"here {n}"])]
        raise ConnectionError(
            f"process {', '.join(missing)} of {peers.processes} did not come within {seconds} "
            f"seconds ({cluster.START}), says process {peers.process}"
        ) from error
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=peers.process,
        world_size=peers.processes,
        timeout=timedelta(seconds=cluster.seconds(cluster.WAIT)),
    )


@functools.cache  # kept to the end of the program: no process must find a store that is closing
def _store(address, serves, seconds):
    """The key-value store of all processes; process 0 serves it, or torchrun."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        is_master=serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _is_of_peer(error):
    """Whether a collective failed, so that another process is gone or at another operation."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", str(error), re.I)
    )

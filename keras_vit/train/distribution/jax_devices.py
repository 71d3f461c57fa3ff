"""JAX: data parallel, and weights split over devices, with `keras.distribution`.

A worker that dies ends the others: at once if they exchange values with it over the network (CPUs),
otherwise after `DISTRIBUTION_PEER_SECONDS` (30) without a heartbeat. The scope raises a
`ConnectionError` if JAX raises an error; otherwise JAX logs the reason and aborts the process. If
process 0 ends itself (`sys.exit`, as after SIGTERM), the others end with its code. The processes
wait `DISTRIBUTION_START_SECONDS` (300) for all to start, and `DISTRIBUTION_WAIT_SECONDS` (600) for
all to reach the end of the scope. In a step, JAX waits forever for a process that is alive.

After an exception has left a scope, the process ends with exit code 1, even if the program caught
it, unless a later scope was completed.
"""

import atexit
import contextlib
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from keras.src.backend.jax import distribution_lib

from keras_vit.train.distribution import cluster, model_parallel
from keras_vit.train.distribution.devices import Devices
from keras_vit.train.distribution.jax_batches import SplitBatches, feeding

logger = logging.getLogger(__name__)

END_SECONDS = 3600
"""Seconds to wait for the others at the end: they may be writing reports."""
LISTEN_SECONDS = 0.5
"""Seconds between two checks whether process 0 has ended itself."""

# In JAX's errors, of several types, when another process is gone.
_LOST = re.compile(r"gloo|nccl|coordination ?service|heartbeat", re.IGNORECASE)
_failed: list[int] = []  # exit codes of this process, if it failed
_orderly: list[bool] = []  # whether process 0 ended by `sys.exit`
_over = threading.Event()  # this process is ending
_EXIT_KEY = "the code that process 0 ends itself with"
_left = itertools.count()  # numbers the scopes of several processes


@contextlib.contextmanager
def scope(devices: str, peers: cluster.Cluster | None, parts: int) -> Iterator["JaxDevices"]:
    """As `keras_vit.train.scope`; `parts` is the N of "model:N"."""
    if peers:
        _join(peers)
    made = _choose(devices, parts)
    try:
        with _set(made.distribution):
            yield made
            if made.processes > 1:
                _wait_for_all(made)
        _failed.clear()  # an earlier scope's exception has been handled
        _orderly.clear()
    except BaseException as error:
        if made.processes > 1:
            _note(error, made)
        if made.processes > 1 and isinstance(error, Exception) and _LOST.search(str(error)):
            raise ConnectionError(
                f"process {made.process} of {made.processes} lost another one, which has ended or "
                "cannot be reached: see its own log"
            ) from error
        raise


class JaxDevices(Devices):
    """Devices of JAX.

    Args:
        names: See `Devices`; also the next three.
        distribution: Keras' distribution; None is one device.
        parts: Devices over which a copy of the weights is split.
    """

    def __init__(self, names, replicas=1, processes=1, process=0, distribution=None, parts=1):
        super().__init__(names, replicas, processes, process)
        self.distribution = distribution
        self.parts = parts
        if distribution is not None:
            self.kind = "data parallel" if parts == 1 else f"weights in {parts} pieces"

    def jit_compile(self, setting=None):
        if setting is False and self.processes > 1:
            raise ValueError(
                "jit_compile must not be False with several processes: JAX computes together only "
                "what it compiles. Received: jit_compile=False"
            )
        return super().jit_compile(setting)

    def prepare(self, model):
        """Builds the optimizer, checks the layout, and makes `predict` return whole arrays.

        With several processes, `predict` returns the predictions of all in each one.
        """
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        if self.parts > 1:
            model_parallel.check_layouts(model, self.distribution.device_mesh)
        if self.processes > 1:
            _predict_whole(model, self.distribution.device_mesh)

    def distribute(self, dataset):
        if self.processes > 1:
            self.distribution.own.add(dataset)
        return dataset

    def gather(self, values):
        values = np.asarray(values)
        if self.processes == 1:
            return values[None]
        # As bytes, because JAX would convert int64 to int32.
        parts = multihost_utils.process_allgather(values.reshape(-1).view("uint8"))
        return np.asarray(parts).reshape(-1).view(values.dtype).reshape(-1, *values.shape)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Puts what is built inside on the first device of this process alone.

        For what only one process does: copying the model, saving, loading, predicting.
        """
        with _set(None):
            yield

    def __str__(self):
        if self.replicas == 1 and self.parts > 1:
            return f"{self.kind}: {', '.join(dict.fromkeys(self.names))}"
        return super().__str__()


class _DataParallel(SplitBatches, keras.distribution.DataParallel):
    pass


class _ModelParallel(SplitBatches, model_parallel.ModelParallel):
    pass


def _choose(devices, parts):
    local = jax.local_devices()
    processes, process = jax.process_count(), jax.process_index()
    if devices == "one" or (
        parts == 1
        and processes == 1
        and (len(local) == 1 or (devices == "auto" and local[0].platform == "cpu"))
    ):
        return JaxDevices([_name(local[0])])
    if len(local) % parts:
        raise ValueError(
            f'devices must be "model:N" with an N that divides the {len(local)} devices of a '
            f'process. Received: devices="model:{parts}"'
        )
    # The devices of a process are adjacent, so that it holds a row of parts.
    together = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    replicas = len(together) // parts
    if parts == 1:
        axes, shape, kind = [model_parallel.BATCH], (replicas,), _DataParallel
    else:
        axes, shape, kind = (
            [model_parallel.BATCH, model_parallel.MODEL],
            (replicas, parts),
            _ModelParallel,
        )
    mesh = keras.distribution.DeviceMesh(shape, axes, together)
    names = [_name(device) for device in local]
    return JaxDevices(names, replicas, processes, process, kind(mesh), parts)


def _name(device):
    number = device.local_hardware_id  # `id` continues across processes, by thousands
    return f"{device.platform}:{number}" if device.platform == "cpu" else device.device_kind


@contextlib.contextmanager
def _set(distribution):
    former = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        with feeding(distribution):
            yield
    finally:
        keras.distribution.set_distribution(former)


def _predict_whole(model, mesh):
    """Gives every process all predictions; Keras fails to read those of the others."""
    everywhere = jax.sharding.NamedSharding(mesh.backend_mesh, jax.sharding.PartitionSpec())
    step = type(model).predict_step

    def predict_step(state, data):
        outputs, state = step(model, state, data)
        return jax.lax.with_sharding_constraint(outputs, everywhere), state

    model.predict_step = predict_step


# -- several processes


def _join(peers):
    """Connects to the other processes.

    Deviation: not by `keras.distribution.initialize`, which has no timeout argument.
    """
    # Otherwise JAX handles SIGTERM itself, and a process without a handler would survive it.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        if peers.process == 0:
            cluster.check_port(peers)
        start = cluster.seconds(cluster.START)
        waiting = threading.Timer(start, _give_up, [peers, start])
        waiting.daemon = True
        waiting.start()
        try:
            jax.distributed.initialize(
                peers.addresses[0],
                peers.processes,
                peers.process,
                _local_device_ids(peers),
                cluster_detection_method="deactivate",
                initialization_timeout=start,
                heartbeat_timeout_seconds=cluster.seconds(cluster.PEER),
                shutdown_timeout_seconds=END_SECONDS,
            )
        except RuntimeError as error:
            if "before any JAX" not in str(error):
                raise
            raise RuntimeError(
                "the scope of several processes must be entered before JAX is used, by a model "
                f"or keras.ops for example: {error}"
            ) from error
        finally:
            waiting.cancel()
        atexit.register(_leave)
        if peers.process:
            threading.Thread(target=_listen, args=[peers], daemon=True).start()
        distribution_lib.initialize_rng()  # one seed for all processes, unless the user has set one
    if (jax.process_count(), jax.process_index()) != (peers.processes, peers.process):
        raise ValueError(
            f"{peers.named_by} must name the processes that JAX knows: this is process "
            f"{jax.process_index()} of {jax.process_count()}. "
            f"Received: process {peers.process} of {peers.processes}"
        )


def _local_device_ids(peers, environment: Mapping[str, str] = os.environ) -> Any:
    """The GPU of a process that shares its machine with others; None means all GPUs."""
    hosts = [address.rpartition(":")[0] for address in peers.addresses]
    if len(hosts) != peers.processes or hosts.count(hosts[peers.process]) == 1:
        return None
    bound = environment.get("CUDA_VISIBLE_DEVICES", "")
    if bound and "," not in bound:  # Slurm gave each task a GPU of its own
        return None
    return [peers.local]


def _give_up(peers, start):
    """Ends a process whose peers do not start: JAX would abort it, after twice the time."""
    logger.critical(
        "process %d of %d did not meet all others at %s within %d seconds: one was not started, "
        "cannot be reached, or has ended. This process ends",
        *(peers.process, peers.processes, peers.addresses[0], start),
    )
    _failed.append(1)
    _leave()


def _wait_for_all(devices):
    """Raises if a process does not reach the end of the scope: the others would wait for it."""
    seconds, most = cluster.seconds(cluster.PEER), cluster.seconds(cluster.WAIT)
    says = "process %d of %d has waited %d seconds for another one at the end of the scope"
    told = (says, devices.process, devices.processes, seconds)
    waiting = threading.Timer(seconds, logger.warning, told)
    waiting.daemon = True
    waiting.start()
    try:
        global_state.client.wait_at_barrier(f"left scope {next(_left)}", 1000 * most)
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"process {devices.process} of {devices.processes} is at the end of the scope, and "
            f"another one did not reach it within {most} seconds ({cluster.WAIT})"
        ) from error
    finally:
        waiting.cancel()


def _note(error, devices):
    """Records how this process ends."""
    code = (error.code or 0) if isinstance(error, SystemExit) else 1
    _failed.append(code if isinstance(code, int) else 1)
    if isinstance(error, SystemExit) and devices.is_chief:
        _orderly.append(True)


def _listen(peers):
    """Ends this process when process 0 announces its end.

    JAX would abort it, raise, or wait, and the end of a run would look like the death of a process.
    """
    while not _over.wait(LISTEN_SECONDS):
        try:
            code = int(global_state.client.key_value_try_get(_EXIT_KEY))
        except jax.errors.JaxRuntimeError:  # nothing announced yet
            continue
        logger.critical(
            "process 0 ended itself with code %d, and so does process %d of %d",
            *(code, peers.process, peers.processes),
        )
        _failed.insert(0, code)
        _leave()


def _leave():
    """Ends a failed process without JAX's shutdown, which would wait for the others."""
    _over.set()
    if _orderly:
        if _failed[0]:
            global_state.client.key_value_set(_EXIT_KEY, str(_failed[0]))
        # Lets the others end first: JAX aborts them when this process is gone.
        time.sleep(4 * LISTEN_SECONDS)
    if _failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failed[0])
    # JAX itself would wait 300 seconds and then abort all processes.
    global_state.client.wait_at_barrier("ended", END_SECONDS * 1000)

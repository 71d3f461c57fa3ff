"""JAX: data parallel, and weights cut over devices, with `keras.distribution`.

A worker that dies ends the others: at once where they exchange values over the network with it
(CPUs), and wherever they wait after `DISTRIBUTION_PEER_SECONDS` (30) without a sign of life. The
scope raises a `ConnectionError` where JAX raises anything; otherwise JAX writes why, and aborts the
process. Where process 0 ends itself (`sys.exit`, as after SIGTERM), the others end with its code.
One that never comes is waited for `DISTRIBUTION_START_SECONDS` (300), one that does not come to the
end of the scope `DISTRIBUTION_WAIT_SECONDS` (600). In a step JAX waits for ever for one that lives.

After a scope was left by an exception, the process ends with exit code 1, also where the program
has caught it, unless another scope came to its end.
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
from keras_vit.train.distribution.jax_batches import Cut, feeding

logger = logging.getLogger(__name__)

END_SECONDS = 3600
"""How long it does at its own end, for they may have reports to write."""
LISTEN_SECONDS = 0.5
"""How often a process looks whether the first one has ended itself."""

# What JAX says, of several types, when another process is gone.
_LOST = re.compile(r"gloo|nccl|coordination ?service|heartbeat", re.IGNORECASE)
_failed: list[int] = []  # the code that a process which failed ends with
_orderly: list[bool] = []  # that process 0 does so by `sys.exit`
_over = threading.Event()  # this process ends
_WORD = "the code that process 0 ends itself with"
_left = itertools.count()  # scopes of several processes


@contextlib.contextmanager
def scope(devices: str, several: cluster.Cluster | None, parts: int) -> Iterator["JaxDevices"]:
    """As `keras_vit.train.scope`; `parts` is the N of "model:N"."""
    if several:
        _join(several)
    made = _choose(devices, parts)
    try:
        with _set(made.distribution):
            yield made
            if made.processes > 1:
                _wait_for_all(made)
        _failed.clear()  # what an earlier scope raised has been dealt with
        _orderly.clear()
    except BaseException as error:
        if made.processes > 1:
            _note(error, made)
        if made.processes > 1 and isinstance(error, Exception) and _LOST.search(str(error)):
            raise ConnectionError(
                f"process {made.process} of {made.processes} lost another one, which has ended or "
                "cannot be reached: what happened to it is in its own log"
            ) from error
        raise


class JaxDevices(Devices):
    """Devices of JAX.

    Args:
        names: As of `Devices`, and so on.
        distribution: What Keras knows it as; None is one device.
        parts: Devices over which a copy of the weights is cut.
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
                "jit_compile must not be False with several processes: what JAX does not compile "
                "it cannot compute together. Received: jit_compile=False"
            )
        return super().jit_compile(setting)

    def prepare(self, model):
        """Builds the optimiser, checks the layout, and makes `predict` return whole arrays.

        With several processes `predict` returns the predictions of all of them on each one.
        """
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        if self.parts > 1:
            model_parallel.check(model, self.distribution.device_mesh)
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
        # As bytes: JAX would make int64 int32.
        parts = multihost_utils.process_allgather(values.reshape(-1).view("uint8"))
        return np.asarray(parts).reshape(-1).view(values.dtype).reshape(-1, *values.shape)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What is built inside is this process' own, on its first device.

        For what one process does and the others do not: to make a copy of the model, to save and to
        read it, to predict with it.
        """
        with _set(None):
            yield

    def __str__(self):
        if self.replicas == 1 and self.parts > 1:
            return f"{self.kind}: {', '.join(dict.fromkeys(self.names))}"
        return super().__str__()


class _DataParallel(Cut, keras.distribution.DataParallel):
    pass


class _ModelParallel(Cut, model_parallel.ModelParallel):
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
    # The devices of a process stand together: it holds a row of parts.
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
    number = device.local_hardware_id  # `id` counts on over processes, by thousands
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
    """Gives every process all predictions; Keras would fail to read those of the others."""
    everywhere = jax.sharding.NamedSharding(mesh.backend_mesh, jax.sharding.PartitionSpec())
    step = type(model).predict_step

    def predict_step(state, data):
        outputs, state = step(model, state, data)
        return jax.lax.with_sharding_constraint(outputs, everywhere), state

    model.predict_step = predict_step


# -- several processes


def _join(several):
    """Meets the other processes.

    Deviation: not by `keras.distribution.initialize`, which cannot be told how long to wait.
    """
    # JAX would take SIGTERM for itself, and a process that nobody prepared for it would live on.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        if several.process == 0:
            cluster.check_port(several)
        start = cluster.seconds(cluster.START)
        waiting = threading.Timer(start, _give_up, [several, start])
        waiting.daemon = True
        waiting.start()
        try:
            jax.distributed.initialize(
                several.addresses[0],
                several.processes,
                several.process,
                _local_device_ids(several),
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
        if several.process:
            threading.Thread(target=_listen, args=[several], daemon=True).start()
        distribution_lib.initialize_rng()  # one seed for all, unless the user has set one
    if (jax.process_count(), jax.process_index()) != (several.processes, several.process):
        raise ValueError(
            f"{several.named_by} must name the processes that JAX knows: this is process "
            f"{jax.process_index()} of {jax.process_count()}. "
            f"Received: process {several.process} of {several.processes}"
        )


def _local_device_ids(several, environment: Mapping[str, str] = os.environ) -> Any:
    """The one GPU of a process that shares its machine with others; else None, which is all."""
    hosts = [address.rpartition(":")[0] for address in several.addresses]
    if len(hosts) != several.processes or hosts.count(hosts[several.process]) == 1:
        return None
    bound = environment.get("CUDA_VISIBLE_DEVICES", "")
    if bound and "," not in bound:  # Slurm gave each task a GPU of its own
        return None
    return [several.local]


def _give_up(several, start):
    """Ends a process whose peers do not come: JAX would abort it, after twice the time."""
    logger.critical(
        "process %d of %d did not meet all others at %s within %d seconds: one was not started, or "
        "cannot be reached, or ended; this one ends",
        *(several.process, several.processes, several.addresses[0], start),
    )
    _failed.append(1)
    _leave()


def _wait_for_all(devices):
    """Notices a process that did not take part to the end: the others would wait for it."""
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
            f"another one did not come to it within {most} seconds ({cluster.WAIT})"
        ) from error
    finally:
        waiting.cancel()


def _note(error, devices):
    """Notes how this process ends."""
    code = (error.code or 0) if isinstance(error, SystemExit) else 1
    _failed.append(code if isinstance(code, int) else 1)
    if isinstance(error, SystemExit) and devices.is_chief:
        _orderly.append(True)


def _listen(several):
    """Ends this process where process 0 says that it does: JAX would abort it, or raise, or wait.

    Whichever comes first, so that nobody could tell the end of a run from the death of a process.
    """
    while not _over.wait(LISTEN_SECONDS):
        try:
            code = int(global_state.client.key_value_try_get(_WORD))
        except jax.errors.JaxRuntimeError:  # it has not said anything
            continue
        logger.critical(
            "process 0 ended itself with code %d, and so does process %d of %d",
            *(code, several.process, several.processes),
        )
        _failed.insert(0, code)
        _leave()


def _leave():
    """Ends a process that failed without JAX's farewell, for which the others would be waited."""
    _over.set()
    if _orderly:
        if _failed[0]:
            global_state.client.key_value_set(_WORD, str(_failed[0]))
        time.sleep(4 * LISTEN_SECONDS)  # JAX ends the others when this process is gone
    if _failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failed[0])
    # JAX itself would wait 300 seconds, and then abort all of them.
    global_state.client.wait_at_barrier("ended", END_SECONDS * 1000)

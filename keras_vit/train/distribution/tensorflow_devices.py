"""TensorFlow on several devices, with its strategies.

Several local devices are a MirroredStrategy, several processes a MultiWorkerMirroredStrategy.

A process that waits for a dead one gets a `ConnectionError`: at once if it is the first process,
which counts the heartbeats, and otherwise after `DISTRIBUTION_PEER_SECONDS` (30). The processes
wait `DISTRIBUTION_WAIT_SECONDS` (600) for one that is alive but does not reach a step, and
`DISTRIBUTION_START_SECONDS` (300) for one that does not start.
"""

import contextlib
import functools
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context

from keras_vit.train.distribution import cluster, tensorflow_optimizer, tensorflow_trainer_fixes
from keras_vit.train.distribution.devices import Devices

_LATE = "Collective has timed out"


@contextlib.contextmanager
def scope(devices: str, peers: cluster.Cluster | None, parts: int = 1) -> Iterator[Devices]:
    """Puts what is created inside on one device, or under a strategy.

    Args:
        devices: "auto", "one" or "all".
        peers: The processes.
        parts: Always 1: TensorFlow does not split weights.
    """
    del parts
    if peers is None:
        names = _local_devices()
        if devices == "one" or (devices == "auto" and "GPU" not in names[0]):
            names = names[:1]
        if len(names) == 1:
            yield Devices(names)
            return
        made = TensorFlowDevices(_mirrored(tuple(names)))
        with made.active(), tensorflow_trainer_fixes.corrected():
            yield made
        return
    strategy = _join(peers)
    made = TensorFlowDevices(strategy, peers.processes, peers.process)
    try:
        with made.active(), tensorflow_trainer_fixes.corrected():
            _agree_on_a_seed(made)
            yield made
            made.barrier()  # process 0 serves the others and must not leave before them
    except tf.errors.OpError as error:
        if "collective instance" in str(error).lower():
            raise RuntimeError(
                f"process {peers.process} of {peers.processes} did not do what another one "
                "did: each must create, fit, evaluate and save the same, with batches of one "
                "shape. What one process does alone must be inside `with devices.alone():`, or "
                "after the scope"
            ) from error
        if not _is_of_peer(error):
            raise
        name = cluster.WAIT if _LATE in str(error) else cluster.PEER
        what = "did not reach a step within" if name == cluster.WAIT else "was not heard for"
        raise ConnectionError(
            f"process {peers.process} of {peers.processes} has lost another one, which died, "
            f"ended before it, or {what} {cluster.seconds(name)} seconds ({name}). "
            "See its own log"
        ) from error


class TensorFlowDevices(Devices):
    """The devices of a strategy.

    Args:
        strategy: A MirroredStrategy or a MultiWorkerMirroredStrategy.
        processes: Number of processes.
        process: Number of this process.
    """

    def __init__(self, strategy: tf.distribute.Strategy, processes: int = 1, process: int = 0):
        names = [name.partition("/device:")[2] for name in strategy.extended.worker_devices]
        super().__init__(names, strategy.num_replicas_in_sync, processes, process)
        self.kind = "mirrored" if processes == 1 else "multi-worker mirrored"
        self.strategy = strategy
        self._all_gather = tf.function(self._gather_here, autograph=False)
        self._entered = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The scope of the strategy."""
        self._entered.enter_context(self.strategy.scope())
        try:
            with _own_draws():
                yield
        finally:
            self._entered.close()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Leaves the strategy for a while: what is created inside belongs to this process alone.

        Creating a variable under the strategy waits for all processes. One process alone, such as
        the chief that saves a copy, would wait forever.
        """
        self._entered.close()
        try:
            yield
        finally:
            self._entered.enter_context(self.strategy.scope())

    @property
    def reads_metrics_alone(self) -> bool:
        return self.processes == 1  # each worker counts its own part

    def jit_compile(self, setting: bool | None = None) -> bool | str:
        if setting is True:
            # Seen: "Trying to access resource ... located in device" and "Collectives are not yet
            # implemented for CPU devices when compiling with XLA". Keras' "auto" is False as well.
            raise ValueError(
                f"jit_compile must not be True on {self.replicas} devices of TensorFlow: Keras "
                "makes one XLA program of the step of all of them, which cannot use the variables "
                "of several devices, nor talk to other processes. Received: jit_compile=True"
            )
        return False

    def prepare(self, model: keras.Model) -> None:
        here = self.strategy.extended.variable_created_in_scope
        if elsewhere := [v.path for v in model.weights if not here(v.value)]:
            raise ValueError(
                "model must be created in the scope of its devices, which puts its weights on all "
                f"of them. Received: {elsewhere[0]}, created outside"
            )
        if model.steps_per_execution > 1:
            # Seen: "You must feed a value for placeholder tensor 'while/body/...'".
            raise ValueError(
                f"steps_per_execution must be 1 on {self.replicas} devices of TensorFlow: the "
                "loop that Keras puts around the steps fails under a strategy. "
                f"Received: steps_per_execution={model.steps_per_execution}"
            )

    def optimizer(
        self, make: Callable[[], keras.optimizers.Optimizer], precision: str
    ) -> keras.optimizers.Optimizer:
        return tensorflow_optimizer.for_strategy(make(), precision == "mixed_float16")

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        """Converts a `tf.data.Dataset` of this process' part of each global batch for `fit`.

        A dataset of whole global batches is passed to `fit` directly. With several processes each
        of them reads all of it, in the same order if it is shuffled with a seed. (If the dataset
        reads files, TensorFlow distributes files instead of samples, unless its options set
        AutoShardPolicy.DATA.)
        """
        if self.processes == 1:
            return dataset
        if len(self.names) > 1:  # the strategy takes a batch for each device
            dataset = _split(dataset, len(self.names))
        return self.strategy.distribute_datasets_from_function(lambda _: dataset)

    def gather(self, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values)
        if self.processes == 1:
            return values[None]
        # As integers, so that any dtype works: there are no collectives for bytes.
        data = values.tobytes()
        own = np.frombuffer(data + bytes(4 - len(data) % 4), "int32")
        parts = self._all_gather(tf.constant(own)).numpy().reshape(self.replicas, -1)
        parts = parts[:: len(self.names)]
        parts = [np.frombuffer(p.tobytes()[: len(data)], values.dtype) for p in parts]
        return np.stack([part.reshape(values.shape) for part in parts])

    def _gather_here(self, own):
        def on_device():
            # A copy on the device, because the strategy asks where it is.
            return tf.distribute.get_replica_context().all_gather(tf.identity(own), axis=0)

        return self.strategy.experimental_local_results(self.strategy.run(on_device))[0]


def _split(dataset, local):
    """Splits each batch into one for each local device, in order."""

    def cut(part):
        return tf.reshape(part, tf.concat([[local, -1], tf.shape(part)[1:]], 0))

    def cut_all(*batch):
        return tf.nest.map_structure(cut, batch if len(batch) > 1 else batch[0])

    return dataset.map(cut_all).unbatch()


@contextlib.contextmanager
def _own_draws():
    """Gives each replica its own dropout masks: all have the same seeds, but other images.

    The offset is added to the drawn seed, not to the state, which stays equal everywhere.
    """
    generator = keras.random.SeedGenerator
    next_seed = generator.next

    def next_(self, ordered=True):
        seed = next_seed(self, ordered)
        replica = tf.distribute.get_replica_context()
        if replica is None or not tf.distribute.has_strategy():
            return seed
        # The golden ratio keeps the seeds of two replicas apart.
        return seed + 0x9E3779B1 * tf.cast(replica.replica_id_in_sync_group, seed.dtype)

    generator.next = next_
    try:
        yield
    finally:
        generator.next = next_seed


def _local_devices():
    """The logical devices of the best kind."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [f"{device.device_type}:{device.name.rpartition(':')[2]}" for device in found]


@functools.cache  # a second strategy would reuse the numbers of its collectives
def _mirrored(names):
    return tf.distribute.MirroredStrategy(names)


# -- several processes


@functools.cache  # TensorFlow can join a cluster only once
def _join(peers):
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1 and _share_a_machine(peers):
        if peers.local >= len(gpus):
            raise ValueError(
                f"{peers.named_by}: each process of a machine must have its own GPU. "
                f"Received: local process {peers.local}, with {len(gpus)} GPUs"
            )
        gpus = [gpus[peers.local]]
        tf.config.set_visible_devices(gpus, "GPU")
    cluster.check_port(peers)
    _meet(peers)
    jobs = tf.train.ClusterSpec({"worker": list(peers.addresses)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        jobs,
        task_type="worker",
        task_id=peers.process,
        num_accelerators={"GPU": len(gpus)} if gpus else {},
    )
    job = collective_all_reduce_strategy.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=peers.processes
    )
    # As the strategy does it, but with our timeouts, which have no public argument.
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        coordinated_jobs=[job],
        heartbeat_timeout_in_ms=1000 * cluster.seconds(cluster.PEER),
        cluster_register_timeout_in_ms=1000 * cluster.seconds(cluster.START),
    )
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=float(cluster.seconds(cluster.WAIT))
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except tf.errors.OpError as error:
        raise ConnectionError(
            f"process {peers.process} of {peers.processes} could not join the others: "
            f"{error.message}"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"the scope of several processes must be entered before TensorFlow is used: {error}"
        ) from error


def _agree_on_a_seed(devices):
    """Sets one seed in all processes, unless the user has set one, so that all shuffle alike.

    Otherwise some samples would be seen twice and others never.
    """
    ours = context.global_seed()
    seeds = devices.gather(np.array(-1 if ours is None else ours, "int64"))
    given = sorted({*seeds.tolist()} - {-1})
    if len(given) > 1:
        raise ValueError(
            "keras.utils.set_random_seed must be given one seed in every process. "
            f"Received: {', '.join(map(str, given))}"
        )
    drawn = devices.gather(np.array(secrets.randbits(31), "int64"))[0]  # the first process's
    if ours is None:
        keras.utils.set_random_seed(int(given[0] if given else drawn))


def _share_a_machine(peers):
    hosts = [address.rpartition(":")[0] for address in peers.addresses]
    return hosts.count(hosts[peers.process]) > 1


def _meet(peers):
    """Waits until every process serves its port: TensorFlow would wait forever.

    Serves the port of this process meanwhile, and then leaves it to TensorFlow.
    """
    seconds = cluster.seconds(cluster.START)
    until = time.monotonic() + seconds
    port = int(peers.addresses[peers.process].rpartition(":")[2])
    missing = [n for n in range(peers.processes) if n != peers.process]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(
        ("", port), family=family, backlog=peers.processes, dualstack_ipv6=both
    ):
        while missing:
            missing = [n for n in missing if not _answers(peers.addresses[n])]
            if missing and time.monotonic() > until:
                names = ", ".join(f"{n} ({peers.addresses[n]})" for n in missing)
                raise ConnectionError(
                    f"process {peers.process} of {peers.processes} has not met process "
                    f"{names} within {seconds} seconds ({cluster.START})"
                )
            time.sleep(0.2 if missing else 0)


def _answers(address):
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except OSError:
        return False


def _is_of_peer(error):
    """Whether an error of TensorFlow means that another process is gone."""
    signs = ("Collective ops is aborted", "/tensorflow.CoordinationService", "target /job:worker")
    signs += (_LATE,)
    return any(sign in str(error) for sign in signs)

"""The processes that train together, read from the environment and checked before they connect."""

import dataclasses
import errno
import json
import os
import re
import socket
from collections.abc import Mapping

START, PEER, WAIT = (f"DISTRIBUTION_{name}_SECONDS" for name in ("START", "PEER", "WAIT"))
SECONDS = {START: 300, PEER: 30, WAIT: 600}
"""Seconds to wait for all processes at the start, later for one without a heartbeat, and for one
that is alive but does not reach a step, as while it writes a file."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Several processes.

    Args:
        addresses: "host:port" of each; or of the first alone, where the others need none.
        processes: Number of processes.
        process: Number of this process.
        named_by: The variable that named them, for messages.
        local: Number of this process on its own machine.
    """

    addresses: tuple[str, ...]
    processes: int
    process: int
    named_by: str
    local: int = 0


def find_cluster(backend: str, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster that the environment names, or None.

    Read are torchrun's variables on torch, TF_CONFIG on TensorFlow, KERAS_DISTRIBUTION_* on JAX,
    and Slurm's on each of them.

    Args:
        backend: "tensorflow", "jax" or "torch".
        environment: The variables.
    """
    if backend != "torch" and environment.get("TORCHELASTIC_RUN_ID"):
        raise ValueError(
            f"KERAS_BACKEND must be torch under torchrun. Received: KERAS_BACKEND={backend}"
        )
    own = {"tensorflow": _tf_config, "jax": _keras_distribution, "torch": _torchrun}[backend]
    found = own(environment) or _slurm(environment)
    if found is None or found.processes == 1:
        return None
    return found


def seconds(name: str, environment: Mapping[str, str] = os.environ) -> int:
    """A time limit, from the environment or its default: `START`, `PEER` or `WAIT`."""
    text = environment.get(name) or str(SECONDS[name])
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} must be a number of seconds. Received: {name}={text!r}")
    return int(text)


def check_port(cluster: Cluster) -> None:
    """Raises if the port that this process must serve is in use."""
    if cluster.process >= len(cluster.addresses):
        return
    address = cluster.addresses[cluster.process]
    port = int(address.rpartition(":")[2])
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program uses it" if taken else error.strerror
            raise OSError(
                f"{cluster.named_by} must name a free port for process {cluster.process}. "
                f"Received: {address}: {why}"
            ) from error


def _tf_config(environment):
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        task = config.get("task", {})
        workers = {name: list(tasks) for name, tasks in config.get("cluster", {}).items()}
        me = (task.get("type"), task.get("index"))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON, {"cluster": {"worker": ["host:port", ...]}, "task": '
            f'{{"type": "worker", "index": 0}}}}. Received: TF_CONFIG={text!r}'
        ) from error
    if not workers:
        return None
    if unknown := sorted(workers.keys() - {"chief", "worker"}):
        raise ValueError(
            'TF_CONFIG\'s "cluster" must have "worker", and may have "chief". '
            f"Received: {', '.join(unknown)}"
        )
    order = [("chief", i) for i in range(len(workers.get("chief", ())))]
    order += [("worker", i) for i in range(len(workers.get("worker", ())))]
    if me not in order:
        raise ValueError(
            'TF_CONFIG\'s "task" must be a type and an index of its "cluster": '
            f"{', '.join(f'{kind} {i}' for kind, i in order)}. Received: {me[0]} {me[1]}"
        )
    addresses = [workers[kind][i] for kind, i in order]
    return _checked(addresses, len(order), order.index(me), "TF_CONFIG")


def _keras_distribution(environment):
    prefix = "KERAS_DISTRIBUTION_"
    names = [prefix + name for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")]
    if not any(environment.get(name) for name in names):
        return None
    if missing := [name for name in names if not environment.get(name)]:
        raise ValueError(f"{', '.join(missing)} must be set beside the other {prefix} variables")
    addresses = [part.strip() for part in environment[names[0]].split(",")]
    processes, process = (_number(environment, name) for name in names[1:])
    if len(addresses) not in (1, processes):
        raise ValueError(
            f"{names[0]} must name the first process, or each of the {processes}. "
            f"Received: {names[0]}={environment[names[0]]}"
        )
    return _checked(addresses, processes, process, names[2])


def _torchrun(environment):
    if not environment.get("WORLD_SIZE"):
        return None
    names = ("WORLD_SIZE", "RANK", "MASTER_PORT")
    processes, process, port = (_number(environment, name) for name in names)
    host = environment.get("MASTER_ADDR") or "127.0.0.1"
    local = int(environment.get("LOCAL_RANK", 0))
    return _checked([f"{host}:{port}"], processes, process, "RANK", local)


def _slurm(environment):
    """One process per task of a job step, as `srun` starts them."""
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_PROCID" not in environment:
        return None
    names = ("STEP_NUM_TASKS", "PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID")
    processes, process, local, node, job, step = (
        _number(environment, f"SLURM_{name}") for name in names
    )
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(hosts) != len(tasks) or sum(tasks) != processes:
        raise ValueError(
            "SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE must name the "
            f"{processes} tasks. Received: {environment.get('SLURM_STEP_NODELIST')}, "
            f"{environment.get('SLURM_STEP_TASKS_PER_NODE')}"
        )
    # Slurm does not tell the nodes of other tasks; with blocks they follow from the numbers.
    # SLURM_DISTRIBUTION does not help: it may be "cyclic" where that is the same.
    block = ",".join(str(n) for n in range(sum(tasks[:node]), sum(tasks[: node + 1])))
    given = environment.get("SLURM_GTIDS", block)
    if given != block:
        raise ValueError(
            "srun must distribute the tasks in blocks, --distribution=block. Received: tasks "
            f"{given} on node {node}, which are {block} in blocks"
        )
    # Ports of this step, as others may run on the same machines, below the range that Linux uses
    # for outgoing connections.
    first = 20000 + 16 * ((job + 101 * step) % 790)
    addresses = [
        f"{host}:{first + i}" for host, n in zip(hosts, tasks, strict=True) for i in range(n)
    ]
    return _checked(addresses, processes, process, "Slurm", local)


def expand_hosts(text: str) -> list[str]:
    """The names in Slurm's short form: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7, login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # text, ranges, text, ranges, ..., text
        names = [pieces[0]]
        for ranges, after in zip(pieces[1::2], pieces[2::2], strict=True):
            numbers = []
            for one in ranges.split(","):
                low, _, high = one.partition("-")
                if not low.isdecimal() or not (high or low).isdecimal():
                    raise ValueError(f"SLURM_STEP_NODELIST must name hosts. Received: {text!r}")
                width = len(low)
                numbers += [f"{n:0{width}}" for n in range(int(low), int(high or low) + 1)]
            names = [name + number + after for name in names for number in numbers]
        hosts += names
    return hosts


def _tasks_per_node(text):
    """Slurm's "2(x3),1" is [2, 2, 2, 1]."""
    tasks = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(number)] * int(times or 1)
    return tasks


def _number(environment, name):
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number. Received: {name}={text!r}")
    return int(text)


def _checked(addresses, processes, process, named_by, local=None):
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"{named_by}: addresses must be HOST:PORT. Received: {address!r}")
    if twice := sorted({a for a in addresses if addresses.count(a) > 1}):
        raise ValueError(f"{named_by}: addresses must differ. Received twice: {', '.join(twice)}")
    if not 0 <= process < processes:
        raise ValueError(
            f"{named_by} must be from 0 to {processes - 1}, with {processes} processes. "
            f"Received: {process}"
        )
    if local is None:  # count those before it on its machine, if all are named
        hosts = [address.rpartition(":")[0] for address in addresses]
        local = hosts[:process].count(hosts[process]) if len(hosts) == processes else 0
    return Cluster(tuple(addresses), processes, process, named_by, local)

"""What tells processes of this machine that they train together, as docs/distributed.md says."""

import contextlib
import json
import socket

import keras


def environments(number=2, **extra):
    """The variables of each process, with free ports, for the backend of the tests."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in free]
    named = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[keras.backend.backend()]
    return [{**named(addresses, process), **extra} for process in range(number)]


def _tensorflow(addresses, process):
    task = {"type": "worker", "index": process}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def _jax(addresses, process):
    prefix = "KERAS_DISTRIBUTION_"
    return {
        f"{prefix}JOB_ADDRESSES": addresses[0],
        f"{prefix}NUM_PROCESSES": str(len(addresses)),
        f"{prefix}PROCESS_ID": str(process),
    }


def _torch(addresses, process):
    host, _, port = addresses[0].partition(":")
    return {
        "WORLD_SIZE": str(len(addresses)),
        "RANK": str(process),
        "LOCAL_RANK": str(process),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }

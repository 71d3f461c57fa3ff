"""Processes that tests start: their variables, as docs/distributed.md says, and their output."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
# A tiny model compiles for longer than it runs. Without the fusion emitters, which lower fused
# operations by MLIR, XLA compiles in half of the time. A jaxlib without one of the flags ends with
# "Unknown flags in XLA_FLAGS". What one process has compiled, now or in a run before, the others
# read from the cache, which `make clean` removes.
QUICK_JAX = {
    "XLA_FLAGS": (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_use_fusion_emitters=false"
    ),
    "JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def receive_sigterm():
    """Calls the handler of SIGTERM in this process, as Python does when the signal comes.

    The signal itself would end the process of the tests if there were no handler. The tests in
    faults/ send it to processes of their own.
    """
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler), f"SIGTERM has no handler: {handler}"
    handler(signal.SIGTERM, None)


def run_together(commands, environments=({},), timeout=280):
    """Runs one process for each command and its variables, all at the same time.

    Returns:
        The exit code and the output of each process. The code of one that takes longer is None.
    """
    path = f"{TESTS.parent}{os.pathsep}{TESTS}"
    variables = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    children = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(len(commands))]
        try:
            for command, extra, log in zip(commands, environments, logs, strict=True):
                with log.open("wb") as file:  # a pipe could fill up
                    child = subprocess.Popen(
                        command, env={**variables, **extra}, stdout=file, stderr=subprocess.STDOUT
                    )
                children.append(child)
            codes = [_wait(child, timeout) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        said = [log.read_text(errors="replace") for log in logs]
    return list(zip(codes, said, strict=True))


def _wait(child, timeout):
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(timeout)
    return None


def forced_devices(number):
    """The variable that gives JAX several CPU devices."""
    flags = QUICK_JAX["XLA_FLAGS"]
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={number}"}


def environments(number=2, **extra):
    """The variables of each process that trains with others, with free ports."""
    import keras  # not before tests/conftest.py has set the flags

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

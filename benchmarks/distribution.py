"""`python -m benchmarks.distribution`: the overhead of training on several devices.

The CPU's cores are one device, or as many devices as there are cores, or processes of one core. All
of them do the same arithmetic on the same cores with the same global batch, so that any additional
time is the strategy's: communication, copies, waiting. The cases run in turns.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "distribution.json"
WARM_UP = 3
# Backend, name, devices, processes. The others are compared with the first of their backend.
CASES = (
    ("tensorflow", "one device", "one", 1),
    ("tensorflow", "MirroredStrategy", "all", 1),
    ("tensorflow", "MultiWorkerMirroredStrategy", "auto", 2),
    ("jax", "one device", "one", 1),
    ("jax", "DataParallel", "all", 1),
    ("jax", "ModelParallel", "model:2", 1),
    ("jax", "DataParallel, 2 processes", "auto", 2),
    ("torch", "one device", "one", 1),
    ("torch", "DistributedDataParallel, 2 processes", "auto", 2),
)


def main():
    options = _options()
    if options.child:
        measure(json.loads(options.child))
        return
    record = {"machine": machine.describe(), "variant": options.variant, "batch": options.batch}
    times = {case: [] for case in CASES if case[0] in options.backends}
    for turn in range(options.turns):
        for case in times:
            machine.say(f"turn {turn + 1} of {options.turns}: {case[0]}, {case[1]}")
            times[case].append(_run(case, options))
    record["rows"] = _rows(times, options.batch)
    machine.write(options.json, record)
    _report(record)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution", description=__doc__)
    parser.add_argument("--variant", default="vit_s16", help="as of benchmarks.throughput")
    parser.add_argument("--batch", type=positive, default=16, help="global batch")
    parser.add_argument("--steps", type=positive, default=8, help="steps a turn")
    parser.add_argument("--turns", type=positive, default=2)
    parser.add_argument("--backends", nargs="+", default=machine.BACKENDS)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(case, options):
    """The median seconds of a step in one turn, or the reason why there is none."""
    backend, _, devices, processes = case
    job = {"devices": devices, "variant": options.variant, "batch": options.batch}
    job |= {"steps": options.steps, "parts": 2 if devices in ("all", "model:2") else 1}
    command = [sys.executable, "-m", "benchmarks.distribution", "--child", json.dumps(job)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    children = []
    for number, extra in enumerate(_environments(backend, processes)):
        pin = ["taskset", "-c", str(cores[number % len(cores)])] if processes > 1 and cores else []
        environment = {**machine.environment(backend), **extra}
        if backend == "jax" and job["parts"] > 1:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job['parts']}"
        children.append(
            subprocess.Popen(
                [*pin, *command],
                env=environment,
                cwd=machine.ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [child.communicate() for child in children]
    if failed := [err for child, (_, err) in zip(children, said, strict=True) if child.returncode]:
        raise RuntimeError(f"{case} failed:\n{failed[0][-2000:]}")
    return json.loads(said[0][0].splitlines()[-1])


def _environments(backend, processes):
    """The environment variables of each of several processes."""
    if processes == 1:
        return [{}]
    ports = [_free_port() for _ in range(processes)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    if backend == "tensorflow":
        cluster = {"worker": addresses}
        return [
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})}
            for i in range(processes)
        ]
    if backend == "jax":
        prefix = "KERAS_DISTRIBUTION_"
        same = {f"{prefix}JOB_ADDRESSES": addresses[0], f"{prefix}NUM_PROCESSES": str(processes)}
        return [{**same, f"{prefix}PROCESS_ID": str(i)} for i in range(processes)]
    same = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    return [{**same, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def measure(job):
    """Trains in this process, and prints the median of the seconds between its steps."""
    import keras

    if keras.backend.backend() == "tensorflow" and job["parts"] > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * job["parts"]
        )
    from keras_vit.train import distribution

    with distribution.scope(job["devices"]) as devices:
        seconds = _train(job, devices)
        devices.barrier()
    if devices.is_chief:
        print(json.dumps(seconds))


def _train(job, devices):
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_vit
    from benchmarks.worker import variant_config

    config = variant_config(job["variant"])
    keras.utils.set_random_seed(0)
    model = keras_vit.ViT(config)
    model.compile(
        devices.optimizer(lambda: keras.optimizers.AdamW(1e-4), "float32"),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        jit_compile=devices.jit_compile(),
    )
    devices.prepare(model)
    batch = job["batch"] // devices.processes
    rng = np.random.default_rng(0)
    images = rng.random((batch, *config.input_shape), "float32")
    targets = np.eye(config.num_classes, dtype="float32")[
        rng.integers(0, config.num_classes, batch)
    ]
    batches = tf.data.Dataset.from_tensors((images, targets)).repeat()
    marks = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: marks.append((float(logs["loss"]), time.time()))
    )
    model.fit(
        devices.distribute(batches),
        steps_per_epoch=WARM_UP + job["steps"],
        callbacks=[note],
        verbose=0,
        shuffle=False,
    )
    times = [time for _, time in marks[WARM_UP - 1 :]]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def _rows(times, batch):
    rows, base = [], {}
    for (backend, name, _, _), seconds in times.items():
        best = min(seconds)
        base.setdefault(backend, best)
        rows.append(
            {
                "backend": backend,
                "devices": name,
                "seconds_a_step": best,
                "images_per_second": batch / best,
                "of_one_device": best / base[backend],
                "turns": seconds,
            }
        )
    return rows


def _report(record):
    table = Table(
        title=f"{record['variant']}, batch {record['batch']}, training in float32, one machine",
        caption=machine.line(record["machine"]),
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("backend")
    table.add_column("devices", no_wrap=True)
    for title in ("ms a step", "images/s", "time of one device's"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in record["rows"]:
        table.add_row(
            row["backend"],
            row["devices"],
            f"{1000 * row['seconds_a_step']:.0f}",
            f"{row['images_per_second']:.0f}",
            f"{row['of_one_device']:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.memory`: the memory that `keras_vit.train.remat` saves, and its time.

Each side is a fresh process that trains a few steps with dropout and stochastic depth, on one
batch. The peak is what a step after the first adds to the memory of the process before any step:
activations, gradients and the optimizer's state. The first step compiles, and is not measured.
"""

import argparse
import json
import pathlib
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import children, machine
from benchmarks.loading_worker import _peak, _start_peak
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "memory.json"
# The C library returns memory at once, so that what was freed is not counted.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


def main():
    options = _options()
    if options.child:
        with children.answering() as answer:
            return answer(measure(json.loads(options.child)))
    job = {name: getattr(options, name) for name in ("size", "width", "depth", "batch", "steps")}
    record = {**machine.begin(), "job": job, "rows": []}
    for backend in options.backends:
        for on in (False, True):
            machine.say(f"{backend}, {'with' if on else 'without'} remat")
            row = children.ask("memory", {**job, "remat": on}, backend, **RETURNED)
            record["rows"].append({"backend": backend, "remat": on, **row})
    machine.write(options.json, record)
    _report(record)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--size", type=positive, default=384, help="pixels, in patches of 16")
    parser.add_argument("--width", type=positive, default=384)
    parser.add_argument("--depth", type=positive, default=12)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=2, help="measured after the first")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(job):
    """Trains in this process: the peak of memory of a step, and the seconds of the fastest."""
    import keras
    import numpy as np

    import keras_vit

    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(
        image_size=job["size"],
        width=job["width"],
        depth=job["depth"],
        num_heads=max(job["width"] // 64, 1),
        mlp_dim=4 * job["width"],
        num_classes=10,
        dropout=0.1,
        drop_path=0.1,
    )
    model = keras_vit.ViT(config)
    if job["remat"]:
        keras_vit.train.remat(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adamw", loss)
    images = np.zeros((job["batch"], *config.input_shape), "float32")
    labels = np.zeros(job["batch"], "int32")
    before = _start_peak()
    losses = [float(model.train_on_batch(images, labels))]
    _start_peak()
    seconds = []
    for _ in range(job["steps"]):
        begin = time.perf_counter()
        losses.append(float(model.train_on_batch(images, labels)))
        seconds.append(time.perf_counter() - begin)
    return {"peak_mb": (_peak() - before) / 1e6, "seconds": min(seconds), "losses": losses}


def _report(record):
    job = record["job"]
    title = (
        f"{job['depth']} blocks of width {job['width']}, {(job['size'] // 16) ** 2 + 1} tokens, "
        f"batch {job['batch']}, AdamW, dropout and stochastic depth 0.1"
    )
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(("backend", "remat", "peak MB", "of without", "seconds", "x")):
        result.add_column(column, justify="left" if i < 2 else "right")
    for plain, again in zip(record["rows"][::2], record["rows"][1::2], strict=True):
        for row in (plain, again):
            result.add_row(
                row["backend"],
                "yes" if row["remat"] else "no",
                f"{row['peak_mb']:,.0f}",
                f"{row['peak_mb'] / plain['peak_mb']:.0%}",
                f"{row['seconds']:.2f}",
                f"{row['seconds'] / plain['seconds']:.2f}",
            )
    Console(width=120).print(result)
    Console(width=200).print(machine.line(record["machine"]))


if __name__ == "__main__":
    main()

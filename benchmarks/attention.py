"""`python -m benchmarks.attention`: a backend's attention kernel on a CPU, and plain products.

One `MultiHeadAttention` of width 384 with six heads, in turns with the kernel of torch or JAX and
with two matrix products and a softmax, on long sequences in blocks as the layer computes them.
`layers/attention.py` takes the faster one.
"""

import argparse
import os
import pathlib
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "attention.json"
HEADS, SIZE = 6, 64
TOKENS = 8192
"""In a batch, whatever their number in an image."""
LENGTHS = (16, 65, 128, 197, 257, 577, 1025)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, help="tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    os.environ.update(machine.environment(options.backend))  # before Keras is imported
    record = {"machine": machine.describe(), "rows": []}
    result = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("dtype", "", "tokens", "kernel ms", "products ms", "kernel / products"):
        result.add_column(column, justify="left" if len(result.columns) < 2 else "right")
    for policy in ("mixed_bfloat16", "float32"):
        for training in (True, False):
            for length in options.lengths:
                row = measure(policy, training, length, options.seconds)
                record["rows"].append(row)
                kernel, products = row["kernel"], row["products"]
                times = (f"{1e3 * kernel:.1f}", f"{1e3 * products:.1f}", f"{kernel / products:.2f}")
                result.add_row(policy, "train" if training else "infer", str(length), *times)
    machine.write(options.json, record)
    Console(width=120).print(result)
    Console(width=200).print(machine.line(record["machine"]))
    machine.say(f"Written to {options.json}")


def measure(policy, training, length, seconds):
    """The fastest forward pass, and backward pass in training, of both, in seconds."""
    import keras

    from keras_vit.layers.attention import MultiHeadAttention

    dtype = policy.removeprefix("mixed_")
    x = keras.random.normal((max(1, TOKENS // length), length, HEADS * SIZE), dtype=dtype)
    make = _step_of_jax if keras.backend.backend() == "jax" else _step_of_torch
    steps = {}
    for name, kernel in (("kernel", True), ("products", False)):
        layer = MultiHeadAttention(HEADS, SIZE, dtype=policy)
        layer.build(x.shape, x.shape)
        layer._has_kernel = lambda query, training, kernel=kernel: kernel
        steps[name] = make(layer, x, training)
        steps[name]()
    fastest, end = dict.fromkeys(steps, float("inf")), time.perf_counter() + 2 * seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            fastest[name] = min(fastest[name], time.perf_counter() - begin)
    return {"policy": policy, "training": training, "tokens": length, **fastest}


def _step_of_jax(layer, x, training):
    import jax

    def forward(x, weights):
        return layer.stateless_call(weights, [], x, x, training=training)[0]

    def summed(x, weights):
        return forward(x, weights).astype("float32").sum()

    step = jax.jit(jax.grad(summed) if training else forward)
    weights = [variable.value for variable in layer.trainable_variables]
    return lambda: jax.block_until_ready(step(x, weights))


def _step_of_torch(layer, x, training):
    import torch

    def train():
        z = x.detach().requires_grad_()
        layer(z, z, training=True).float().sum().backward()

    def infer():
        with torch.no_grad():
            layer(x, x)

    return train if training else infer


if __name__ == "__main__":
    main()

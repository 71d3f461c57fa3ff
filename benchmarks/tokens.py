"""`python -m benchmarks.tokens`: the time of an image by its number of tokens.

The fused graph (`keras_vit.fused`) on TensorFlow, one image at a time or a batch, with random
weights: other resolutions, patch sizes and model sizes. All are built first, then run in turns. CPU
time excludes waiting for other processes. On one core (`taskset -c 0`) it is the latency of an
otherwise idle core.
"""

import argparse
import time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import flops, machine

# Variant and resolution; the patch is part of the name.
CASES = (
    ("vit_s16", 384),
    ("vit_s16", 288),
    ("vit_s16", 224),
    ("vit_s16", 192),
    ("vit_s16", 160),
    ("vit_s16", 128),
    ("vit_s16", 96),
    ("vit_s8", 224),
    ("vit_s32", 224),
    ("vit_s32", 384),
    ("vit_ti16", 224),
    ("vit_b16", 224),
    ("vit_b32", 224),
)
REFERENCE = ("vit_s16", 224)
COLUMNS = ("variant", "pixels", "tokens", "GFLOP", "ms", "CPU ms", "of S/16 at 224", "GFLOP/s")
MIN_ROUNDS = 3


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokens", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="rounds at most")
    parser.add_argument("--budget", type=float, default=30, help="seconds of rounds")
    options = parser.parse_args()
    described = machine.describe()
    configs = {case: _config(*case) for case in CASES}
    measured = measure(configs, options.dtype, options.batch, options.rounds, options.budget)
    console = Console(width=100)
    console.print(table(configs, measured, f"{options.dtype}, batch {options.batch}"))
    console.print(f"Load of the machine before: {described['load_before']:.1f}")
    console.print(machine.line(described), markup=False, highlight=False)


def measure(configs, dtype, batch, rounds, budget):
    """Seconds and CPU seconds an image for each config, each from its best round."""
    import keras_vit

    rng = np.random.default_rng(0)
    steps, times = {}, {case: [] for case in configs}
    for case, config in configs.items():
        machine.say(f"building {case}")
        predict = keras_vit.fused(keras_vit.ViT(config), dtype)
        images = rng.normal(size=(batch, *config.input_shape)).astype("float32")
        predict(images)  # compiles
        predict(images)
        steps[case] = predict, images
    begin = time.perf_counter()
    for i in range(1, rounds + 1):
        for case, (predict, images) in steps.items():
            start = time.perf_counter(), time.process_time()
            predict(images, batch_size=batch)
            end = time.perf_counter(), time.process_time()
            times[case].append([(b - a) / batch for a, b in zip(start, end, strict=True)])
        if i >= MIN_ROUNDS and (time.perf_counter() - begin) * (i + 1) / i > budget:
            break
    return {case: tuple(map(min, zip(*rows, strict=True))) for case, rows in times.items()}


def table(configs, measured, title):
    """A line for each config; CPU time beside that of `REFERENCE`, where it was measured."""
    result = Table(*COLUMNS, title=f"Fused graph, {title}", box=box.SIMPLE, pad_edge=False)
    for case, config in configs.items():
        work = flops.fused(config) / 1e9
        wall, cpu = measured[case]
        share = f"{cpu / measured[REFERENCE][1]:.2f}" if REFERENCE in measured else ""
        result.add_row(
            case[0],
            str(case[1]),
            str(config.num_tokens),
            f"{work:.1f}",
            f"{wall * 1e3:.1f}",
            f"{cpu * 1e3:.1f}",
            share,
            f"{work / cpu:.0f}",
        )
    return result


def _config(variant, size):
    from benchmarks.worker import variant_config

    return variant_config(variant).replace(image_size=size)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.serving`: SavedModels on the CPU: ours, the plain one and KerasHub's.

Each variant and dtype runs in its own process. It exports every side, loads the exports with
`tf.saved_model.load`, and times the sides in turns at every batch size, from a tensor to a tensor.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import flops, machine

SIDES = ("fused", "plain", "keras_hub")
DTYPES = ("float32", "bfloat16")
RESULTS = machine.ROOT / "benchmarks" / "results" / "serving.json"
COLUMNS = ("variant", "dtype", "batch", "side", "img/s", "median", "x keras_hub", "x plain")
LIMIT = 3600  # seconds until a child counts as hung
MIN_ROUNDS = 2
PRODUCTS = 3  # matrix products a round: they take milliseconds
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the logits' range


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {"machine": machine.describe(), "groups": []}
    if record["machine"]["load_before"] > 0.5:
        machine.say("The machine is busy: expect noise.")
    for variant in options.variants:
        for dtype in options.dtypes:
            job = {"variant": variant, "dtype": dtype, "batches": options.batches}
            job |= {"rounds": options.rounds, "budget": options.budget}
            command = [sys.executable, "-m", "benchmarks.serving", "--child", json.dumps(job)]
            where = {"cwd": machine.ROOT, "env": machine.environment("tensorflow")}
            child = subprocess.run(
                command, **where, stdout=subprocess.PIPE, timeout=LIMIT, check=True
            )
            record["groups"] += json.loads(child.stdout)
            machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table(record["groups"]))
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["vit_b16", "vit_s16"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=20, help="rounds at most")
    parser.add_argument("--budget", type=float, default=60, help="seconds of rounds a batch size")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(groups):
    """A section for each variant, dtype and batch; a line for each side and for the peak."""
    result = Table(title="SavedModels, best round", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate((*COLUMNS, "of peak")):
        result.add_column(column, justify="left" if i < 4 else "right", no_wrap=True)
    for group in groups:
        speeds = {name: row["images_per_second"] for name, row in group["sides"].items()}
        where = (group["variant"], group["dtype"], str(group["batch"]))
        for name, row in group["sides"].items():
            ratios = [
                f"{speeds[name] / speeds[other]:.2f}" if other in speeds else ""
                for other in ("keras_hub", "plain")
            ]
            median = f"{row['images_per_second_median']:.2f}"
            peak = f"{row['share_of_peak']:.0%}"
            result.add_row(*where, name, f"{speeds[name]:.2f}", median, *ratios, peak)
            where = ("", "", "")
        top = group["peak_flops_per_second"] / group["flops_per_image"]
        result.add_row("", "", "", "(matrix product)", f"{top:.2f}", "", "", "", "100%")
        result.add_section()
    return result


def _child(job):
    from benchmarks.worker import variant_config

    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    with result, tempfile.TemporaryDirectory() as folder:
        config = variant_config(job["variant"])
        sides = export_all(config, job["dtype"], pathlib.Path(folder))
        groups = []
        for batch in job["batches"]:
            group = measure(sides, config, job["dtype"], batch, job["rounds"], job["budget"])
            groups.append({"variant": job["variant"], "dtype": job["dtype"], **group})
        json.dump(groups, result)


def export_all(config, dtype, folder, sides=SIDES):
    """Every side's SavedModel, loaded again: functions from images to logits."""
    import keras
    import tensorflow as tf

    functions = {}
    for side in sides:
        path = str(folder / side)
        _export(side, config, dtype, path)
        keras.backend.clear_session()
        gc.collect()
        functions[side] = _function(tf.saved_model.load(f"{path}/1" if side == "fused" else path))
    _compare(functions, config, dtype)
    return functions


def _export(side, config, dtype, path):
    import keras_vit
    from benchmarks import contenders

    policy = "float32" if dtype == "float32" or side == "fused" else "mixed_bfloat16"
    if side == "keras_hub":
        contenders.build("keras_hub", config, policy).export(path, verbose=False)
        return
    model = _filled(keras_vit.ViT(config, dtype=policy))
    if side == "plain":
        model.export(path, verbose=False)
        return
    keras_vit.export_saved_model(model, path, dtype=dtype, version=1)


def _filled(model):
    """Replaces the zeros of a new model, so that no graph can omit a sum."""
    rng = np.random.default_rng(0)
    for v in model.weights:
        if v.path.endswith(("bias", "beta", "tokens")) or v.path.startswith("head"):
            v.assign(0.02 * rng.standard_normal(v.shape, "float32"))
        elif not v.path.endswith("gamma"):
            v.assign(rng.standard_normal(v.shape, "float32") / np.sqrt(v.shape[0]))
    return model


def _function(loaded):
    """The serving signature, with its logits for output; it holds what was loaded."""
    signature = loaded.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]

    def call(images, _keep=loaded):
        outputs = signature(**{name: images})
        return outputs.get("logits", next(iter(outputs.values())))

    return call


def _compare(functions, config, dtype):
    """Checks that the fused model agrees with the plain one, so that speeds can be compared."""
    if not {"fused", "plain"} <= set(functions):
        return
    images = _images(config, 2)
    ours, plain = (functions[side](images).numpy() for side in ("fused", "plain"))
    error = float(np.abs(ours - plain).max() / np.ptp(plain))
    machine.say(f"fused and plain differ by {error:.1e} of the logits' range")
    if not error < TOLERANCE[dtype]:
        raise RuntimeError(
            f"fused and plain are not the same model: {error:.1e} of the logits' range"
        )


def _images(config, batch):
    import tensorflow as tf

    rng = np.random.default_rng(1)
    return tf.constant(rng.standard_normal((batch, *config.input_shape), "float32"))


def measure(sides, config, dtype, batch, rounds, budget):
    """Every side in turns, and the matrix product between them."""
    from benchmarks import peak

    images = _images(config, batch)
    product, product_flops = peak.matrix_product(config, batch, dtype)
    for function in (*sides.values(), *sides.values()):
        function(images)
    product()
    times, products = {name: [] for name in sides}, []
    begin = time.perf_counter()
    for i in range(rounds):
        for name, function in sides.items():
            times[name].append(machine.seconds(lambda f=function: f(images).numpy()))
        products += [machine.seconds(product) for _ in range(PRODUCTS)]
        if i + 1 >= MIN_ROUNDS and time.perf_counter() - begin > budget:
            break
    top = product_flops / min(products)
    done = {
        name: flops.fused(config) if name == "fused" else flops.forward(config) for name in sides
    }
    return {
        "batch": batch,
        "rounds": len(products) // PRODUCTS,
        "flops_per_image": flops.forward(config),
        "peak_flops_per_second": top,
        "sides": {
            name: {
                "images_per_second": batch / min(seconds),
                "images_per_second_median": batch / statistics.median(seconds),
                "flops_per_image": done[name],
                "share_of_peak": batch * done[name] / min(seconds) / top,
            }
            for name, seconds in times.items()
        },
    }


if __name__ == "__main__":
    main()

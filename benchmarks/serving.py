"""`python -m benchmarks.serving`: SavedModels on the CPU: ours, the plain one and KerasHub's.

Each variant and dtype runs in its own process. It exports every side, loads the exports with
`tf.saved_model.load`, and times the sides in turns at every batch size, from a tensor to a tensor.
"""

import argparse
import gc
import json
import pathlib
import tempfile

import numpy as np
from rich import box
from rich.table import Table

from benchmarks import children, flops, machine
from benchmarks.turns import in_turns

SIDES = ("fused", "plain", "keras_hub")
DTYPES = ("float32", "bfloat16")
RESULTS = machine.ROOT / "benchmarks" / "results" / "serving.json"
COLUMNS = ("variant", "dtype", "batch", "side", "img/s", "median", "x keras_hub", "x plain")
PRODUCTS = ("product 1", "product 2", "product 3")  # a round: they take milliseconds
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the logits' range


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "groups": []}
    for variant in options.variants:
        for dtype in options.dtypes:
            job = {"variant": variant, "dtype": dtype, "batches": options.batches}
            job |= {"rounds": options.rounds, "budget": options.budget}
            record["groups"] += children.ask("serving", job, "tensorflow")
            machine.write(options.json, record)
    machine.show(table(record["groups"]), record)


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

    with children.answering() as answer, tempfile.TemporaryDirectory() as folder:
        config = variant_config(job["variant"])
        sides = export_all(config, job["dtype"], pathlib.Path(folder))
        groups = []
        for batch in job["batches"]:
            group = measure(sides, config, job["dtype"], batch, job["rounds"], job["budget"])
            groups.append({"variant": job["variant"], "dtype": job["dtype"], **group})
        answer(groups)


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
    from benchmarks import contenders, worker

    policy = "float32" if dtype == "float32" or side == "fused" else "mixed_bfloat16"
    if side == "keras_hub":
        contenders.build("keras_hub", config, policy).export(path, verbose=False)
        return
    model = worker.filled(keras_vit.ViT(config, dtype=policy))
    if side == "plain":
        model.export(path, verbose=False)
        return
    keras_vit.export_saved_model(model, path, dtype=dtype, version=1)


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

    from benchmarks.worker import random_images

    return tf.constant(random_images(config, batch))


def measure(sides, config, dtype, batch, rounds, budget):
    """Every side in turns, and the matrix product between them."""
    from benchmarks import peak

    images = _images(config, batch)
    product, product_flops = peak.matrix_product(config, batch, dtype)
    calls = {name: lambda f=function: f(images).numpy() for name, function in sides.items()}
    calls |= dict.fromkeys(PRODUCTS, product)
    found = in_turns(calls, rounds, budget)
    top = product_flops / min(found.pop(name)["best_s"] for name in PRODUCTS)
    rows = {}
    for name, times in found.items():
        done = flops.fused(config) if name == "fused" else flops.forward(config)
        rows[name] = {
            "images_per_second": batch / times["best_s"],
            "images_per_second_median": batch / times["median_s"],
            "flops_per_image": done,
            "share_of_peak": batch * done / times["best_s"] / top,
        }
    return {
        "batch": batch,
        "rounds": times["rounds"],
        "flops_per_image": flops.forward(config),
        "peak_flops_per_second": top,
        "sides": rows,
    }


if __name__ == "__main__":
    main()

"""`python -m benchmarks.resolution`: what larger pictures cost, in time and memory.

Each figure is from a fresh process: seconds of the processor for a picture, the best of a few
rounds, and the memory that a forward pass or a training step adds. "all at once" is the path that
holds the weights of all pairs of tokens, "its own attention" the function of JAX, which does too.
Our layer takes blocks of queries there (`keras_vit/layers/attention_blocks.py`).
"""

import argparse
import json
import pathlib
import time

from rich.table import Table

from benchmarks import children, machine
from benchmarks.loading_worker import _peak, _start_peak
from benchmarks.memory import RETURNED
from benchmarks.throughput import MODES, positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "resolution.json"
SIZES = (224, 384, 512, 768, 1024)
AT_ONCE = {"tensorflow": "tensorflow, all at once", "jax": "jax, its own attention"}
"""The backends whose other path is measured too."""


def main():
    options = _options()
    if options.child:
        with children.answering() as answer:
            return answer(measure(json.loads(options.child)))
    job = {name: getattr(options, name) for name in ("width", "depth", "batch", "rounds", "dtype")}
    record = {**machine.begin(), "job": job, "rows": []}
    for mode in options.modes:
        for size in options.sizes:
            for backend in options.backends:
                for at_once in (False, True) if backend in AT_ONCE else (False,):
                    side = AT_ONCE[backend] if at_once else backend
                    machine.say(f"{side}, {size} px, {mode}")
                    asked = {**job, "mode": mode, "size": size, "at_once": at_once}
                    row = children.ask("resolution", asked, backend, **RETURNED)
                    record["rows"].append({"side": side, "mode": mode, "size": size, **row})
                    machine.write(options.json, record)
    machine.show(table(record["rows"]), record)
    if options.plot:
        plot(record["rows"], options.plot)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resolution", description=__doc__)
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--sizes", nargs="+", type=positive, default=SIZES, help="pixels a side")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--depth", type=positive, default=2, help="blocks; all cost the same")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--plot", type=pathlib.Path, help="a .png or .svg file to draw")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(job):
    """Seconds of the processor for one picture, and megabytes that the work adds at most."""
    import keras
    import numpy as np

    import keras_vit
    from keras_vit.layers import attention

    if job["at_once"]:
        attention.LONG = {}
        if keras.backend.backend() == "jax":
            attention.MultiHeadAttention._has_kernel = lambda *args: True
    config = keras_vit.ViTConfig(
        image_size=job["size"],
        width=job["width"],
        depth=job["depth"],
        num_heads=max(job["width"] // 64, 1),
        mlp_dim=4 * job["width"],
        num_classes=10,
    )
    model = keras_vit.ViT(config, dtype=job["dtype"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    images = np.zeros((job["batch"], *config.input_shape), "float32")
    labels = np.zeros(job["batch"], "int32")

    def run():
        if job["mode"] == "train":
            model.train_on_batch(images, labels)
        else:
            model.predict_on_batch(images)

    before = _start_peak()
    run()  # compiles
    _start_peak()
    seconds = []
    for _ in range(job["rounds"]):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return {"seconds": min(seconds) / job["batch"], "peak_mb": (_peak() - before) / 1e6}


def table(rows):
    """A line for each size and mode, a pair of columns for each side."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    result = Table("", *(f"{side}: s, MB" for side in sides), title="one picture")
    for mode, size in dict.fromkeys((row["mode"], row["size"]) for row in rows):
        found = {r["side"]: r for r in rows if (r["mode"], r["size"]) == (mode, size)}
        cells = (f"{found[s]['seconds']:.3g}, {found[s]['peak_mb']:,.0f}" for s in sides)
        result.add_row(f"{mode}, {size} px", *cells)
    return result


def plot(rows, path):
    """Time and memory over the side of the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    axes = figure.subplots(len(modes), 2, squeeze=False, sharex=True)
    for mode, pair in zip(modes, axes, strict=True):
        for side in dict.fromkeys(row["side"] for row in rows):
            chosen = [row for row in rows if (row["side"], row["mode"]) == (side, mode)]
            sizes = [row["size"] for row in chosen]
            for axis, name in zip(pair, ("seconds", "peak_mb"), strict=True):
                axis.plot(sizes, [row[name] for row in chosen], "o-", label=side)
        for axis, unit in zip(pair, ("seconds of the processor", "MB"), strict=True):
            axis.set(title=f"{mode}: {unit}", xlabel="pixels a side", yscale="log")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.bulk`: images a second of `keras_vit.bulk`, beside decoding and the model.

2,000 JPEGs of 500x375 pixels. Rounds of five things take turns in one process: decoding alone, the
model alone on decoded images, both one after the other as a simple loop does, and `stream`, which
runs both at once. The aim is 85 % of the slower one.

On a CPU the model and the threads that decode share the cores, and then no overlap can reach the
speed of the slower one: with all cores busy in both, the bound is 1 / (1 / decode + 1 / model). The
contender "device" is a model that takes the time of another device and no core: it only waits.
Processor time says what the stream costs beside decoding and the model, whatever else is running.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.pipeline import make_jpegs
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "bulk.json"
AIM = 0.85
DIFFERENT = 40
"""JPEGs that are made; the files are copies of them."""
DEVICE = "device"


def main():
    options = _options()
    os.environ.update(machine.environment(options.backend))  # before Keras is imported
    record = {"machine": machine.describe(), "images": options.images, "rounds": options.rounds}
    record["batch"], record["threads"] = options.batch, options.threads
    record["rows"] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_jpegs(pathlib.Path(folder), options.images)
        for name in options.models:
            machine.say(f"{name}: {options.rounds} rounds")
            record["rows"].append(measure(name, files, options))
            machine.write(options.json, record)
    record["rows_written_a_cpu_second"] = writing()
    machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(record))
    for name, speed in record["rows_written_a_cpu_second"].items():
        console.print(f"{name}: {speed:,.0f} rows written a second of processor time")
    console.print(machine.line(record["machine"]), markup=False, highlight=False)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bulk", description=__doc__)
    parser.add_argument("--backend", choices=machine.BACKENDS, default="tensorflow")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[DEVICE, "vit_ti16"],
        help=f"{DEVICE!r}, or names of keras_vit.list_variants(), as SavedModels",
    )
    parser.add_argument("--images", type=positive, default=2000)
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--threads", type=positive, help="that decode; defaults to the cores")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def write_jpegs(folder, count):
    """Files of 500x375 pixels; returns their paths."""
    jpegs = make_jpegs(DIFFERENT)
    files = [folder / f"{i:05}.jpg" for i in range(count)]
    for i, file in enumerate(files):
        file.write_bytes(jpegs[i % len(jpegs)])
    return [str(file) for file in files]


def measure(name, files, options):
    """Rounds of each way in turns: images a second, and the bounds of the overlap."""
    import numpy as np

    from keras_vit.bulk.stream import _in_order, stream
    from keras_vit.images import read_pixels

    threads = options.threads or len(os.sched_getaffinity(0))
    speeds = {}

    def decode(count=None):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(threads) as pool:
            for _ in _in_order(pool, lambda file: read_pixels(file, config), files[:count], 64):
                pass

    def run_model():
        for _ in range(0, len(files), options.batch):
            opened.probabilities(pixels)

    def one_after_another():
        for start in range(0, len(files), options.batch):
            part = files[start : start + options.batch]
            opened.probabilities(np.stack([read_pixels(file, config) for file in part]))

    def both():
        for _ in stream(opened, files, batch_size=options.batch, workers=options.threads):
            pass

    opened, config = (None, _config()) if name == DEVICE else _saved_model(name)
    if name == DEVICE:
        decode(200)
        opened = waiting_runtime(config, machine.seconds(lambda: decode(400)) / 400)
    pixels = np.stack([read_pixels(file, config) for file in files[: options.batch]])
    opened.probabilities(pixels)  # warms up
    ways = {
        "decode": decode,
        "model": run_model,
        "one after another": one_after_another,
        "stream": both,
    }
    seconds, cpu = {way: [] for way in ways}, {way: [] for way in ways}
    for i in range(options.rounds):
        for way, function in ways.items():
            begin = time.process_time()
            seconds[way].append(machine.seconds(function))
            cpu[way].append(time.process_time() - begin)
            machine.say(f"  round {i + 1}, {way}: {len(files) / seconds[way][-1]:.1f} images/s")
    speeds = {way: len(files) / min(found) for way, found in seconds.items()}
    each = [
        one["stream"] / min(one["decode"], one["model"])
        for one in (
            {way: len(files) / found[i] for way, found in seconds.items()}
            for i in range(options.rounds)
        )
    ]
    slower = min(speeds["decode"], speeds["model"])
    return {
        "model": name,
        "images_per_second": speeds,
        "cpu_ms_an_image": {way: 1e3 * min(found) / len(files) for way, found in cpu.items()},
        "of_slower": speeds["stream"] / slower,
        "of_slower_by_round": each,
        "of_slower_median": statistics.median(each),
        "of_bound_of_shared_cores": speeds["stream"] * (1 / speeds["decode"] + 1 / speeds["model"]),
        "of_one_after_another": speeds["stream"] / speeds["one after another"],
    }


def writing(count=20_480, width=384, classes=1000):
    """Rows a second of processor time that the one process of a run writes, parts and file."""
    import numpy as np

    from keras_vit.bulk import Row
    from keras_vit.bulk.formats import format_for
    from keras_vit.bulk.parts import Parts

    speeds = {}
    for name, wanted, numbers in (
        ("features.npy", "features", width),
        ("features.parquet", "features", width),
        ("classes.parquet", "probabilities", classes),
        ("classes.jsonl", "probabilities", classes),
    ):
        values = np.random.default_rng(0).random((256, numbers), "float32")
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / name
            parts = Parts(out, {}, format_for(out, wanted, None, 5), count)
            begin = time.process_time()
            with parts.opened():
                for start in range(0, count, 256):
                    parts.add([Row(f"{start + i:08}.jpg", values[i]) for i in range(256)])
                parts.finish()
            speeds[name] = count / (time.process_time() - begin)
    return speeds


def waiting_runtime(config, seconds_an_image):
    """A model on a device of its own, which takes so long and no core of this machine."""
    import numpy as np

    from keras_vit.runtime import Runtime

    class Waiting(Runtime):
        def _run(self, images, wanted="logits"):
            time.sleep(seconds_an_image * len(images))
            return {"logits": np.zeros((len(images), config.num_classes), "float32")}

    return Waiting("device", config)


def _config():
    from benchmarks.worker import variant_config

    return variant_config("vit_ti16")


def _saved_model(variant):
    """A model with random weights as a SavedModel, opened."""
    import keras_vit

    with tempfile.TemporaryDirectory() as folder:
        model = getattr(keras_vit, variant)(num_classes=1000)
        keras_vit.export_saved_model(model, pathlib.Path(folder) / "model")
        opened = keras_vit.runtime.open(pathlib.Path(folder) / "model")
    return opened, opened.config


def table(record):
    """A line for each model."""
    title = f"{record['images']} JPEGs of 500x375, images a second; processor time in ms an image"
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    ways = ("decode", "model", "one after another", "stream")
    for i, column in enumerate(
        ("", *ways, "of slower", "of shared cores", "CPU: decode", "model", "stream")
    ):
        result.add_column(column, justify="right" if i else "left")
    for row in record["rows"]:
        result.add_row(
            row["model"],
            *(f"{row['images_per_second'][way]:.1f}" for way in ways),
            f"{row['of_slower']:.0%}",
            "" if row["model"] == DEVICE else f"{row['of_bound_of_shared_cores']:.0%}",
            *(f"{row['cpu_ms_an_image'][way]:.2f}" for way in ("decode", "model", "stream")),
        )
    return result


if __name__ == "__main__":
    main()

"""`python -m benchmarks.tflite`: TFLite files on the CPU, ours and the same of KerasHub's model.

Each size is converted in one process and timed in another that only has LiteRT: all its files run
in turns, one image at a time, on one thread and on two.
"""

import argparse
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

from benchmarks import machine

KINDS = ("float32", "float16", "dynamic", "int8")
OURS, HUB, HUB_QUANTIZER = "keras_vit", "keras_hub", "keras_hub, ai-edge-quantizer"
RESULTS = machine.ROOT / "benchmarks" / "results" / "tflite.json"
COLUMNS = ("variant", "threads", "file", "of", "ms", "median", "x keras_hub", "x float32", "MB")
LIMIT = 3600  # seconds until a child counts as hung
MIN_ROUNDS = 5
LOOSE = 10.0  # with random weights, the accuracy of int8 means nothing


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {"machine": machine.describe(), "groups": []}
    if record["machine"]["load_before"] > 0.5:
        machine.say("The machine is busy: expect noise.")
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as folder:
            job = {"variant": variant, "folder": folder}
            files = _run({**job, "kinds": options.kinds})
            for threads in options.threads:
                times = {"threads": threads, "rounds": options.rounds, "budget": options.budget}
                record["groups"].append(_run({**job, **times, "files": files}))
                machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(record["groups"]))
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tflite", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["vit_ti16", "vit_s16", "vit_b16"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=200, help="rounds at most")
    parser.add_argument("--budget", type=float, default=30, help="seconds of rounds a section")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(groups):
    """A section for each variant and number of threads, a line for each file."""
    result = Table(title="One image in LiteRT, best round", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if i < 4 else "right", no_wrap=True)
    for group in groups:
        where = (group["variant"], str(group["threads"]))
        best = {(row["kind"], row["of"]): row["ms"] for row in group["files"]}
        for row in group["files"]:
            ratios = (
                f"{row['ms'] / best[other]:.2f}" if other in best else ""
                for other in ((row["kind"], HUB), ("float32", row["of"].split(",")[0]))
            )
            times = (f"{row['ms']:.2f}", f"{row['ms_median']:.2f}")
            size = f"{row['bytes'] / 1e6:.1f}"
            result.add_row(*where, row["kind"], row["of"], *times, *ratios, size)
            where = ("", "")
        result.add_section()
    return result


def _run(job):
    """The answer of a child."""
    command = [sys.executable, "-m", "benchmarks.tflite", "--child", json.dumps(job)]
    where = {"cwd": machine.ROOT, "env": machine.environment("tensorflow")}
    child = subprocess.run(command, **where, stdout=subprocess.PIPE, timeout=LIMIT, check=True)
    return json.loads(child.stdout)


def _child(job):
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    with result:
        if "files" in job:
            answer = measure(job["files"], job["threads"], job["rounds"], job["budget"])
            answer = {"variant": job["variant"], "threads": job["threads"], "files": answer}
        else:
            answer = convert(job["variant"], job["kinds"], pathlib.Path(job["folder"]))
        json.dump(answer, result)


def convert(variant, kinds, folder):
    """The files: for each its kind, whose model it is, and where it lies."""
    import keras

    from benchmarks.worker import variant_config

    config = variant_config(variant)
    files = [
        {"kind": kind, "of": OURS, "path": path}
        for kind, path in ours(config, kinds, folder).items()
    ]
    keras.backend.clear_session()
    files += [
        {"kind": kind, "of": of, "path": path}
        for (kind, of), path in _keras_hub(config, kinds, folder).items()
    ]
    return sorted(files, key=lambda file: KINDS.index(file["kind"]))


def ours(config, kinds, folder):
    import keras_vit
    from benchmarks.serving import _filled
    from keras_vit.export.verify import generated_images

    model = _filled(keras_vit.ViT(config))
    files = {}
    for kind in kinds:
        files[kind] = str(folder / f"ours-{kind}.tflite")
        keras_vit.export_tflite(
            model,
            files[kind],
            quantize=None if kind == "float32" else kind,
            output="logits",
            calibration=generated_images(config) if kind == "int8" else None,
            bound=None if kind == "float32" else LOOSE,
        )
    return files


def _keras_hub(config, kinds, folder):
    """By TensorFlow's converter, as its documentation says; and quantized as ours is."""
    import keras
    import tensorflow as tf

    from benchmarks import contenders
    from keras_vit.export.tflite.quantize import quantize_file

    model = contenders.build("keras_hub", config, "float32")
    images = keras.InputSpec(shape=(1, *config.input_shape), dtype="float32")
    saved = str(folder / "keras_hub")
    model.export(saved, verbose=False, input_signature=[images])
    files = {}
    for kind in (kind for kind in kinds if kind != "int8"):
        converter = tf.lite.TFLiteConverter.from_saved_model(saved)
        if kind != "float32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if kind == "float16":
            converter.target_spec.supported_types = [tf.float16]
        content = converter.convert()
        files[kind, HUB] = _written(folder / f"{HUB}-{kind}.tflite", content)
    if "dynamic" in kinds and "float32" in kinds:
        content = pathlib.Path(files["float32", HUB]).read_bytes()
        path = folder / "keras_hub-quantizer.tflite"
        files["dynamic", HUB_QUANTIZER] = _written(path, quantize_file(content, "dynamic"))
    return files


def _written(path, content):
    path.write_bytes(content)
    return str(path)


def measure(files, threads, rounds, budget):
    """Every file in turns, forwards and then backwards, so that none always follows the same."""
    from ai_edge_litert.interpreter import Interpreter

    runs = []
    for file in files:
        interpreter = Interpreter(file["path"], num_threads=threads)
        interpreter.allocate_tensors()
        (entry,) = interpreter.get_input_details()
        images = np.random.default_rng(1).standard_normal(entry["shape"], "float32")
        interpreter.set_tensor(entry["index"], images)
        interpreter.invoke()
        runs.append((interpreter, []))
    begin = time.perf_counter()
    for i in range(rounds):
        for interpreter, times in runs[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            interpreter.invoke()
            times.append(1000 * (time.perf_counter() - start))
        if i + 1 >= MIN_ROUNDS and time.perf_counter() - begin > budget:
            break
    return [
        {
            **{key: file[key] for key in ("kind", "of")},
            "bytes": os.path.getsize(file["path"]),
            "rounds": len(times),
            "ms": min(times),
            "ms_median": statistics.median(times),
        }
        for file, (_, times) in zip(files, runs, strict=True)
    ]


if __name__ == "__main__":
    main()

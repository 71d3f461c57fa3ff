"""`python -m benchmarks.tflite`: TFLite files on the CPU, ours and the same of KerasHub's model.

Each size is converted in one process and timed in another that only has LiteRT: all its files run
in turns, one image at a time, on one thread and on two.
"""

import argparse
import json
import os
import pathlib
import tempfile

import numpy as np
from rich import box
from rich.table import Table

from benchmarks import children, machine
from benchmarks.turns import in_turns

KINDS = ("float32", "float16", "dynamic", "int8")
OURS, HUB, HUB_QUANTIZER = "keras_vit", "keras_hub", "keras_hub, ai-edge-quantizer"
RESULTS = machine.ROOT / "benchmarks" / "results" / "tflite.json"
COLUMNS = ("variant", "threads", "file", "of", "ms", "median", "x keras_hub", "x float32", "MB")
LOOSE = 10.0  # with random weights, the accuracy of int8 means nothing


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "groups": []}
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as folder:
            job = {"variant": variant, "folder": folder}
            files = children.ask("tflite", {**job, "kinds": options.kinds}, "tensorflow")
            for threads in options.threads:
                times = {"threads": threads, "rounds": options.rounds, "budget": options.budget}
                timed = {**job, **times, "files": files}
                record["groups"].append(children.ask("tflite", timed, "tensorflow"))
                machine.write(options.json, record)
    machine.show(table(record["groups"]), record, width=120)


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


def _child(job):
    with children.answering() as answer:
        if "files" in job:
            found = measure(job["files"], job["threads"], job["rounds"], job["budget"])
            answer({"variant": job["variant"], "threads": job["threads"], "files": found})
        else:
            answer(convert(job["variant"], job["kinds"], pathlib.Path(job["folder"])))


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
    from benchmarks.worker import filled
    from keras_vit.export.verify import generated_images

    model = filled(keras_vit.ViT(config))
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
    """Every file in turns."""
    from ai_edge_litert.interpreter import Interpreter

    calls = {}
    for file in files:
        interpreter = Interpreter(file["path"], num_threads=threads)
        interpreter.allocate_tensors()
        (entry,) = interpreter.get_input_details()
        images = np.random.default_rng(1).standard_normal(entry["shape"], "float32")
        interpreter.set_tensor(entry["index"], images)
        calls[file["path"]] = interpreter.invoke
    times = in_turns(calls, rounds, budget, least=5, warm_up=1)
    return [
        {
            **{key: file[key] for key in ("kind", "of")},
            "bytes": os.path.getsize(file["path"]),
            "rounds": times[file["path"]]["rounds"],
            "ms": 1000 * times[file["path"]]["best_s"],
            "ms_median": 1000 * times[file["path"]]["median_s"],
        }
        for file in files
    ]


if __name__ == "__main__":
    main()

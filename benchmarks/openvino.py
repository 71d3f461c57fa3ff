"""`python -m benchmarks.openvino`: what serves a model fastest on a CPU: bfloat16, int8, OpenVINO.

Each variant runs in its own process. It exports our files and timm's, opens each with the same
number of threads, and times them in turns at every batch size, from an array to an array. Next to
the time on the clock stands the CPU time, which other work on the machine disturbs less: with one
thread, compare that.

timm's model goes through `torch.onnx` to OpenVINO, and with NNCF installed also to its int8.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import tempfile
from functools import partial

import numpy as np
from rich import box
from rich.table import Table

from benchmarks import children, machine
from benchmarks.onnx import channels_first, torch_file
from benchmarks.turns import in_turns

PEER = "SavedModel bfloat16"
OURS = {
    PEER: ("saved_model", {"dtype": "bfloat16"}),
    "ONNX dynamic": ("onnx", {"quantize": "dynamic"}),
    "ONNX int8": ("onnx", {"quantize": "int8"}),
    "OpenVINO float32": ("openvino", {}),
    "OpenVINO bfloat16": ("openvino", {"dtype": "bfloat16"}),
    "OpenVINO int8": ("openvino", {"dtype": "bfloat16", "quantize": "int8"}),
}
TIMM = {
    "timm, OpenVINO float32": "float32",
    "timm, OpenVINO bfloat16": "bfloat16",
    "timm, OpenVINO int8": "int8",
}
SIDES = (*OURS, *TIMM)
COLUMNS = ("variant", "batch", "side", "ms", "median", "CPU ms", "x SavedModel", "error", "MB")
RESULTS = machine.ROOT / "benchmarks" / "results" / "openvino.json"
CALIBRATION = 4  # random images: the speed does not depend on them


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "threads": options.threads, "groups": []}
    record["machine"]["versions"] |= {
        name: importlib.metadata.version(name) for name in ("onnx", "onnxruntime", "openvino")
    }
    for variant in options.variants:
        job = {"variant": variant, "batches": options.batches, "threads": options.threads}
        job |= {"rounds": options.rounds, "budget": options.budget, "sides": options.sides}
        record["groups"] += children.ask("openvino", job, "tensorflow", limit=7200)
        machine.write(options.json, record)
    machine.show(table(record["groups"]), record)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.openvino", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["vit_s16", "vit_b16"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=50, help="rounds at most")
    parser.add_argument("--budget", type=float, default=60, help="seconds of rounds a batch size")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(groups):
    """A section for each variant and batch, a line for each side."""
    result = Table(title="CPU, best round", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for group in groups:
        where = (group["variant"], str(group["batch"]))
        peer = group["sides"].get(PEER, {}).get("cpu_s")
        for name, row in group["sides"].items():
            times = (f"{1000 * row[key]:.1f}" for key in ("best_s", "median_s", "cpu_s"))
            ratio = f"{peer / row['cpu_s']:.2f}" if peer else ""
            result.add_row(
                *where, name, *times, ratio, f"{row['difference']:.1e}", f"{row['mb']:.0f}"
            )
            where = ("", "")
        result.add_section()
    return result


def _child(job):
    with children.answering() as answer, tempfile.TemporaryDirectory() as folder:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(job["threads"])
        tf.config.threading.set_inter_op_parallelism_threads(1)
        from benchmarks.worker import random_images, variant_config

        config, groups, folder = variant_config(job["variant"]), [], pathlib.Path(folder)
        sides = open_ours(config, job["threads"], folder, [s for s in job["sides"] if s in OURS])
        sides |= open_timm(config, job["threads"], folder, [s for s in job["sides"] if s in TIMM])
        for batch in job["batches"]:
            images = random_images(config, batch)
            calls = {name: partial(f, images) for name, (f, _) in sides.items()}
            times = in_turns(calls, job["rounds"], job["budget"])
            rows = {name: {**times[name], **facts} for name, (_, facts) in sides.items()}
            groups.append({"variant": job["variant"], "batch": batch, "sides": rows})
        answer(groups)


def open_ours(config, threads, folder, sides):
    """Our exports, opened: functions from images to logits, and facts of the files."""
    import keras_vit
    from benchmarks.worker import filled, random_images

    model, opened = filled(keras_vit.ViT(config)), {}
    for i, side in enumerate(sides):
        machine.say(f"{side}: exporting")
        target, options = OURS[side]
        if options.get("quantize") == "int8":
            options = {**options, "calibration": random_images(config, CALIBRATION)}
        suffix = {"onnx": ".onnx", "openvino": ".xml", "saved_model": ""}[target]
        path = folder / f"{i}{suffix}"
        seen = getattr(keras_vit, f"export_{target}")(model, path, **options)
        difference = seen.verification.difference / seen.verification.logits_range
        facts = {"mb": seen.size / 1e6, "difference": difference}
        opened[side] = (_function(target, seen.path, threads), facts)
    return opened


def _function(target, path, threads):
    if target == "onnx":
        from keras_vit.runtime.onnx import OnnxRuntime

        session = OnnxRuntime(path, num_threads=threads)._session
        return lambda x: session.run(["logits"], {"images": x})[0]
    if target == "openvino":
        from keras_vit.runtime.openvino import OpenVINORuntime

        compiled = OpenVINORuntime(path, num_threads=threads)._compiled
        return lambda x: compiled({"images": x})["logits"]
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    signature = loaded.signatures["serving_default"]
    return lambda x, _keep=loaded: signature(images=tf.constant(x))["logits"].numpy()


def open_timm(config, threads, folder, sides):
    """timm's model of the same size through `torch.onnx`, opened by OpenVINO."""
    if not sides:
        return {}
    from benchmarks.worker import random_images
    from keras_vit.runtime.openvino import compile_model, import_openvino

    images, path = random_images(config, CALIBRATION), folder / "timm.onnx"
    shown, wanted = channels_first(images), torch_file("timm", config, images, path, any_batch=True)
    core, opened = import_openvino().Core(), {}
    for side in sides:
        made, dtype, size = core.read_model(path), TIMM[side], path.stat().st_size
        if dtype == "int8":
            try:
                made = _by_nncf(made, shown)
            except ImportError:
                machine.say(f"{side}: nncf is not installed")
                continue
            dtype, size = "bfloat16", size / 4
        compiled = compile_model(made, dtype, threads)
        found = compiled({"images": shown})[0]
        facts = {"mb": size / 1e6, "difference": float(np.abs(found - wanted).max())}
        facts["difference"] /= float(np.ptp(wanted))
        opened[side] = (lambda x, c=compiled: c({"images": channels_first(x)})[0], facts)
    return opened


def _by_nncf(made, images):
    """OpenVINO's own post-training quantization, with its settings for transformers."""
    import nncf

    data = nncf.Dataset([image[None] for image in images])
    settings = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(images)}
    return nncf.quantize(made, data, **settings)


if __name__ == "__main__":
    main()

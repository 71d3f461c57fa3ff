"""`python -m benchmarks.onnx`: ONNX files in ONNX Runtime, ours and those of other libraries.

Each variant runs in its own process, on torch, whose exporter writes the others' files. It exports
every side, checks that each file agrees with its model, and times the files in turns at every batch
size, from an array to an array, with the same session options.
"""

import argparse
import importlib.metadata
import json
import pathlib
import tempfile
import warnings
from functools import partial

import numpy as np
from rich import box
from rich.table import Table

from benchmarks import children, machine
from benchmarks.turns import in_turns

# There is no file of KerasHub's: torch's exporter fails on its LayerNormalization.
SIDES = ("keras_vit", "keras_vit float16", "timm", "transformers", "torchvision")
RESULTS = machine.ROOT / "benchmarks" / "results" / "onnx.json"
COLUMNS = ("variant", "batch", "side", "ms", "median", "x timm", "MB", "nodes")
TOLERANCE = 1e-4  # of the logits' range
OPSET = 20


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "threads": options.threads, "groups": []}
    record["machine"]["versions"] |= {
        name: importlib.metadata.version(name) for name in ("onnx", "onnxruntime")
    }
    for variant in options.variants:
        job = {"variant": variant, "batches": options.batches, "threads": options.threads}
        job |= {"rounds": options.rounds, "budget": options.budget}
        record["groups"] += children.ask("onnx", job, "torch")
        machine.write(options.json, record)
    machine.show(table(record["groups"]), record)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["vit_s16", "vit_b16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=0, help="0 is one a core")
    parser.add_argument("--rounds", type=int, default=50, help="rounds at most")
    parser.add_argument("--budget", type=float, default=60, help="seconds of rounds a batch size")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(groups):
    """A section for each variant and batch, a line for each side."""
    result = Table(title="ONNX Runtime, best round", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for group in groups:
        where = (group["variant"], str(group["batch"]))
        peer = group["sides"].get("timm", {}).get("best_s")
        for name, row in group["sides"].items():
            ratio = f"{peer / row['best_s']:.2f}" if peer else ""
            times = (f"{1000 * row[key]:.1f}" for key in ("best_s", "median_s"))
            result.add_row(*where, name, *times, ratio, f"{row['mb']:.0f}", str(row["nodes"]))
            where = ("", "")
        result.add_section()
    return result


def _child(job):
    from benchmarks.worker import random_images, variant_config

    config, groups = variant_config(job["variant"]), []
    with children.answering() as answer:
        for batch in job["batches"]:
            with tempfile.TemporaryDirectory() as folder:
                sides = export_all(config, batch, job["threads"], pathlib.Path(folder))
            images = random_images(config, batch)
            calls = {name: partial(f, images) for name, (f, _) in sides.items()}
            times = in_turns(calls, job["rounds"], job["budget"])
            rows = {name: {**times[name], **facts} for name, (_, facts) in sides.items()}
            groups.append({"variant": job["variant"], "batch": batch, "sides": rows})
        answer(groups)


def export_all(config, batch, threads, folder, sides=SIDES):
    """Every side's file, opened: functions from images to logits, and facts of the file."""
    import onnx

    opened = {}
    for side in sides:
        machine.say(f"{side}: exporting")
        path = folder / f"{side}.onnx"
        try:
            error = _export(side, config, batch, threads, path)
        except Exception as problem:
            machine.say(f"{side} failed: {type(problem).__name__}: {str(problem)[:200]}")
            continue
        machine.say(f"{side}: {error:.1e} of the logits' range from its model")
        facts = {
            "mb": path.stat().st_size / 1e6,
            "nodes": len(onnx.load(path).graph.node),
            "difference": error,
        }
        opened[side] = (_function(path, threads), facts)
    return opened


def _export(side, config, batch, threads, path):
    """Writes the file, and returns how far it differs from its model."""
    import keras_vit
    from benchmarks.worker import filled

    if side.startswith("keras_vit"):
        dtype = side.removeprefix("keras_vit").strip() or "float32"
        seen = keras_vit.export_onnx(filled(keras_vit.ViT(config)), path, dtype=dtype)
        return seen.verification.difference / seen.verification.logits_range
    return _export_torch(side, config, batch, threads, path)


def _export_torch(side, config, batch, threads, path):
    from benchmarks.worker import random_images

    images = random_images(config, batch)
    expected = torch_file(side, config, images, path)
    error = float(np.abs(_function(path, threads)(images) - expected).max() / np.ptp(expected))
    if not error < TOLERANCE:
        raise RuntimeError(f"the file differs from its model: {error:.1e} of the logits' range")
    return error


def torch_file(side, config, images, path, any_batch=False):
    """Writes another library's model by `torch.onnx`; returns what the model gives for images."""
    import torch

    from benchmarks import contenders

    torch.manual_seed(0)
    model = contenders.build(side, config, "float32").eval()
    shown = torch.from_numpy(channels_first(images))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for p in model.parameters():  # random numbers, also where a new model has zeros
            p.add_(0.02 * torch.randn_like(p))
        expected = model(shown)
        # The older exporter: the newer one needs a package of its own and writes the same products.
        torch.onnx.export(
            model,
            (shown,),
            str(path),
            dynamo=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "batch"}} if any_batch else None,
        )
    return getattr(expected, "logits", expected).numpy()


def _function(path, threads):
    """From images to logits, as its users run it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Otherwise the threads of one side keep spinning while the next one runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    first = taken.shape[1] in (1, 3)
    return lambda x: session.run(["logits"], {"images": channels_first(x) if first else x})[0]


def channels_first(images):
    """From `(B, H, W, C)` to `(B, C, H, W)`."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


if __name__ == "__main__":
    main()

"""`python -m benchmarks.kinds`: the speed of exports of every kind of ViT beside the plain one's.

Every kind has the size of S/16 and is exported from random weights. All files of one sort run in
one process, in turns. "x plain" compares multiply-adds a second with the plain ViT's: a kind that
costs nothing beside its products has 1.
"""

import argparse
import json
import pathlib
import tempfile

from rich import box
from rich.table import Table

from benchmarks import children, flops, machine
from benchmarks.turns import in_turns

RESULTS = machine.ROOT / "benchmarks" / "results" / "kinds.json"
FILES = {
    "SavedModel, float32": ("saved_model", {"dtype": "float32"}),
    "SavedModel, bfloat16": ("saved_model", {"dtype": "bfloat16"}),
    "ONNX, float32": ("onnx", {}),
    "TFLite, dynamic": ("tflite", {"quantize": "dynamic"}),
}
"""The function that exports, and its arguments."""

MEAN = {"class_token": False, "pooling": "mean"}
ROPE = {"position_embedding": "rope", "num_registers": 4, "layer_scale": 1e-5}
GATED = {"mlp": "swiglu", "mlp_dim": 1024}
MIXED = {"position_embedding": "rope_mixed", "rope_coordinates": "index", "rope_base": 10.0}
PLAIN = "plain"
KINDS = {
    PLAIN: {},
    "CLIP": {"embedding_norm": True, "patch_bias": False, "gelu": "quick"},
    "SigLIP": {"class_token": False, "pooling": "map", "gelu": "tanh"},
    "DINOv2, registers": {"num_registers": 4, "layer_scale": 1e-5},
    "SwiGLU": {"layer_scale": 1e-5, **GATED},
    "DINOv3": ROPE,
    "EVA-02": ROPE | GATED | {"num_registers": 0, "layer_scale": None, "mlp_inner_norm": True},
    "mixed rotary": MIXED,
    "BEiT": {"position_embedding": "relative_bias", "key_bias": False, "layer_scale": 0.1},
    "relative, MLP": {"position_embedding": "relative_mlp", "relative_mlp_dim": 512},
    "relative, keys": {"position_embedding": "relative"},
    "AIMv2": {"norm": "rms", "qkv_bias": False, "dense_bias": False, **GATED, **MEAN},
    "res-post-norm": {"block_norm": "res_post", "qkv_bias": False, **MEAN},
    "SPT + LSA": {
        "patch_shift": True,
        "patch_norm": "before",
        "score_scale": "learned",
        "score_diagonal": False,
    },
    "convolutional stem": {"stem": "conv"},
    "hybrid R26+S/32": {"stem": "resnet", "stem_depths": (2, 2, 2, 2), "patch_size": 32},
}


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "batch": options.batch, "files": {}}
    for file in options.files:
        job = {"file": file, "kinds": [PLAIN, *(k for k in options.kinds if k != PLAIN)]}
        job |= {name: getattr(options, name) for name in ("batch", "rounds", "budget")}
        record["files"][file] = children.ask("kinds", job, "tensorflow")
        machine.write(options.json, record)
    machine.show(table(record["files"]), record)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kinds", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--batch", type=int, default=8, help="images a request; one for TFLite")
    parser.add_argument("--rounds", type=int, default=50, help="rounds at most")
    parser.add_argument("--budget", type=float, default=60, help="seconds of rounds a file")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(files):
    """A section for each sort of file, a line for each kind."""
    result = Table(title="Exports of every kind, S/16, best round", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(("file", "kind", "ms", "median", "GFLOP", "x plain")):
        result.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for file, rows in files.items():
        where = file
        for kind, row in rows.items():
            times = (f"{1000 * row[key]:.1f}" for key in ("best_s", "median_s"))
            speed = row["flops"] / row["best_s"] * rows[PLAIN]["best_s"] / rows[PLAIN]["flops"]
            result.add_row(where, kind, *times, f"{row['flops'] / 1e9:.1f}", f"{speed:.2f}")
            where = ""
        result.add_section()
    return result


def _child(job):
    with children.answering() as answer, tempfile.TemporaryDirectory() as folder:
        batch = 1 if FILES[job["file"]][0] == "tflite" else job["batch"]
        opened = {k: _opened(k, job["file"], folder) for k in job["kinds"]}
        calls = {kind: _call(served, batch) for kind, served in opened.items()}
        rows = in_turns(calls, job["rounds"], job["budget"])
        for kind, row in rows.items():
            row["flops"] = batch * flops.fused(opened[kind].config)
        answer(rows)


def _opened(kind, file, folder):
    """The exported file of a kind, which the export has verified, in its runtime."""
    import keras_vit
    from benchmarks.worker import filled, variant_config

    machine.say(f"{file}: {kind}")
    name, arguments = FILES[file]
    model = filled(keras_vit.ViT(variant_config("vit_s16").replace(**KINDS[kind])))
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    path = folder / ("model" if name == "saved_model" else f"model.{name}")
    # Random weights amplify how a resized pixel is rounded.
    done = getattr(keras_vit, f"export_{name}")(model, path, bound=0.05, **arguments)
    return keras_vit.runtime.open(done.path)


def _call(served, batch):
    from benchmarks.worker import random_images

    images = random_images(served.config, batch)
    return lambda: served.logits(images)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.token_merging`: token merging (ToMe), its speed and what it costs.

The speed is that of each export's graph with random weights, one thread, all numbers of merged
tokens in turns; times are those of the processor, which other programs disturb less. `--run` adds
the accuracy of a trained model on the test images of its dataset, `--checkpoint` how near the
features of photographs stay to those without merging. The paper (arXiv 2210.09461) reports 1.65 x
for 2 points of ImageNet-1k with B/16 and 13 tokens a block.
"""

import argparse
import json
import pathlib
import sys
import time
from functools import partial

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import children, machine
from benchmarks.turns import in_turns

RESULTS = machine.ROOT / "benchmarks" / "results" / "token_merging.json"
TARGETS = {
    "SavedModel float32": ("tensorflow", "float32"),
    "SavedModel bfloat16": ("tensorflow", "bfloat16"),
    "ONNX float32": ("onnx", None),
    "ONNX dynamic": ("onnx", "dynamic"),
    "OpenVINO float32": ("openvino", "f32"),
    "OpenVINO bfloat16": ("openvino", "bf16"),
    "TFLite float32": ("tflite", None),
    "TFLite dynamic": ("tflite", "dynamic"),
}
ONE_IMAGE = ("TFLite float32", "TFLite dynamic")
COLUMNS = ("variant", "batch", "target")


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "speed": []}
    for variant in options.variants:
        job = {"variant": variant, "batches": options.batches, "merged": [0, *options.merged]}
        job |= {"targets": options.targets, "rounds": options.rounds, "budget": options.budget}
        record["speed"] += _in_process(job)
        machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 100)
    if record["speed"]:
        console.print(table(record["speed"], options.merged))
    if options.run:
        record["accuracy"] = _in_process({"run": str(options.run), "merged": options.merged})
        console.print(_quality(record["accuracy"], f"{options.run.name}: top-1 on test images"))
    if options.checkpoint:
        job = {"checkpoint": str(options.checkpoint), "merged": options.merged}
        record["features"] = _in_process(job)
        console.print(_quality(record["features"], "features of photographs: cosine"))
    machine.write(options.json, record)
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_merging", description=__doc__)
    parser.add_argument("--variants", nargs="*", default=["vit_s16", "vit_b16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--merged", nargs="+", type=int, default=[8, 13], help="tokens a block")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=30, help="rounds at most")
    parser.add_argument("--budget", type=float, default=20, help="seconds of rounds a target")
    parser.add_argument("--run", type=pathlib.Path, help="a folder that training wrote")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a trained model without a head")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(groups, merged):
    """A line for each target: milliseconds an image without merging, and how many times as fast."""
    result = Table(title="token merging, one thread", box=box.SIMPLE, pad_edge=False)
    names = (*COLUMNS, "ms an image", *(f"r={r}" for r in merged))
    for i, column in enumerate(names):
        result.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for group in groups:
        plain = group["seconds"]["0"]
        ratios = (f"{plain / group['seconds'][str(r)]:.2f} x" for r in merged)
        where = (group["variant"], str(group["batch"]), group["target"])
        result.add_row(*where, f"{1000 * plain / group['batch']:.1f}", *ratios)
    return result


def _quality(rows, title):
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for name in rows[0]:
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    return result


def _in_process(job):
    single = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    return children.ask("token_merging", job, "tensorflow", 7200, **single)


def _child(job):
    with children.answering() as answer:
        if "variant" in job:
            answer(list(speeds(job)))
        else:
            answer(list(accuracies(job) if "run" in job else cosines(job)))


def speeds(job):
    """The processor's time of each target, batch and number of merged tokens, in turns."""
    import keras_vit
    from benchmarks.worker import filled, random_images, variant_config
    from keras_vit.export.fold import fold

    model = filled(keras_vit.ViT(variant_config(job["variant"])))
    folded = {r: fold(keras_vit.with_token_merging(model, r)) for r in job["merged"]}
    for batch in job["batches"]:
        images = random_images(model.config, batch)
        for target in job["targets"]:
            if batch > 1 and target in ONE_IMAGE:
                continue
            machine.say(f"{job['variant']}, batch {batch}: {target}")
            calls = {str(r): partial(function(target, folded[r]), images) for r in job["merged"]}
            times = in_turns(calls, job["rounds"], job["budget"], least=3)
            yield {
                "variant": job["variant"],
                "batch": batch,
                "target": target,
                "seconds": {r: row["cpu_s"] for r, row in times.items()},
            }


def function(target, folded):
    """A target's graph as a function from images to an array, on one thread."""
    kind, how = TARGETS[target]
    if kind == "tensorflow":
        from keras_vit.export.saved_model.operators import compile_graph

        module = compile_graph(folded, how)
        return lambda images: module.run(images).numpy()
    if kind == "tflite":
        return _tflite(folded, how)
    from keras_vit.export.onnx.operators import to_onnx
    from keras_vit.export.onnx.quantize import QuantizedOperators, open_session
    from keras_vit.export.quantization import modes_of, product_names

    ops = (
        QuantizedOperators(modes_of(how, product_names(folded), ()), {})
        if how == "dynamic"
        else None
    )
    made = to_onnx(folded, ops=ops)
    if kind == "onnx":
        session = open_session(made, 1)
        return lambda images: session.run(["logits"], {"images": images})[0]
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": how, "INFERENCE_NUM_THREADS": 1}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(made.SerializeToString()), "CPU", settings)
    return lambda images: compiled({"images": images})["logits"]


def _tflite(folded, how):
    from benchmarks.int8 import _interpreter, _invoke
    from keras_vit.export.tflite.operators import to_float32_tflite
    from keras_vit.export.tflite.quantize import quantize_file

    content = to_float32_tflite(
        folded, batch_size=1, output="logits", images="float32", activation="softmax"
    )
    content = quantize_file(content, how) if how else content
    interpreter = _interpreter(content)
    return lambda images: _invoke(interpreter, images)


def accuracies(job):
    """The accuracy of a trained model on all test images, with more and more merged tokens."""
    import keras_vit
    from benchmarks.int8 import _load_images
    from keras_vit.preprocessing import preprocess

    run = pathlib.Path(job["run"])
    model = keras_vit.runtime.open(run).model
    source = json.loads((run / "recipe.json").read_text())["data"]["source"]
    pixels, labels = _load_images(source, "test", None)
    images, times = preprocess(pixels, model.config), []
    for r in [0, *job["merged"]]:
        predict = keras_vit.fused(model, token_merging=r)
        begin = time.process_time()
        found = predict(images, batch_size=100).argmax(-1)
        seconds = time.process_time() - begin
        times.append(seconds)
        yield {
            "r": r,
            "tokens left": model.config.num_tokens
            - sum(model.config.replace(token_merging=r).merged_tokens),
            "top-1": float(np.mean(found == labels)),
            "x as fast": times[0] / seconds,
        }


def cosines(job):
    """The cosine of each photograph's features with and without merging, at 224 px."""
    import keras_vit

    model = keras_vit.from_pretrained(job["checkpoint"], num_classes=0, image_size=224)
    images = _photographs(model.config)
    wanted = keras_vit.fused(model)(images)
    for r in job["merged"]:
        found = keras_vit.fused(model, token_merging=r)(images)
        norms = np.linalg.norm(wanted, axis=-1) * np.linalg.norm(found, axis=-1)
        cosine = (wanted * found).sum(-1) / norms
        yield {"r": r, "least": float(cosine.min()), "mean": float(cosine.mean())}


def _photographs(config, count=16):
    """Parts of scikit-learn's two photographs, of any size and place, as the model takes them."""
    from sklearn.datasets import load_sample_images

    import keras_vit

    rng, parts = np.random.default_rng(0), []
    for i in range(count):
        photograph = load_sample_images().images[i % 2]
        side = int(rng.integers(200, 400))
        top, left = (int(rng.integers(0, n - side + 1)) for n in photograph.shape[:2])
        parts.append(photograph[top : top + side, left : left + side])
    return keras_vit.preprocessing.preprocess(parts, config)


if __name__ == "__main__":
    main()

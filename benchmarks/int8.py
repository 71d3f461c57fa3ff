"""`python -m benchmarks.int8`: what int8 costs in accuracy, in every file that has it.

For models that were trained here, on all test images of their dataset. Of TFLite also the sizes and
the speed, and two more kinds that are int8 everywhere: by TensorFlow's converter, from the model
itself, and by ai-edge-quantizer, from the same graph as ours. The speed of the files for servers is
that of `benchmarks.onnx` and `benchmarks.openvino`.
"""

import argparse
import json
import os
import pathlib
import tempfile

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine

KINDS = {"float32": None, "float16": "float16", "dynamic": "dynamic", "int8": "int8"}
EVERYWHERE = "all int8"
SERVERS = {
    "ONNX, dynamic": ("export_onnx", {"quantize": "dynamic"}),
    "ONNX, int8": ("export_onnx", {"quantize": "int8"}),
    "OpenVINO, int8": ("export_openvino", {"quantize": "int8", "dtype": "bfloat16"}),
}
COLUMNS = ("model", "file", "accuracy", "loses", "same class", "MB", "ms", "x dynamic")


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8", description=__doc__)
    parser.add_argument("runs", nargs="*", type=pathlib.Path, help="folders that training wrote")
    parser.add_argument("--calibration", type=int, default=200, help="training images to use")
    parser.add_argument("--images", type=int, help="test images; by default all")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of the latency")
    options = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    table = Table(*COLUMNS[:2], box=box.SIMPLE, pad_edge=False)
    for column in COLUMNS[2:]:
        table.add_column(column, justify="right")
    for run in options.runs or [pathlib.Path("runs/cifar10_plain"), pathlib.Path("runs/fashion")]:
        for row in rows(run, options.calibration, options.images, options.rounds):
            table.add_row(*row)
        table.add_section()
    console = Console(width=100)
    console.print(table)
    console.print(
        "ms: one image, one thread, best round. loses: percentage points less than the model."
    )
    console.print(machine.line(machine.describe()), markup=False, highlight=False)


def rows(run, calibration, images, rounds):
    """A line for the model and one for each file."""
    import keras_vit
    from keras_vit.preprocessing import normalize

    model = keras_vit.runtime.open(run).model
    source = json.loads((run / "recipe.json").read_text())["data"]["source"]
    typical, _ = _load_images(source, "train", calibration)
    pixels, labels = _load_images(source, "test", images)
    typical, pixels = (normalize(part, model.config) for part in (typical, pixels))
    files = make_files(model, typical)
    times = _latencies(files.values(), pixels[:1], rounds)
    dynamic = times[list(files).index("dynamic")]
    wanted = model.predict(pixels, batch_size=100, verbose=0).argmax(-1)
    right = np.mean(wanted == labels)

    def row(name, found, nbytes, *speed):
        share = np.mean(found == labels)
        loses, same = f"{100 * (right - share):.2f}", f"{np.mean(found == wanted):.2%}"
        return run.name, name, f"{share:.2%}", loses, same, f"{nbytes / 1e6:.2f}", *speed

    yield run.name, "the model itself", f"{right:.2%}", "", "", "", "", ""
    for (name, content), milliseconds in zip(files.items(), times, strict=True):
        machine.say(f"{run}: {name}")
        interpreter = _interpreter(content)
        found = np.array([_invoke(interpreter, image[None]).argmax() for image in pixels])
        yield row(name, found, len(content), f"{milliseconds:.3f}", f"{milliseconds / dynamic:.2f}")
    for name, (export, how) in SERVERS.items():
        machine.say(f"{run}: {name}")
        images = {"calibration": typical} if how["quantize"] == "int8" else {}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "x.xml" if "OpenVINO" in name else "x.onnx")
            getattr(keras_vit, export)(model, path, **how, **images)
            opened = keras_vit.runtime.open(path)
            batches = [opened.logits(pixels[i : i + 100]) for i in range(0, len(pixels), 100)]
            nbytes = sum(file.stat().st_size for file in path.parent.iterdir())
        yield row(name, np.concatenate(batches).argmax(-1), nbytes, "", "")


def make_files(model, calibration):
    """The content of each file, by name; each returns logits for one image."""
    from keras_vit.export.fold import fold
    from keras_vit.export.tflite import quantize
    from keras_vit.export.tflite.export import export_tflite
    from keras_vit.export.tflite.operators import to_float32_tflite

    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in KINDS.items():
            path = pathlib.Path(folder, f"{name}.tflite")
            images = calibration if mode == "int8" else None
            export_tflite(model, path, quantize=mode, calibration=images, output="logits")
            files[name] = path.read_bytes()
    content = to_float32_tflite(
        fold(model), batch_size=1, output="logits", images="float32", activation="softmax"
    )
    ranges = quantize.measure_ranges(content, calibration)
    how = dict.fromkeys(quantize.layer_names(content), "int8")
    files[f"{EVERYWHERE}, our graph"] = quantize.quantize_layers(
        content, how, ranges, quantize.BETWEEN
    )
    files[f"{EVERYWHERE}, TensorFlow"] = _converted(model, calibration)
    return files


def _converted(model, calibration):
    """The model, quantized as TensorFlow's guide to integer quantization says."""
    import keras
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        signature = [keras.InputSpec(shape=(1, *model.config.input_shape), dtype="float32")]
        model.export(folder, input_signature=signature, verbose=False)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ([image[None]] for image in calibration)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        return converter.convert()


def _latencies(contents, image, rounds):
    """Milliseconds of each file for one image: the best of several rounds, run in turns."""
    from keras_vit.export.verify import latencies

    interpreters = [_interpreter(content) for content in contents]
    calls = [lambda i=interpreter: _invoke(i, image) for interpreter in interpreters]
    best = [float("inf")] * len(calls)
    for _ in range(-(-rounds // 50)):  # `latencies` runs at most 50
        best = [min(pair) for pair in zip(best, latencies(calls, seconds=60), strict=True)]
    return best


def _interpreter(content):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    return interpreter


def _invoke(interpreter, image):
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def _load_images(source, split, count):
    """Pixels and labels of a `tfds:` dataset."""
    import tensorflow_datasets as tfds

    kind, _, name = source.partition(":")
    if kind != "tfds":
        raise ValueError(f"runs must be trained on tfds: datasets. Received: {source!r}")
    return tfds.as_numpy(
        tfds.load(
            name,
            split=f"{split}[:{count}]" if count else split,
            batch_size=-1,
            as_supervised=True,
            download=False,
        )
    )


if __name__ == "__main__":
    main()

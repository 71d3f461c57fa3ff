"""`python -m benchmarks.startup`: what a user waits for before the first answer.

`keras-vit --help`, `import keras_vit`, building a model, loading a ViT-B/16 from safetensors beside
reading that file, and the first answers of a SavedModel. Every figure is the best of several fresh
processes, run in turns. **cpu** is processor time, which other work on the machine disturbs less.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import contenders, machine

RESULTS = machine.ROOT / "benchmarks" / "results" / "startup.json"
AIM = 0.050  # seconds that keras_vit may add to the import of Keras
HELP_AIM = 0.5  # seconds
LOAD_AIM = 1.5  # times reading the file
PARTS = ("help", "import", "build", "load", "saved_model")

# `gc.freeze`: a collection that falls into the second import would walk all that Keras and its
# backend have made, a quarter of a second with PyTorch, and would have come soon anyhow.
IMPORT = """
import gc, json, time
begin = time.perf_counter()
import keras
middle = time.perf_counter()
gc.freeze()
again = time.perf_counter()
import {package}
added = time.perf_counter() - again
print(json.dumps({{"import": middle - begin + added, "import, Keras being there": added}}))
"""
BUILD = """
import json, time
import keras, {package}
from benchmarks import contenders, worker
config = worker.variant_config("{variant}")
begin = time.perf_counter()
contenders.build("{package}", config, "float32")
print(json.dumps({{"build {variant}": time.perf_counter() - begin}}))
"""


HELP = """
import json, os, subprocess, sys, time
def run(*command):
    begin, cpu = time.perf_counter(), sum(os.times()[2:4])
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin, sum(os.times()[2:4]) - cpu
found = {{}}
for what, command in (("python", ["-c", "pass"]), ("help", ["-m", "keras_vit_cli", "--help"])):
    found[what], found[what + ", cpu"] = run(*command)
print(json.dumps(found))
"""
WRITE = """
import numpy as np, keras_vit
model, rng = keras_vit.vit_b16(num_classes=1000), np.random.default_rng(0)
for weight in model.weights:
    weight.assign(rng.normal(0, 0.02, weight.shape).astype("float32"))
keras_vit.save_pretrained(model, "{folder}", "timm")
"""
# Every weight is added up, because a framework may map a file and read it only in the first step.
LOAD = """
import json, time
import keras, keras_vit, safetensors
from keras_vit.deferred import deferred
from keras_vit.weights import load
file = "{folder}/model.safetensors"
def read():
    with open(file, "rb") as content:
        return content.read()
def arrays():
    with safetensors.safe_open(file, "np") as content:
        return [content.get_tensor(name).sum() for name in content.keys()]
def build():
    with deferred():
        return keras_vit.ViT(keras_vit.ViTConfig())
def whole():
    model = keras_vit.from_pretrained(file)
    return [float(keras.ops.sum(weight.value)) for weight in model.weights]
read()
found = {{}}
for turn in ("first", "again"):
    for name, function in (("load", whole), ("read", read), ("arrays", arrays), ("build", build)):
        begin, cpu = time.perf_counter(), time.process_time()
        function()
        found[name + ", " + turn] = time.perf_counter() - begin
        found[name + ", " + turn + ", cpu"] = time.process_time() - cpu
print(json.dumps(found))
"""
EXPORT = """
import keras_vit
keras_vit.export_saved_model(keras_vit.vit_s16(num_classes=1000), "{folder}")
"""
ANSWER = """
import json, time
import numpy as np, tensorflow as tf
from keras_vit import runtime
images = np.zeros((1, 224, 224, 3), "uint8")
def timed(function):
    begin = time.perf_counter()
    found.append(function())
    return time.perf_counter() - begin
found = []
seconds = {{"open": timed(lambda: runtime.open("{folder}"))}}
answer = lambda: found[0].probabilities(images)
seconds["first answer"] = timed(answer)
seconds["second answer"] = timed(answer)
seconds["later answer"] = min(timed(answer) for _ in range(5))
print(json.dumps(seconds))
"""


def main():
    options = _options()
    record = {"machine": machine.describe(), "rows": []}
    for backend in options.backends if {"import", "build"} & set(options.parts) else ():
        if "import" in options.parts:
            packages = ("keras", "keras_vit")
            _add(record, backend, _best(backend, IMPORT, packages, options.imports))
        if "build" in options.parts:
            program = BUILD.replace("{variant}", options.variant)
            _add(record, backend, _best(backend, program, contenders.KERAS, options.rounds))
    with tempfile.TemporaryDirectory() as folder:
        if "help" in options.parts:
            _add(record, "", _best("numpy", HELP, ("keras_vit",), options.rounds))
        if "load" in options.parts:
            _run(options.backends[0], "keras_vit", WRITE.format(folder=folder), answers=False)
            for backend in options.backends:
                program = LOAD.replace("{folder}", folder)
                _add(record, backend, _best(backend, program, ("keras_vit",), options.rounds))
        if "saved_model" in options.parts:
            place = f"{folder}/export"
            _run("tensorflow", "keras_vit", EXPORT.format(folder=place), answers=False)
            program = ANSWER.replace("{folder}", place)
            _add(record, "tensorflow", _best("tensorflow", program, ("keras_vit",), options.rounds))
    record["ratios"] = ratios(record["rows"])
    machine.write(options.json, record)
    _report(record)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--variant", default="vit_b16", help="a name of keras_vit.list_variants()")
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--imports", type=int, default=7, help="processes for each import")
    parser.add_argument("--rounds", type=int, default=5, help="processes for everything else")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def _add(record, backend, best):
    for (package, what), value in best.items():
        if not (package == "keras" and "being there" in what):  # nothing, as it is imported
            row = {"backend": backend, "package": package, "what": what}
            record["rows"].append(row | {"seconds": value})


def ratios(rows):
    """What the aims are about, from rows of seconds."""
    found = {}
    seconds = {(row["backend"], row["what"]): row["seconds"] for row in rows}
    for (backend, what), value in seconds.items():
        if not what.startswith("load, ") or isinstance(value, str):
            continue
        beyond = value - seconds[backend, what.replace("load", "build")]
        read = seconds[backend, what.replace("load", "read")]
        found[f"{backend}: {what} / reading the file"] = value / read
        found[f"{backend}: {what}, beyond building / reading the file"] = beyond / read
    first, later = (seconds.get(("tensorflow", f"{name} answer")) for name in ("first", "later"))
    if isinstance(first, float) and isinstance(later, float):
        found["SavedModel: first answer / later answer"] = first / later
    return found


def _report(record):
    table = Table("backend", "package", "what", "seconds", box=box.SIMPLE)
    before = None
    for row in record["rows"]:
        if before not in (None, row["backend"]):
            table.add_section()
        before = row["backend"]
        value = row["seconds"]
        text = value if isinstance(value, str) else f"{value:.3f}"
        table.add_row(row["backend"], row["package"], row["what"], text)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for what, value in record["ratios"].items():
        console.print(f"{what}: {value:.2f}", highlight=False)
    console.print(
        f"Aims: keras_vit adds at most {AIM:.3f} s to the import of Keras; help within "
        f"{HELP_AIM} s; loading within {LOAD_AIM} times reading the file."
    )
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


def _best(backend, program, packages, rounds):
    """The least of each number that the program prints for each package, or why there is none."""
    best = {}
    for i in range(1, rounds + 1):
        for package in packages:
            machine.say(f"{backend} {package}: process {i} of {rounds}")
            for what, value in _run(backend, package, program.format(package=package)).items():
                old = best.get((package, what), value)
                best[package, what] = value if isinstance(value, str) else min(old, value)
    return best


def _run(backend, package, code, answers=True):
    needed = [name for name in (backend, package) if name in (*machine.BACKENDS, package)]
    if not all(map(importlib.util.find_spec, needed)):
        return {"-": "not installed"}
    where = {"cwd": machine.ROOT, "env": machine.environment(backend)}
    child = subprocess.run([sys.executable, "-c", code], **where, capture_output=True, text=True)
    if child.returncode:
        reason = (child.stderr.strip() or "silently").splitlines()[-1]
        if not answers:
            sys.exit(reason)
        return {"-": "failed: " + reason}
    return json.loads(child.stdout.splitlines()[-1]) if answers else {}


if __name__ == "__main__":
    main()

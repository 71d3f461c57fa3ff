"""`python -m benchmarks.startup`: the time of `import keras_vit` and of building a model.

Every figure is the best of several fresh processes, run in turns.
"""

import argparse
import importlib.util
import json
import subprocess
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import contenders, machine

AIM = 0.050  # seconds that keras_vit may add to the import of Keras

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


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--variant", default="vit_b16", help="a name of keras_vit.list_variants()")
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--imports", type=int, default=7, help="processes for each import")
    parser.add_argument("--builds", type=int, default=5, help="processes for each model")
    options = parser.parse_args()
    table = Table("backend", "package", "what", "seconds", box=box.SIMPLE)
    for backend in options.backends:
        rows = {
            **_best(backend, IMPORT, ("keras", "keras_vit"), options.imports, options.variant),
            **_best(backend, BUILD, contenders.KERAS, options.builds, options.variant),
        }
        for (package, what), seconds in rows.items():
            if package == "keras" and "being there" in what:
                continue  # nothing, as it is imported
            text = seconds if isinstance(seconds, str) else f"{seconds:.3f}"
            table.add_row(backend, package, what, text)
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print(f"Aim: keras_vit adds at most {AIM:.3f} s to the import of Keras.")
    console.print(machine.line(machine.describe()), markup=False, highlight=False)


def _best(backend, program, packages, rounds, variant):
    """The least of each number that the program prints for each package, or why there is none."""
    best = {}
    for i in range(1, rounds + 1):
        for package in packages:
            print(f"{backend} {package}: process {i} of {rounds}", file=sys.stderr)
            code = program.format(package=package, variant=variant)
            for what, value in _run(backend, package, code).items():
                old = best.get((package, what), value)
                best[package, what] = value if isinstance(value, str) else min(old, value)
    return best


def _run(backend, package, code):
    if not (importlib.util.find_spec(backend) and importlib.util.find_spec(package)):
        return {"-": "not installed"}
    where = {"cwd": machine.ROOT, "env": machine.environment(backend)}
    child = subprocess.run([sys.executable, "-c", code], **where, capture_output=True, text=True)
    if child.returncode:
        return {"-": "failed: " + (child.stderr.strip() or "silently").splitlines()[-1]}
    return json.loads(child.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

"""`python -m benchmarks.throughput`: images a second, forward and in training, by library."""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys

from rich.console import Console

from benchmarks import contenders, machine, table

DTYPES = ("float32", "mixed_bfloat16")
MODES = ("forward", "train")
RESULTS = machine.ROOT / "benchmarks" / "results" / "throughput.json"
LIMIT = 1200  # seconds until a child counts as hung


def main():
    options = _options()
    record = {"machine": machine.describe(), "variant": options.variant, "batch": options.batch}
    if record["machine"]["load_before"] > 0.5:
        machine.say("The machine is busy: expect noise.")
    record["groups"] = []
    for backend in options.backends:
        for dtype in options.dtypes:
            for mode in options.modes:
                record["groups"].append(_group(backend, dtype, mode, options))
                machine.write(options.json, record)  # results are kept if a later child is stopped
    console = Console(width=None if sys.stdout.isatty() else 100)
    title = f"{options.variant}, batch {options.batch}, best of up to {options.rounds} rounds"
    console.print(table.table(record["groups"], title))
    for line in (*table.failures(record["groups"]), machine.line(record["machine"])):
        console.print(line, markup=False, highlight=False)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument(
        "--variant", default="vit_b16", help="a name of keras_vit.list_variants(), or small"
    )
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=positive, default=10, help="rounds at most")
    parser.add_argument(
        "--budget", type=float, default=40, help="seconds of rounds a process; two are always run"
    )
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return value


def _group(backend, dtype, mode, options):
    """The measurements of one child; if it dies, each of its contenders is marked as failed."""
    group = {"backend": backend, "dtype": dtype, "mode": mode}
    job = {"variant": options.variant, "dtype": dtype, "mode": mode, "batch": options.batch}
    job |= {"rounds": options.rounds, "budget": options.budget}
    row = {"status": "not installed"}
    if importlib.util.find_spec(backend) is not None:
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(job)]
        where = {"cwd": machine.ROOT, "env": machine.environment(backend)}
        try:
            child = subprocess.run(command, **where, stdout=subprocess.PIPE, timeout=LIMIT)
            if child.returncode == 0:
                return json.loads(child.stdout)
            if child.returncode == 2:  # the job itself is wrong, so all others would fail too
                sys.exit(2)
            message = f"the process ended with {child.returncode}; stderr says why"
        except subprocess.TimeoutExpired:
            message = f"the process took longer than {LIMIT} s"
        row = {"status": "failed", "message": message}
    return {**group, "contenders": {name: row for name in contenders.names(backend, mode)}}


if __name__ == "__main__":
    main()

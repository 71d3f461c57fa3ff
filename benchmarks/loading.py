"""`python -m benchmarks.loading`: seconds and memory of loading a checkpoint, by library."""

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

from benchmarks import loading_worker, machine

RESULTS = machine.ROOT / "benchmarks" / "results" / "loading.json"
LIMIT = 600  # seconds until a child counts as hung
COLUMNS = (
    *("file", "contender", "backend", "seconds", "beyond building", "refill, of numpy's read"),
    *("peak MB", "of building"),
)


def main():
    options = _options()
    record = {"machine": machine.describe(), "rounds": options.rounds, "rows": []}
    if record["machine"]["load_before"] > 0.5:
        machine.say("The machine is busy: expect noise.")
    with tempfile.TemporaryDirectory() as folder:
        machine.say("writing random ViT-B/16 checkpoints")
        _child({"stage": "write", "path": folder}, options.backends[0], check=True)
        record["megabytes"] = {
            name: loading_worker.nbytes(pathlib.Path(folder) / name) / 1e6
            for name in loading_worker.FILES
        }
        for file in loading_worker.FILES:
            for contender in loading_worker.CONTENDERS[file]:
                for backend in _backends(file, contender, options.backends):
                    row = _row(file, contender, backend, folder, options.rounds)
                    record["rows"].append(row)
                    machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(record))
    for row in record["rows"]:
        if row["status"] == "failed":
            where = f"{row['file']} {row['contender']} {row['backend']}"
            console.print(f"{where} failed: {row['message']}", markup=False, highlight=False)
    console.print(machine.line(record["machine"]), markup=False, highlight=False)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loading",
        description="Seconds and memory of loading ViT-B/16 in float32, each in a fresh process.",
    )
    parser.add_argument("--backends", nargs="+", choices=machine.BACKENDS, default=machine.BACKENDS)
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes; the best counts")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def _backends(file, contender, backends):
    """The backends to measure a contender on; [None] for one without backends."""
    if contender in loading_worker.READERS or (file, contender) in loading_worker.NO_LOADER:
        return (None,)
    return backends if contender in ("keras_vit", "keras_hub") else ("torch",)


def _row(file, contender, backend, folder, rounds):
    row = {"file": file, "contender": contender, "backend": backend, "status": "not installed"}
    if (file, contender) in loading_worker.NO_LOADER:
        return row | {"status": "none: no loader"}
    package = contender if contender not in loading_worker.READERS else "numpy"
    if any(n and importlib.util.find_spec(n) is None for n in (package, backend)):
        return row
    job = {"contender": contender, "path": str(pathlib.Path(folder) / file)}
    machine.say(f"{file}: {contender} {backend or ''}")
    try:
        loads = [_child(job | {"stage": "load"}, backend) for _ in range(rounds)]
        row |= {
            "seconds": min(load["seconds"] for load in loads),
            "peak_mb": min(load["peak_mb"] for load in loads),
        }
        if contender not in loading_worker.READERS:
            row["build_peak_mb"] = _child(job | {"stage": "build"}, backend)["peak_mb"]
            warm = [_child(job | {"stage": "warm"}, backend) for _ in range(rounds)]
            row |= {f"warm_{key}_seconds": min(w[key] for w in warm) for key in ("build", "load")}
        if (contender, file) == ("keras_vit", loading_worker.GOOGLE):
            row["refill_of_numpy"] = _child(job | {"stage": "refill"}, backend)["of_numpy"]
    except (subprocess.SubprocessError, ValueError) as error:
        return row | {"status": "failed", "message": str(error)}
    return row | {"status": "measured"}


def _child(job, backend, check=False):
    """The measurements of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.loading_worker", json.dumps(job)]
    environment = machine.environment(backend or "numpy")
    child = subprocess.run(
        command, cwd=machine.ROOT, env=environment, stdout=subprocess.PIPE, timeout=LIMIT
    )
    if child.returncode:
        if check:
            sys.exit(child.returncode)
        raise ValueError(f"the process ended with {child.returncode}; stderr says why")
    return json.loads(child.stdout)


def _table(record):
    title = f"ViT-B/16 in float32, best of {record['rounds']} fresh processes, file in memory"
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    before = None
    for row in record["rows"]:
        if before not in (None, row["file"]):
            result.add_section()
        size = f"{row['file']} ({record['megabytes'][row['file']]:.0f} MB)"
        name = (size if row["file"] != before else "", row["contender"], row["backend"] or "")
        before = row["file"]
        if row["status"] != "measured":
            result.add_row(*name, row["status"])
            continue
        refill = f"{row['refill_of_numpy']:.2f}x" if "refill_of_numpy" in row else ""
        added = peak = ""
        if "warm_load_seconds" in row:
            added = f"{row['warm_load_seconds'] - row['warm_build_seconds']:.2f}"
            peak = f"{row['build_peak_mb']:.0f}"
        result.add_row(*name, f"{row['seconds']:.2f}", added, refill, f"{row['peak_mb']:.0f}", peak)
    return result


if __name__ == "__main__":
    main()

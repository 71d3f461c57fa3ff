"""`python -m benchmarks.choosing`: images a second of our exports, for docs/choosing.md.

Each size and kind of file is exported and timed in a process of its own: SavedModels as in
`benchmarks.serving`, TFLite files as in `benchmarks.tflite`.
"""

import argparse
import json
import pathlib
import tempfile

from benchmarks import children, machine

RESULTS = machine.ROOT / "benchmarks" / "results" / "choosing.json"
VARIANTS = ("vit_ti16", "vit_s16", "vit_b16")
SAVED_MODELS = {"SavedModel, float32": "float32", "SavedModel, bfloat16": "bfloat16"}
TFLITE = "TFLite, dynamic"
FILES = (*SAVED_MODELS, TFLITE)


def main():
    options = _options()
    if options.child:
        return _child(json.loads(options.child))
    record = {**machine.begin(), "batch": options.batch, "speeds": {}}
    job = {"batch": options.batch, "threads": options.threads}
    job |= {"rounds": options.rounds, "budget": options.budget}
    for variant in options.variants:
        speeds = record["speeds"][variant] = {}
        for file in FILES:
            machine.say(f"{variant}: {file}")
            job |= {"variant": variant, "file": file}
            speeds[file] = children.ask("choosing", job, "tensorflow")
            machine.write(options.json, record)
    print(table(record["speeds"]))
    print(machine.line(record["machine"]))


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--batch", type=int, default=8, help="images a request of a SavedModel")
    parser.add_argument("--threads", type=int, default=2, help="threads of LiteRT")
    parser.add_argument("--rounds", type=int, default=100, help="rounds at most")
    parser.add_argument("--budget", type=float, default=15, help="seconds of rounds a file")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(speeds):
    """The rows of the page: images a second of each size and file."""
    rows = [f"| {' | '.join(('', *FILES))} |", "|---" * (1 + len(FILES)) + "|"]
    for variant, measured in speeds.items():
        cells = (f"{float(f'{measured[file]:.3g}'):g}" for file in FILES)
        rows.append(f"| {' | '.join((f'`{variant}`', *cells))} |")
    return "\n".join(rows)


def _child(job):
    from benchmarks.worker import variant_config

    with children.answering() as answer, tempfile.TemporaryDirectory() as folder:
        config, folder = variant_config(job["variant"]), pathlib.Path(folder)
        measure = measure_tflite if job["file"] == TFLITE else measure_saved_model
        answer(measure(config, folder, job))


def measure_saved_model(config, folder, job):
    """Images a second of a SavedModel, `batch` images at a time."""
    from benchmarks import serving

    dtype = SAVED_MODELS[job["file"]]
    sides = serving.export_all(config, dtype, folder, sides=("fused",))
    rounds = job["rounds"], job["budget"]
    measured = serving.measure(sides, config, dtype, job["batch"], *rounds)
    return measured["sides"]["fused"]["images_per_second"]


def measure_tflite(config, folder, job):
    """Images a second of a dynamic TFLite file, one image at a time."""
    from benchmarks import tflite

    (path,) = tflite.ours(config, ("dynamic",), folder).values()
    files = [{"kind": "dynamic", "of": tflite.OURS, "path": path}]
    (row,) = tflite.measure(files, job["threads"], job["rounds"], job["budget"])
    return 1000 / row["ms"]


if __name__ == "__main__":
    main()

"""The time of one file, measured in a process of its own, so that its memory is known too.

`python -m keras_vit.benchmark.timing FOLDER` reads job.json there and writes answer.json.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import resource
except ImportError:  # Windows, where memory is not measured
    resource = None

from keras_vit import runtime
from keras_vit.preprocessing import model_input
from keras_vit.runtime import Runtime

JOB, ANSWER, PICTURES, OUTPUTS = "job.json", "answer.json", "pictures.npy", "outputs.npy"
WARM_UP = 2
"""Calls of each batch size before the first that counts."""
LEAST, MOST = 5, 5000
"""Calls of a batch size that count."""
AT_ONCE = 32
"""Pictures of a call that is not timed."""
UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of what the system counts memory in."""


class Timing(NamedTuple):
    """What a process found.

    Attributes:
        times: Seconds of each call, by batch size.
        memory: Bytes by which the process grew from before the file was opened, at most; 0 where
            that cannot be measured.
        outputs: Logits `(N, K)` of the pictures, or features `(N, D)` of a model without a head.
    """

    times: dict[int, list[float]]
    memory: int
    outputs: np.ndarray


def time_file(path: Path, pictures: Path, batch_sizes: list[int], seconds: float) -> Timing:
    """Times a file in a new process.

    Args:
        path: What `keras_vit.runtime.open` opens.
        pictures: A .npy file of images `(N, H, W, C)`, pixels or as the model takes them.
        batch_sizes: Images of a call.
        seconds: How long each batch size is timed.
    """
    folder = pictures.parent
    job = {"path": str(path), "batch_sizes": batch_sizes, "seconds": seconds}
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
    for left in (ANSWER, OUTPUTS):
        (folder / left).unlink(missing_ok=True)
    # The child imports the same packages as this process.
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    child = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if not (folder / ANSWER).is_file():
        lines = child.stderr.strip().splitlines() or ["without a message"]
        raise RuntimeError(f"Its process ended with {child.returncode}: {lines[-1]}")
    answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    times = {int(size): found for size, found in answer["times"].items()}
    return Timing(times, answer["memory"], np.load(folder / OUTPUTS))


def main(folder: Path) -> None:
    """Does the job in a folder."""
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    pictures = np.load(folder / PICTURES, mmap_mode="r")
    before = _peak()
    opened = runtime.open(job["path"], all_cores=True)
    run = opened.logits if opened.config.num_classes else opened.features
    times = {
        size: _times(run, _batch(opened, pictures, size), job["seconds"])
        for size in job["batch_sizes"]
    }
    parts = [run(pictures[i : i + AT_ONCE]) for i in range(0, len(pictures), AT_ONCE)]
    answer = {"times": times, "memory": _peak() - before}
    np.save(folder / OUTPUTS, np.concatenate(parts))
    (folder / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def _batch(opened: Runtime, pictures: np.ndarray, size: int) -> np.ndarray:
    """Pictures as the model takes them, so that their preparation is not timed."""
    return model_input(pictures[np.arange(size) % len(pictures)], opened.config)


def _times(run: Callable[[Any], Any], images: Any, seconds: float) -> list[float]:
    for _ in range(WARM_UP):
        run(images)
    found = []
    end = time.perf_counter() + seconds
    while len(found) < MOST and (len(found) < LEAST or time.perf_counter() < end):
        start = time.perf_counter()
        run(images)
        found.append(time.perf_counter() - start)
    return found


def _peak() -> int:
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


if __name__ == "__main__":
    main(Path(sys.argv[1]))

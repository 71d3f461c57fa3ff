"""`python -m training.train` in separate processes, for the tests here: start, watch, compare.

The recipe has all state that a run must resume: crops, drop path, patch dropout, weight decay, a
schedule and averaged weights. A checkpoint is written when the one before is 0.06 seconds old.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np

from keras_vit.train.checkpoint import manifest

ROOT = Path(__file__).parents[2]
LAST = 150  # steps, in three epochs of 50
SETTINGS = (
    f"run.steps={LAST}",
    "run.checkpoint_minutes=0.001",
    "model.config.depth=2",
    "model.config.width=32",
    "schedule.warmup_steps=30",
    "optimizer.ema_momentum=0.9",
    "augment.crop=pad",
    "augment.crop_padding=1",
)


class Process:
    """One process, whose output goes to a file."""

    def __init__(self, folder, *options, log=None, **environment):
        self.folder = Path(folder)
        self.log = Path(log or f"{folder}.log")
        command = [sys.executable, "-m", "training.train", "--workdir", str(folder), *options]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with self.log.open("ab") as file:
            self.begin = file.tell()
            self.child = subprocess.Popen(
                command, env={**variables, **environment}, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def said(self):
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    def send(self, number):
        os.kill(self.child.pid, number)

    def wait_for(self, step):
        """Waits for a checkpoint of this step or a later one, and returns its step."""
        until = time.monotonic() + 200
        while not (found := [k for k in manifest.steps(self.folder / "checkpoints") if k >= step]):
            assert self.child.poll() is None and time.monotonic() < until, self.said[-3000:]
            time.sleep(0.002)
        return found[-1]

    def code(self, timeout=200):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(timeout)
        raise AssertionError(f"still running after {timeout} s: {self.said[-3000:]}")

    def resumed_at(self):
        """The step at which it resumed, by its output."""
        line = next(line for line in self.said.splitlines() if line.startswith("resumes at step"))
        return int(line.split()[3].rstrip(","))

    def end(self):
        self.child.kill()
        self.child.wait()


def settings(*more):
    """The options of a new run."""
    pairs = (part for one in (*SETTINGS, *more) for part in ("--set", one))
    return ["--recipe", "digits", *pairs]


def killed(*processes):
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        process.child.wait()


def weights(folder, name="model.keras"):
    """The weights of the model that a run saved."""
    import keras_vit.train.objectives.mae  # noqa: F401  the classes in the files

    model = keras.saving.load_model(Path(folder, name))
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


def log(folder):
    """The log of a run, without the figures that depend on the machine."""
    lines = map(json.loads, Path(folder, "log.jsonl").read_text().splitlines())
    timed = ("seconds", "images_per_second")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def same_weights(one, other):
    return one.keys() == other.keys() and all(
        array.tobytes() == other[path].tobytes() for path, array in one.items()
    )


def largest_difference(one, other):
    return max(float(np.abs(array - other[path]).max()) for path, array in one.items())

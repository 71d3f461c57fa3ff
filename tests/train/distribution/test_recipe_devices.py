"""A whole recipe in two processes, started as the docs say, does the same as in one."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import trainee

import keras_vit  # noqa: F401  (for loading)

pytestmark = pytest.mark.slow

SETTINGS = [
    "run.steps=40",
    "run.batch_size=72",  # divides the 360 test images; the 50 below does not
    "evaluation.batch_size=50",
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.05",
    "schedule.warmup_steps=5",
    "model.config.drop_path=0",
    "model.config.patch_dropout=0",
    "model.config.width=16",
    "model.config.depth=2",
    "model.config.mlp_dim=24",
    "augment.crop=pad",
    "augment.crop_padding=1",
    "augment.mixup=0.2",
]


def free_ports():
    """The first of two consecutive free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def run(folder, processes, *more):
    """The weights, the log and the output of a run."""
    settings = [part for one in (*SETTINGS, *more) for part in ("--set", one)]
    command = ["--recipe", "digits", "--workdir", str(folder), *settings]
    several = [str(trainee.ROOT / "training/cluster/local.sh"), str(processes)]
    start = several if processes > 1 else [sys.executable, "-m", "training.train"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PORT": str(free_ports())}
    done = subprocess.run(
        [*start, *command],
        env=environment,
        cwd=trainee.ROOT,
        text=True,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    model = keras.saving.load_model(folder / "model.keras")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}, log, done.stdout


def test_recipe_in_two_processes_equals_one_process(tmp_path):
    one, one_log, _ = run(tmp_path / "one", 1)
    two, two_log, said = run(tmp_path / "two", 2)
    assert "2 parts of 2 processes" in said and "36 a device" in said
    for path, value in one.items():
        np.testing.assert_allclose(two[path], value, atol=1e-5, err_msg=path)
    assert len(one_log) == len(two_log) == 2
    for ours, theirs in zip(two_log, one_log, strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy", "val_top5", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    other, _, _ = run(tmp_path / "other", 1, "run.seed=1")
    assert max(np.abs(other[path] - one[path]).max() for path in one) > 1e-2

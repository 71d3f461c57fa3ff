"""The training command, killed by the system, by a scheduler and while it saves, and run twice."""

import signal
import time

import numpy as np
import pytest
import real_runs
from real_runs import Process, log, same_weights, weights

from keras_vit.train.checkpoint import files, manifest
from keras_vit.train.checkpoint.sigterm import CODE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def check_resumes(tmp_path, *options, **environment):
    """One run is only paused; the other is killed, resumes, gets SIGTERM, and resumes."""
    straight = Process(tmp_path / "straight", *real_runs.settings(), *options, **environment)
    straight.wait_for(20)
    straight.send(signal.SIGSTOP)  # it stays in the middle of training
    try:
        second = Process(
            tmp_path / "straight", *options, log=tmp_path / "second.log", **environment
        )
        assert second.code() == 1
        assert f"locked by process {straight.child.pid} on " in second.said
    finally:
        straight.send(signal.SIGCONT)

    folder = tmp_path / "killed"
    run = Process(folder, *real_runs.settings(), *options, **environment)
    run.wait_for(60)
    real_runs.killed(run)
    first, _ = files.newest(folder / "checkpoints")
    assert 60 <= (step := first.facts["position"]["step"]) < real_runs.LAST

    run = Process(folder, *options, **environment)
    seen = run.wait_for(step + 1)
    run.send(signal.SIGTERM)
    assert run.code() == CODE, run.said[-3000:]
    assert run.resumed_at() == step
    saved = manifest.steps(folder / "checkpoints")[-1]
    assert seen <= saved < real_runs.LAST
    assert f"SIGTERM: the run ends, saved at step {saved}" in run.said

    run = Process(folder, *options, **environment)
    assert run.code() == straight.code() == 0, run.said[-3000:]
    assert run.resumed_at() == saved
    wanted = weights(straight.folder)
    assert same_weights(weights(folder), wanted)
    assert log(folder) == log(straight.folder) and len(log(folder)) == 3
    return wanted


def test_run_resumes_bit_for_bit_and_locks_its_folder(tmp_path):
    """F5, F13 through the command; a second process is locked out and does no harm."""
    wanted = check_resumes(tmp_path)
    other = Process(tmp_path / "other", *real_runs.settings("run.seed=1"))  # F6
    assert other.code() == 0, other.said[-3000:]
    assert not same_weights(weights(other.folder), wanted)
    assert log(other.folder) != log(tmp_path / "straight")


MAE = ("objective.name=mae", "model.config.patch_dropout=0", "evaluation.knn=200") + tuple(
    f"objective.options.decoder_{field}" for field in ("width=16", "depth=1", "heads=2")
)


def test_run_without_labels_resumes_bit_for_bit(tmp_path):
    """Masks, decoder, k-NN accuracy in the log: all of MAE's state."""
    options = [part for setting in MAE for part in ("--set", setting)]
    check_resumes(tmp_path, *options)
    assert all("val_knn" in line for line in log(tmp_path / "killed"))
    one, other = (weights(tmp_path / name, "objective.keras") for name in ("straight", "killed"))
    assert same_weights(one, other) and any("decoder" in path for path in one)


@pytest.mark.only_on("jax")
def test_run_with_split_weights_resumes_bit_for_bit(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    check_resumes(tmp_path, "--devices", "model:2", **flags)


def writes(path):
    """The step of a checkpoint that is being written or removed."""
    return int(path.name.split(".")[0].removeprefix("ckpt-"))


def test_run_killed_while_it_saves_resumes_at_the_last_checkpoint_or_the_one_before(tmp_path):
    """F1, with real training: a checkpoint at every step, and kills at random moments."""
    rng = np.random.default_rng(0)
    folder, step, hit = tmp_path / "checkpoints", 0, 0
    options = real_runs.settings("run.steps=100000", "run.checkpoint_minutes=1e-9")
    for number in range(10):
        run = Process(tmp_path, *options, log=tmp_path.with_suffix(".log"))
        run.wait_for(step + 1)
        time.sleep(rng.uniform(0, 0.3))
        until = time.monotonic() + 60
        while number % 2 and time.monotonic() < until:  # every other time, wait for a save
            seen = manifest.steps(folder)[-1]
            if any(writes(path) > seen for path in folder.glob("*.tmp-*")):
                break
        seen = manifest.steps(folder)[-1]
        real_runs.killed(run)
        assert step == 0 or run.resumed_at() == step
        found, broken = files.newest(folder)
        step = found.facts["position"]["step"]
        assert step >= seen and not broken
        for path in folder.glob("*.tmp-*"):  # the next one, or an old one that is being removed
            assert writes(path) == step + 1 or writes(path) < step
            hit += writes(path) == step + 1
        options = []
    assert hit > 0  # a kill hit a save

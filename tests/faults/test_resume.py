"""A killed run resumes bit for bit: real processes, SIGKILL, every array compared."""

import shutil
import signal

import killed_trainee as trainee
import numpy as np
import pytest
from killed_trainee import Plan, check_same

from keras_vit.train.checkpoint import files, manifest

pytestmark = pytest.mark.timeout(1200)  # several runs of two processes, on a machine of any speed

LAST = trainee.EPOCHS * trainee.STEPS


def read(folder, step):
    return files.read(folder / f"ckpt-{step:06d}")


def begin_at(source, folder, step):
    """A folder with the checkpoint of a run at a step."""
    name = f"ckpt-{step:06d}"
    shutil.copytree(source / name, folder / name)
    return str(folder)


def same_end(one, other):
    with np.load(one / "end.npz") as old, np.load(other / "end.npz") as new:
        return all(old[name].tobytes() == new[name].tobytes() for name in old.files)


def check_resumes(tmp_path, points, **settings):
    """One process is killed; another resumes there and elsewhere, and runs without interruption."""
    straight, killed, at = tmp_path / "straight", tmp_path / "killed", 6
    # Late, so that the second process can resume at several steps.
    code, said = trainee.run(Plan(str(killed), kill_at=max(at, *points), **settings))
    assert code == -signal.SIGKILL, said[-3000:]
    made = manifest.steps(killed)
    assert made[-1] == max(at, *points)
    plans = [Plan(begin_at(killed, tmp_path / f"{k}", k), **settings) for k in (at, *points)]
    # F6: a run that must differ does: it has the same state but other data.
    lost = Plan(begin_at(killed, tmp_path / "lost", at), forget_position=True, **settings)
    code, said = trainee.run(*plans, Plan(str(straight), **settings), lost)
    assert code == 0, said[-3000:]
    begun = [int(line.split()[1]) for line in said.splitlines() if line.startswith("begin ")]
    assert begun == [at, *points, 0, at]
    for step in made:  # F7: two fresh processes do the same
        check_same(read(killed, step), read(straight, step))
    for plan, first in zip(plans, begun, strict=False):
        folder = tmp_path / plan.folder
        done = manifest.steps(folder)
        assert done[-1] == LAST and len([k for k in done if k >= first]) > (first < LAST)
        for step in done:
            check_same(read(folder, step), read(straight, step))
        assert same_end(straight, folder)
    assert not same_end(straight, tmp_path / "lost")


def test_resume_is_bit_for_bit(tmp_path):
    """From the middle of an epoch, and from its end."""
    check_resumes(tmp_path, [4])


@pytest.mark.slow
def test_resume_is_bit_for_bit_from_the_first_step_and_the_last(tmp_path):
    """And from a run that had ended."""
    check_resumes(tmp_path, [1, 11, 12])


@pytest.mark.slow
@pytest.mark.only_on("tensorflow", "jax")  # torch has no steps_per_execution
def test_resume_is_bit_for_bit_with_two_steps_at_once(tmp_path):
    check_resumes(tmp_path, [2, 4, 10, 12], steps_per_execution=2)


@pytest.mark.slow
@pytest.mark.only_on("tensorflow", "jax")  # torch has no float16 on a CPU
def test_resume_is_bit_for_bit_in_float16(tmp_path):
    check_resumes(tmp_path, [4, 11], precision="mixed_float16")

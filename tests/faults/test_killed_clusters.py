"""Two processes that train together: killed, ended by SIGTERM, or started wrongly."""

import shutil
import signal

import keras
import pytest
import real_runs
from processes import environments
from real_runs import Process, log, same_weights, weights

from keras_vit.train.checkpoint import files, manifest
from keras_vit.train.checkpoint.sigterm import CODE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def two(folder, *options, each=((), ())):
    """Starts both processes, each with its own options."""
    return [
        Process(folder, *options, *own, log=f"{folder}_{number}.log", **environment)
        for number, (own, environment) in enumerate(zip(each, environments(), strict=True))
    ]


def check_ended(processes):
    assert [one.code() for one in processes] == [0, 0], "\n".join(p.said[-2000:] for p in processes)


def test_two_processes_resume_together_bit_for_bit(tmp_path):
    """F14, and SIGTERM to both; then in one process, where the bits differ."""
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    check_ended(two(straight, *real_runs.settings()))

    processes = two(folder, *real_runs.settings())
    processes[0].wait_for(60)
    real_runs.killed(*processes)
    step = files.newest(folder / "checkpoints")[0].facts["position"]["step"]
    assert 60 <= step < real_runs.LAST
    writers = {path.name.split("-")[-1] for path in (folder / "checkpoints").glob("*.tmp-*")}
    assert writers <= {str(processes[0].child.pid)}

    processes = two(folder)
    processes[0].wait_for(step + 1)
    for process in processes:
        process.send(signal.SIGTERM)
    first, second = (process.code() for process in processes)
    assert first == CODE, processes[0].said[-3000:]
    assert second == CODE, processes[1].said[-3000:]
    assert processes[0].resumed_at() == step
    assert "resumes" not in processes[1].said and "missing now" not in processes[1].said
    saved = manifest.steps(folder / "checkpoints")[-1]
    assert step < saved < real_runs.LAST
    shutil.copytree(folder, tmp_path / "one")

    processes = two(folder)
    check_ended(processes)
    assert processes[0].resumed_at() == saved
    wanted = weights(straight)
    assert same_weights(weights(folder), wanted)
    here, there = log(folder), log(straight)
    if keras.backend.backend() == "tensorflow":
        # Metrics are not restored there: the log of the interrupted epoch covers its second part.
        here, there = here[:1], there[:1]
    assert here == there

    one = Process(tmp_path / "one")
    assert one.code() == 0, one.said[-3000:]
    assert one.resumed_at() == saved
    assert "not bit for bit: it ran on" in one.said and "2 processes" in one.said
    # Its dropout masks differ, so it is another run, but it learns as much.
    assert not same_weights(weights(tmp_path / "one"), wanted)
    assert abs(log(tmp_path / "one")[-1]["val_loss"] - log(straight)[-1]["val_loss"]) < 0.2


def test_two_processes_with_two_recipes_list_the_differences(tmp_path):
    each = (["--set", "run.seed=1"], ["--set", "run.seed=2"])
    processes = two(tmp_path / "run", *real_runs.settings(), each=each)
    assert [process.code() for process in processes] == [1, 1]
    for process in processes:
        assert "the same in every process. Received, in process 0 and 1: run.seed: 1 -> 2" in (
            process.said
        )
    assert not list((tmp_path / "run").glob("*"))


def test_two_processes_without_a_shared_folder_are_refused(tmp_path):
    """The second process has its own folder, with checkpoints of an earlier run."""
    first, second = tmp_path / "0", tmp_path / "1"
    alone = Process(second, *real_runs.settings())
    alone.wait_for(20)
    real_runs.killed(alone)
    steps = manifest.steps(second / "checkpoints")
    both = environments()
    processes = [
        Process(folder, *real_runs.settings(), **environment)
        for folder, environment in zip((first, second), both, strict=True)
    ]
    assert [process.code() for process in processes] == [1, 1]
    for process in processes:
        assert "folder must be shared by all processes" in process.said
        assert f"where they find nothing, step {steps[-1]}" in process.said
    assert manifest.steps(second / "checkpoints") == steps

    # Nothing was started in the first folder, so a run can start there.
    assert {path.name for path in first.iterdir()} <= {"lock", "checkpoints"}
    again = Process(first, *real_runs.settings())
    again.wait_for(1)
    real_runs.killed(again)

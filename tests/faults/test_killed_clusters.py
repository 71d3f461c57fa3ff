"""Two processes that train together, killed, told to end, or started wrongly."""

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
    """Starts both; each process may have options of its own."""
    return [
        Process(folder, *options, *own, log=f"{folder}_{number}.log", **environment)
        for number, (own, environment) in enumerate(zip(each, environments(), strict=True))
    ]


def check_ended(processes):
    assert [one.code() for one in processes] == [0, 0], "\n".join(p.said[-2000:] for p in processes)


def test_two_processes_go_on_together_bit_for_bit(tmp_path):
    """F14, and SIGTERM to both; then the same in one process, which is not the same to the bit."""
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
    assert processes[0].goes_on_at() == step
    assert "resumes" not in processes[1].said and "missing now" not in processes[1].said
    saved = manifest.steps(folder / "checkpoints")[-1]
    assert step < saved < real_runs.LAST
    shutil.copytree(folder, tmp_path / "one")

    processes = two(folder)
    check_ended(processes)
    assert processes[0].goes_on_at() == saved
    wanted = weights(straight)
    assert same_weights(weights(folder), wanted)
    here, there = log(folder), log(straight)
    if keras.backend.backend() == "tensorflow":
        # Metrics are not kept there: an epoch that was cut counts its second part only.
        here, there = here[:1], there[:1]
    assert here == there

    one = Process(tmp_path / "one")
    assert one.code() == 0, one.said[-3000:]
    assert one.goes_on_at() == saved
    assert "not bit for bit: it ran on" in one.said and "2 processes" in one.said
    # Its masks of dropout are others, so it is another run; and it has learned as much.
    assert not same_weights(weights(tmp_path / "one"), wanted)
    assert abs(log(tmp_path / "one")[-1]["val_loss"] - log(straight)[-1]["val_loss"]) < 0.2


def test_two_processes_with_two_recipes_are_told_the_differences(tmp_path):
    each = (["--set", "run.seed=1"], ["--set", "run.seed=2"])
    processes = two(tmp_path / "run", *real_runs.settings(), each=each)
    assert [process.code() for process in processes] == [1, 1]
    for process in processes:
        assert "the same in every process. Received, in process 0 and 1: run.seed: 1 -> 2" in (
            process.said
        )
    assert not list((tmp_path / "run").glob("*"))


def test_two_processes_without_a_shared_folder_are_refused(tmp_path):
    """The second process has a folder of its own, with what a run saved there earlier."""
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

    # Nothing was begun in the first one, so that a run can begin there.
    assert {path.name for path in first.iterdir()} <= {"lock", "checkpoints"}
    again = Process(first, *real_runs.settings())
    again.wait_for(1)
    real_runs.killed(again)

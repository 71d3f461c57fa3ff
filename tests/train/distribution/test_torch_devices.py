"""Several processes on torch; torch_cases.py has their programs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import trainee
from processes import TESTS, environments
from torch_cases import CASES, run

pytestmark = pytest.mark.only_on("torch")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What `compare` found in each of two processes."""
    codes, said, found = run("compare", tmp_path_factory.mktemp("c"), environments())
    assert codes == [0, 0], said[0][-3000:] + said[1][-3000:]
    return found


@pytest.mark.parametrize("name", [*CASES, "own", "own objective"])
def test_two_processes_compute_what_one_does(compared, name):
    tolerance = 1e-3 if name == "overflow" else 1e-5  # float16
    for found in compared:
        assert found[name] <= tolerance
        assert found["control"] > 5e-5  # the negative control: a learning rate 0.2 % lower


def test_two_processes_overflow_of_one_is_skipped_by_all(compared):
    assert [found["scale"] for found in compared] == [2.0**14] * 2  # half of Keras' initial scale


def test_two_processes_dropout_masks_differ_and_states_do_not(compared):
    (first, second), states = np.array(compared[0]["masks"]), compared[0]["states"]
    assert first.shape == (3, 4, 10)
    for mask, other in zip(first, second, strict=True):
        assert (mask != other).any()
    assert (first[0] != first[1]).any()
    assert states == [[3, 3], [3, 3]]


def test_two_processes_start_with_the_weights_and_order_of_the_first(compared):
    assert [found["strangers"] for found in compared] == [0, 0]


def test_torch_devices_facts(compared):
    for process, found in enumerate(compared):
        assert found["facts"] == ["data parallel", 2, 2, process]
        assert found["said"] == "data parallel, 2 parts of 2 processes: CPU:0"
        assert found["predicted"] == [5, 3]
        for values in found["gathered"][:3]:
            assert np.array(values).tolist() == [[[1] * 3] * 2, [[8] * 3] * 2]
        assert found["gathered"][3] == [[[True] * 3] * 2] * 2


def test_torch_devices_refuse_what_differs_from_one_device(compared):
    for found in compared:
        assert found["others"].startswith("a batch must be the same on all processes")
        assert found["sizes"].endswith("samples of 0: 4, 1: 5")
        assert found["jit"].startswith("jit_compile must not be True")
        assert found["jit in fit"] == found["jit"]


def test_scope_restores_the_steps_of_keras(compared):
    assert [found["after"] for found in compared] == [0, 0]


def test_killed_process_ends_the_other(tmp_path):
    codes, said, _ = run("die", tmp_path, environments())  # PEER_SECONDS is 600
    assert codes == [1, -signal.SIGKILL]
    assert "ConnectionError: process 0 of 2 has lost another one" in said[0]


def test_process_that_never_starts_is_named(tmp_path):
    settings = environments(3, DISTRIBUTION_START_SECONDS="2")[:1]
    codes, said, (seconds,) = run("wait", tmp_path, settings)
    assert codes == [1]
    assert "process 1, 2 of 3 did not come within 2 seconds" in said[0]
    assert seconds >= 2


def test_port_in_use_is_an_error(monkeypatch):
    from keras_vit.train import distribution

    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        taken = {"MASTER_PORT": str(server.getsockname()[1])}
        for name, value in (environments()[0] | taken).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match="another program uses it"), distribution.scope():
            pass


def test_changed_keras_is_refused(monkeypatch):
    from keras_vit.train.distribution import torch_steps

    torch_steps.check_keras()

    def train_step(self, data):
        return {}

    monkeypatch.setattr(torch_steps.TorchTrainer, "train_step", train_step)
    with pytest.raises(RuntimeError, match="must be revised for Keras"):
        torch_steps.check_keras()


def test_scope_without_processes_is_one_device(monkeypatch):
    from keras_vit.train import distribution

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for setting in ("auto", "one", "all"):
        with distribution.scope(setting) as devices:
            assert (devices.replicas, devices.processes, devices.kind) == (1, 1, "one device")


@pytest.mark.slow
def test_recipes_by_hand_and_by_torchrun_match_one_process(tmp_path):
    import keras_vit  # noqa: F401  its class is in the saved file

    plans = [trainee.Plan(), trainee.Plan(optimizer="adamw")]
    (sgd,), (adamw,) = trainee.run_in_turn(plans)
    two = [
        trainee.Plan("auto", keras_file=str(tmp_path / "two.keras")),
        trainee.Plan("auto", "adamw", own_part=True),
    ]
    by_hand = trainee.run_in_turn(two, environments())
    for results, wanted in zip(by_hand, (sgd, adamw), strict=True):
        for process, result in enumerate(results):
            trainee.check_same(result, wanted)
            assert (result.facts["processes"], result.facts["process"]) == (2, process)
    with pytest.raises(AssertionError):
        trainee.check_same(by_hand[0][0], adamw)
    saved = keras.saving.load_model(tmp_path / "two.keras")
    for weight in saved.weights:
        np.testing.assert_array_equal(weight.numpy(), by_hand[0][0].weights[weight.path])

    fields = json.dumps([trainee.dataclasses.asdict(trainee.Plan("auto", own_part=True))])
    out = str(tmp_path / "torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    port = environments()[0]["MASTER_PORT"]
    torchrun += [f"--master-port={port}", "--no-python", "sh", "-c"]
    torchrun += ['exec "$0" "$1" "$2" "$3$RANK.npz"', sys.executable, trainee.__file__, fields, out]
    done = subprocess.run(
        torchrun,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    for process in range(2):
        path = Path(f"{out}{process}.npz")
        result = trainee.read_result(done.returncode, done.stdout + done.stderr, path)
        trainee.check_same(result, sgd)

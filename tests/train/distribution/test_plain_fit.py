"""Plain `fit`, `evaluate`, `predict` and export on several devices are those on one.

The numbers come from `plain_fit`, a program that does the same on one device, on two logical CPUs
of TensorFlow, and in two processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import trainee
from processes import environments

BACKEND = keras.backend.backend()
PROGRAM = Path(__file__).with_name("plain_fit.py")
CASES = ("once", "arrays", "generator", "dataset", "evaluation")  # the first one before any seed
OF_TENSORFLOW = ("generator_of_keras", "unequal", "elsewhere", "exported", "masks")

# The others have tests of their own for processes, and these take a minute.
in_processes = pytest.mark.usefixtures("several") if BACKEND == "jax" else pytest.mark.slow


def run(folder, name, devices, cases, several=({},)):
    """What each process came to in each of the cases."""
    environment = {**os.environ, "PYTHONPATH": str(trainee.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    outs = [folder / f"{name}{number}.json" for number in range(len(several))]
    children = [
        subprocess.Popen(
            [sys.executable, PROGRAM, devices, out, *cases],
            env={**environment, **extra},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for out, extra in zip(outs, several, strict=True)
    ]
    try:
        said = [child.communicate(timeout=280)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * len(children), said[0][-3000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    more = OF_TENSORFLOW if BACKEND == "tensorflow" else ()
    return run(tmp_path_factory.mktemp("one"), "one", "one", (*CASES, *more))[0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    return run(tmp_path_factory.mktemp("all"), "all", "all", (*CASES, *OF_TENSORFLOW))[0]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two processes; on JAX each has two devices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if BACKEND == "jax" else {}
    return run(tmp_path_factory.mktemp("two"), "two", "auto", CASES, environments(**flags))


def check_same(one, other):
    assert one.keys() == other.keys()
    for name, wanted in one.items():
        np.testing.assert_allclose(other[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@in_processes
@pytest.mark.parametrize("case", ["arrays", "generator", "dataset", "evaluation"])
def test_fit_in_two_processes_is_fit_in_one(one, several, case):
    for found in several:
        check_same(one[case], found[case])


@in_processes
def test_each_sample_comes_once_in_two_processes_that_shuffle(one, several):
    everything = [float(np.mean(2.0 ** np.arange(16)))] * 3
    for found in (one, *several):
        losses = {name: value for name, value in found["once"].items()}
        if BACKEND == "torch" and found is not one:
            said = losses.pop("dataset")
            assert "batch must be the same on all processes" in said
        for found_losses in losses.values():
            np.testing.assert_allclose(found_losses, everything, rtol=1e-6)


@in_processes
def test_predictions_in_two_processes_are_those_of_the_model(several):
    for found in several:
        case = found["evaluation"]
        np.testing.assert_allclose(case["predictions"], case["called"], rtol=1e-5, atol=1e-6)


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("case", ["arrays", "generator", "dataset", "evaluation", "exported"])
def test_fit_on_two_devices_is_fit_on_one(one, mirrored, case):
    check_same(one[case], mirrored[case])


@pytest.mark.only_on("tensorflow")
def test_keras_alone_loses_batches_of_a_generator(one, mirrored):
    check_same(one["generator"], one["generator_of_keras"])
    with pytest.raises(AssertionError):
        check_same(one["generator"], mirrored["generator_of_keras"])


@pytest.mark.only_on("tensorflow")
def test_predictions_and_exports_are_those_of_the_model(one, mirrored):
    for found in (one, mirrored):
        case = found["evaluation"]
        np.testing.assert_allclose(case["predictions"], case["called"], rtol=1e-5, atol=1e-6)
        for name in ("keras", "saved_model"):
            case = found["exported"]
            np.testing.assert_allclose(case[name], case["model"], atol=1e-5)


@pytest.mark.only_on("tensorflow")
def test_batches_that_cannot_be_cut_evenly_are_refused(one, mirrored):
    assert one["unequal"] == {}
    said = mirrored["unequal"]
    assert "a last batch that is a multiple of the 2 devices" in said["arrays"]
    assert "Received: a last batch of 1" in said["arrays"]
    assert "batches must be a multiple of the 2 devices. Received: a batch of" in said["dataset"]


@pytest.mark.only_on("tensorflow")
def test_a_model_from_outside_is_refused(one, mirrored):
    assert one["elsewhere"] == ""
    assert "model must be created in the scope of its devices" in mirrored["elsewhere"]


@pytest.mark.only_on("tensorflow")
def test_replicas_draw_masks_of_their_own_from_one_seed(one, mirrored):
    seen, states = mirrored["masks"]
    drawn = [tuple(mask[0]) for step in seen for mask in step]
    assert len(set(drawn)) == 6 and states[0] == states[1]
    (first, _, _), _ = one["masks"]
    assert tuple(first[0][0]) == drawn[0]  # those of the first device

"""Plain `fit`, `evaluate`, `predict` and export do the same on several devices as on one.

The numbers come from `plain_fit`, a program that runs the same on one device, on two logical CPUs
of TensorFlow, and in two processes.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from processes import environments, forced_devices, run_together

BACKEND = keras.backend.backend()
PROGRAM = Path(__file__).with_name("plain_fit.py")
CASES = (
    "once",
    "arrays",
    "generator",
    "dataset",
    "evaluation",
)  # the first one runs before any seed is set
OF_TENSORFLOW = ("generator_of_keras", "unequal", "elsewhere", "exported", "masks")

# The other backends have tests of their own for processes; these take a minute there.
in_processes = pytest.mark.usefixtures("several") if BACKEND == "jax" else pytest.mark.slow


def run(folder, name, devices, cases, several=({},)):
    """The results of each process in each case."""
    outs = [folder / f"{name}{number}.json" for number in range(len(several))]
    ended = run_together([[sys.executable, PROGRAM, devices, out, *cases] for out in outs], several)
    assert [code for code, _ in ended] == [0] * len(outs), ended[0][1][-3000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    more = OF_TENSORFLOW if BACKEND == "tensorflow" else ()
    return run(tmp_path_factory.mktemp("one"), "one", "one", (*CASES, *more))[0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    return run(tmp_path_factory.mktemp("all"), "all", "all", (*CASES[1:], *OF_TENSORFLOW))[0]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two processes; on JAX each has two devices."""
    flags = forced_devices(2) if BACKEND == "jax" else {}
    return run(tmp_path_factory.mktemp("two"), "two", "auto", CASES, environments(**flags))


def check_same(one, other):
    assert one.keys() == other.keys()
    for name, wanted in one.items():
        np.testing.assert_allclose(other[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@in_processes
@pytest.mark.parametrize("case", ["arrays", "generator", "dataset", "evaluation"])
def test_fit_in_two_processes_equals_fit_in_one(one, several, case):
    for found in several:
        check_same(one[case], found[case])


@in_processes
def test_two_processes_that_shuffle_use_each_sample_once(one, several):
    everything = [float(np.mean(2.0 ** np.arange(16)))] * 3
    for found in (one, *several):
        losses = {name: value for name, value in found["once"].items()}
        if BACKEND == "torch" and found is not one:
            said = losses.pop("dataset")
            assert "batch must be the same on all processes" in said
        for found_losses in losses.values():
            np.testing.assert_allclose(found_losses, everything, rtol=1e-6)


@in_processes
def test_predictions_in_two_processes_equal_the_models(several):
    for found in several:
        case = found["evaluation"]
        np.testing.assert_allclose(case["predictions"], case["called"], rtol=1e-5, atol=1e-6)


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("case", ["arrays", "generator", "dataset", "evaluation", "exported"])
def test_fit_on_two_devices_equals_fit_on_one(one, mirrored, case):
    check_same(one[case], mirrored[case])


@pytest.mark.only_on("tensorflow")
def test_keras_alone_loses_batches_of_a_generator(one, mirrored):
    check_same(one["generator"], one["generator_of_keras"])
    with pytest.raises(AssertionError):
        check_same(one["generator"], mirrored["generator_of_keras"])


@pytest.mark.only_on("tensorflow")
def test_predictions_and_exports_equal_the_models(one, mirrored):
    for found in (one, mirrored):
        case = found["evaluation"]
        np.testing.assert_allclose(case["predictions"], case["called"], rtol=1e-5, atol=1e-6)
        for name in ("keras", "saved_model"):
            case = found["exported"]
            np.testing.assert_allclose(case[name], case["model"], atol=1e-5)


@pytest.mark.only_on("tensorflow")
def test_batches_that_cannot_be_split_evenly_are_refused(one, mirrored):
    assert one["unequal"] == {}
    said = mirrored["unequal"]
    assert "a last batch that is a multiple of the 2 devices" in said["arrays"]
    assert "Received: a last batch of 1" in said["arrays"]
    assert "batches must be a multiple of the 2 devices. Received: a batch of" in said["dataset"]


@pytest.mark.only_on("tensorflow")
def test_model_from_outside_the_scope_is_refused(one, mirrored):
    assert one["elsewhere"] == ""
    assert "model must be created in the scope of its devices" in mirrored["elsewhere"]


@pytest.mark.only_on("tensorflow")
def test_replicas_draw_different_masks_from_one_seed(one, mirrored):
    seen, states = mirrored["masks"]
    drawn = [tuple(mask[0]) for step in seen for mask in step]
    assert len(set(drawn)) == 6 and states[0] == states[1]
    (first, _, _), _ = one["masks"]
    assert tuple(first[0][0]) == drawn[0]  # as on the first device

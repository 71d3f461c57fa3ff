"""Plain `fit`, `evaluate`, `predict` and export on two devices of TensorFlow are those of one.

The numbers come from `strategy_fit`, a program that does the same on one device and on two.
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

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="of tf.distribute alone"
)

PROGRAM = Path(__file__).with_name("strategy_fit.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the cases came to, on one device and on two."""
    folder = tmp_path_factory.mktemp("fit")
    environment = {**os.environ, "PYTHONPATH": str(trainee.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    results = {}
    for devices in ("one", "all"):
        child = subprocess.run(
            [sys.executable, PROGRAM, devices, folder / devices],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-3000:]
        results[devices] = json.loads((folder / devices).read_text())
    return results


def check_same(one, two):
    assert one.keys() == two.keys()
    for name, wanted in one.items():
        np.testing.assert_allclose(two[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", ["arrays", "generator", "evaluation", "exported"])
def test_fit_on_two_devices_is_fit_on_one(found, case):
    check_same(found["one"][case], found["all"][case])


def test_keras_alone_loses_batches_of_a_generator(found):
    check_same(found["one"]["generator"], found["one"]["generator_of_keras"])
    with pytest.raises(AssertionError):
        check_same(found["one"]["generator"], found["all"]["generator_of_keras"])


def test_each_sample_is_evaluated_once(found):
    for one in found.values():
        case = one["evaluation"]
        np.testing.assert_allclose(case["predictions"], case["called"], rtol=1e-5, atol=1e-6)


def test_exports_predict_what_the_model_does(found):
    for one in found.values():
        for name in ("keras", "saved_model"):
            np.testing.assert_allclose(one["exported"][name], one["exported"]["model"], atol=1e-5)


def test_batches_that_cannot_be_cut_evenly_are_refused(found):
    assert found["one"]["unequal"] == {}
    said = found["all"]["unequal"]
    assert "a last batch that is a multiple of the 2 devices" in said["arrays"]
    assert "Received: a last batch of 1" in said["arrays"]
    assert "batches must be a multiple of the 2 devices. Received: a batch of" in said["dataset"]


def test_a_model_from_outside_is_refused(found):
    assert found["one"]["elsewhere"] == ""
    assert "model must be made in the scope of its devices" in found["all"]["elsewhere"]


def test_replicas_draw_masks_of_their_own_from_one_seed(found):
    seen, states = found["all"]["masks"]
    drawn = [tuple(mask[0]) for step in seen for mask in step]
    assert len(set(drawn)) == 6 and states[0] == states[1]
    (first, _, _), _ = found["one"]["masks"]
    assert tuple(first[0][0]) == drawn[0]  # those of the first device

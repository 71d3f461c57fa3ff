"""Optimizers under tf.distribute do the same as on one device.

The numbers come from `strategy_steps`, a program that compares two devices with one.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import trainee
from processes import environments, run_together

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from keras_vit.train.distribution.tensorflow_optimizer import for_strategy

pytestmark = pytest.mark.only_on("tensorflow")

STEPS = Path(__file__).with_name("strategy_steps.py")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The differences between two devices and one, for two optimizers and a `fit`."""
    return _compare(tmp_path_factory.mktemp("steps") / "out.json", "adamw", "lamb", "fit")


def _compare(out, *cases):
    ((code, said),) = run_together([[sys.executable, STEPS, out, *cases]])
    assert code == 0, said[-3000:]
    return json.loads(out.read_text())


def _check(case):
    assert case["apart"] < 1e-6, case
    assert not case["copies_differ"]


def _check_overflow(case):
    """One of eight batches was skipped. The scale doubled after two good ones, three times."""
    assert case["iteration"] == 7
    assert case["dynamic_scale"] == 2.0**15 * 2 / 2 * 2 * 2


def test_accumulation_clip_average_and_scale_agree_with_one_device(compared):
    _check(compared["adamw"])
    _check_overflow(compared["adamw"])


def test_keras_alone_cannot_accumulate(compared):
    assert "merge_call" in compared["adamw, Keras alone"]


def test_clip_and_scale_without_accumulation_agree_with_one_device(compared):
    _check(compared["lamb"])
    _check_overflow(compared["lamb"])


def test_keras_alone_clips_each_replica_and_misses_an_overflow(compared):
    assert 1e-4 < compared["lamb, Keras alone, before the overflow"]["apart"] < 1
    assert compared["lamb, Keras alone"]["apart"] == float("inf")


def test_run_resumes_with_another_number_of_devices(compared):
    assert compared["adamw, moved"]["apart"] < 1e-6, compared["adamw, moved"]


def test_fit_in_half_precision_skips_a_bad_batch_everywhere(compared):
    case = compared["fit"]
    assert case["apart"] < 1e-5, case  # the gradients are float16, summed in another order
    assert case["iteration"] == 7
    assert case["dynamic_scale"] == 2.0**14


@pytest.mark.slow
def test_sgd_and_muon_agree_with_one_device(tmp_path):
    compared = _compare(tmp_path / "out.json", "sgd", "muon")
    _check(compared["sgd"])
    _check(compared["muon"])
    _check_overflow(compared["muon"])


@pytest.mark.slow
def test_two_workers_accumulate_clip_and_average_as_one_device():
    settings = (
        "optimizer.accumulate=2",
        "optimizer.global_clipnorm=0.1",
        "optimizer.ema_momentum=0.9",
    )
    (one,) = trainee.run(trainee.Plan(settings=settings))
    workers = trainee.run(trainee.Plan("auto", settings=settings), environments())
    for worker in workers:
        trainee.check_same(worker, one)
    assert [worker.facts["processes"] for worker in workers] == [2, 2]


def test_for_strategy_keeps_optimizers_that_keras_handles():
    optimizer = keras.optimizers.AdamW(0.1, use_ema=True)
    assert for_strategy(optimizer) is optimizer
    assert type(optimizer) is keras.optimizers.AdamW
    accumulating = keras.optimizers.AdamW(0.1, gradient_accumulation_steps=2)
    assert for_strategy(accumulating) is accumulating
    assert type(accumulating) is not keras.optimizers.AdamW


def test_for_strategy_scales_the_loss_once():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    inner = keras.optimizers.SGD(0.1)
    optimizer = for_strategy(inner, loss_scale=True)
    model.compile(optimizer, "mse")
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer is optimizer
    assert optimizer.inner_optimizer is inner
    assert for_strategy(optimizer, loss_scale=True) is optimizer


def test_for_strategy_refuses_an_optimizer_from_outside_the_scope():
    optimizer = keras.optimizers.SGD(0.1, clipnorm=1.0)
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        pytest.raises(ValueError, match="in the scope of the strategy"),
    ):
        for_strategy(optimizer)


def test_optimizer_must_be_built_before_the_replicas_run():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = keras.Variable([3.0, 4.0])
        optimizer = for_strategy(keras.optimizers.SGD(1.0, global_clipnorm=1.0))

        def step():
            optimizer.apply([tf.constant([30.0, 40.0])], [weight])

        with pytest.raises(ValueError, match="must be built"):
            strategy.run(step)
        optimizer.build([weight])
        strategy.run(step)
    np.testing.assert_allclose(weight.numpy(), [2.4, 3.2], rtol=1e-6)


def test_saved_model_opens_with_the_optimizer_of_keras(tmp_path):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    optimizer = for_strategy(keras.optimizers.SGD(0.1, global_clipnorm=1.0), loss_scale=True)
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 2)), np.zeros((4, 3)), verbose=0)  # also without a strategy
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(again) is keras.optimizers.LossScaleOptimizer
    assert type(again.inner_optimizer) is keras.optimizers.SGD
    assert again.inner_optimizer.global_clipnorm == 1
    assert int(again.inner_optimizer.iterations) == 1

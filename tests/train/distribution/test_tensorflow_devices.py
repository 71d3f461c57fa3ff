"""TensorFlow on several devices: two logical CPUs, and two processes on loopback."""

import json
import socket
import sys

import keras
import numpy as np
import pytest
from processes import environments, run_together
from trainee import Plan, check_same, run_in_turn

import keras_vit
from keras_vit.train import distribution
from keras_vit.train.distribution.cluster import Cluster

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from keras_vit.train.distribution import tensorflow_devices as tensorflow
from keras_vit.train.distribution import tensorflow_trainer_fixes

pytestmark = pytest.mark.only_on("tensorflow")

AVERAGED = ("adamw", ("optimizer.ema_momentum=0.9",))  # what is saved is the average

# The program of two processes. Each prints what it found as JSON; then process 1 is killed.
PAIR = """
import contextlib, json, os, signal, sys, time
from keras_vit.train import distribution
from keras_vit.train.distribution import tensorflow_trainer_fixes

seen = {}
with contextlib.ExitStack() as stack:
    if sys.argv[1] == "uncorrected":
        tensorflow_trainer_fixes.corrected = contextlib.nullcontext
    devices = stack.enter_context(distribution.scope())
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=devices.jit_compile())
    devices.prepare(model)
    if sys.argv[1] == "uncorrected":
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        print("FITTED", flush=True)
        sys.exit()
    for values in (np.uint8([1, 200]), np.int32(-7), np.float32([[0.5, np.nan]]), np.zeros((0, 2))):
        got = devices.gather(values + values.dtype.type(devices.process))
        assert got.dtype == values.dtype and got.shape == (2, *values.shape)
        np.testing.assert_array_equal(got, [values, values + values.dtype.type(1)])
    seen["evaluation"] = model.evaluate(x, y, batch_size=4, verbose=0)
    seen["plain evaluation"] = float(np.mean((model(x).numpy() - y) ** 2))
    seen["prediction"] = model.predict(x, batch_size=4, verbose=0).ravel().tolist()
    seen["plain prediction"] = model(x).numpy().ravel().tolist()
    print("SEEN" + json.dumps(seen), flush=True)

    def die(batch, logs):
        if batch == 2 and devices.process == 1 and sys.argv[1] == "late":
            time.sleep(20)
        if batch == 2 and devices.process == 1 and sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    model.fit(x, y, batch_size=4, epochs=1000, shuffle=False, verbose=0, callbacks=[callback])
"""


def run_pair(what, **extra):
    """The exit code and the output of each of the two processes."""
    return run_together([[sys.executable, "-c", PAIR, what]] * 2, environments(**extra), 200)


@pytest.fixture(scope="module")
def local():
    """Runs of one device and of two logical CPUs, in one process."""
    plans = {
        "one": Plan(logical_cpus=2),
        "two": Plan("all", logical_cpus=2),
        "one averaged": Plan("one", *AVERAGED, logical_cpus=2),
        "two averaged": Plan("all", *AVERAGED, logical_cpus=2),
        "auto": Plan("auto", logical_cpus=2),
    }
    results = run_in_turn(list(plans.values()))
    return {name: result[0] for name, result in zip(plans, results, strict=True)}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two runs of two processes, and the file that the first of them saved."""
    file = tmp_path_factory.mktemp("saved") / "model.keras"
    plans = {
        "own part": Plan("auto", own_part=True, keras_file=str(file)),
        "whole batches": Plan("auto", *AVERAGED),
    }
    results = run_in_turn(list(plans.values()), environments())
    return dict(zip(plans, results, strict=True)), file


@pytest.mark.parametrize("name", ["", " averaged"])
def test_two_devices_train_as_one_does(local, name):
    two = local["two" + name]
    check_same(two, local["one" + name])
    assert two.facts == {"kind": "mirrored", "replicas": 2, "processes": 1, "process": 0}


def test_auto_does_not_split_a_cpu(local):
    check_same(local["auto"], local["one"], 0)
    assert local["auto"].facts["kind"] == "one device"


def test_other_training_is_not_the_same(local):
    with pytest.raises(AssertionError):
        check_same(local["two"], local["one averaged"])


@pytest.mark.parametrize(
    ("name", "reference"), [("own part", "one"), ("whole batches", "one averaged")]
)
def test_two_processes_train_as_one_device_does(local, several, name, reference):
    for number, result in enumerate(several[0][name]):
        check_same(result, local[reference])
        facts = {"kind": "multi-worker mirrored", "replicas": 2, "processes": 2, "process": number}
        assert result.facts == facts


def test_saved_model_is_the_trained_one(several):
    results, file = several
    assert [path.name for path in file.parent.iterdir()] == ["model.keras"]
    saved = keras.saving.load_model(file)
    assert isinstance(saved, keras_vit.ViT)
    for weight in saved.weights:
        for result in results["own part"]:
            np.testing.assert_array_equal(weight.numpy(), result.weights[weight.path])
    apart = [
        np.abs(weight.numpy() - results["whole batches"][0].weights[weight.path]).max()
        for weight in saved.weights
    ]
    assert max(apart) > 1e-3


def test_process_that_dies_ends_the_other_with_a_message():
    (code, said), (killed, _) = run_pair("die", DISTRIBUTION_PEER_SECONDS="10")
    assert killed == -9
    assert code == 1, said[-3000:]
    assert "ConnectionError: process 0 of 2 has lost another one" in said
    assert "not heard for 10 seconds (DISTRIBUTION_PEER_SECONDS)" in said
    seen = json.loads(said.partition("SEEN")[2].partition("\n")[0])
    np.testing.assert_allclose(seen["prediction"], seen["plain prediction"], rtol=1e-5)
    np.testing.assert_allclose(seen["evaluation"], seen["plain evaluation"], rtol=1e-5)


@pytest.mark.slow
def test_process_that_is_late_ends_the_other():
    (code, said), _ = run_pair("late", DISTRIBUTION_WAIT_SECONDS="8")
    assert code == 1, said[-3000:]
    assert "did not reach a step within 8 seconds (DISTRIBUTION_WAIT_SECONDS)" in said


@pytest.mark.slow
def test_keras_still_needs_the_correction():
    for _, said in run_pair("uncorrected", DISTRIBUTION_PEER_SECONDS="10"):
        if "FITTED" in said:
            pytest.fail(
                f"Keras {keras.__version__} no longer needs tensorflow_trainer_fixes.py: remove it"
            )
        assert "Attempt to convert a value (PerReplica" in said, said[-3000:]


def test_correction_is_undone():
    def parts():
        trainer = tensorflow_trainer_fixes.trainer
        build = trainer.TensorFlowTrainer._maybe_symbolic_build
        return build, trainer.reduce_per_replica, trainer.TFEpochIterator

    before = parts()
    with tensorflow_trainer_fixes.corrected():
        inside = parts()
        with tensorflow_trainer_fixes.corrected():  # a scope in a scope
            pass
        assert parts() == inside
    assert parts() == before
    assert not set(inside) & set(before)


@pytest.mark.parametrize("version", ["3.15.1", "3.16.0.dev0"])
def test_correction_leaves_unknown_functions_unchanged(monkeypatch, caplog, version):
    monkeypatch.setattr(
        tensorflow_trainer_fixes.trainer, "reduce_per_replica", lambda values: values
    )
    monkeypatch.setattr(keras, "__version__", version)
    kept = tensorflow_trainer_fixes.trainer.reduce_per_replica
    known_wrong = version == "3.15.1"
    expected = pytest.raises(RuntimeError, match="20585") if known_wrong else caplog.at_level(30)
    with expected, tensorflow_trainer_fixes.corrected():
        assert tensorflow_trainer_fixes.trainer.reduce_per_replica is kept
    assert ("left to it, uncorrected" in caplog.text) != known_wrong


def test_port_in_use_is_an_error(monkeypatch):
    with socket.create_server(("", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        config = {
            "cluster": {"worker": [taken, "127.0.0.1:1"]},
            "task": {"type": "worker", "index": 0},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with (
            pytest.raises(OSError, match="TF_CONFIG must name a free port.*another program"),
            distribution.scope(),
        ):
            pass


def test_process_that_never_starts_is_named(monkeypatch):
    monkeypatch.setenv("DISTRIBUTION_START_SECONDS", "1")
    # Nothing listens there.
    workers = json.loads(environments()[0]["TF_CONFIG"])["cluster"]["worker"]
    missing = r"process 0 of 2 has not met process 1 \(127.0.0.1:\d+\) within 1 seconds"
    with pytest.raises(ConnectionError, match=missing):
        tensorflow._meet(Cluster(tuple(workers), 2, 0, "TF_CONFIG"))


def test_settings_that_fail_under_a_strategy_are_refused():
    devices = tensorflow.TensorFlowDevices(tf.distribute.MirroredStrategy(["CPU:0"]))
    assert devices.jit_compile() is False
    with pytest.raises(ValueError, match="jit_compile must not be True"):
        devices.jit_compile(True)
    with devices.strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution must be 1.*=2"):
        devices.prepare(model)


def test_process_with_several_devices_splits_its_batches_in_order():
    whole = tf.data.Dataset.from_tensor_slices((np.arange(12), np.arange(24).reshape(12, 2)))
    parts = list(tensorflow._split(whole.batch(6), 3).as_numpy_iterator())
    assert [x.tolist() for x, _ in parts] == [[2 * n, 2 * n + 1] for n in range(6)]
    assert [y[0, 0] for _, y in parts] == [4 * n for n in range(6)]
    (only, *_) = tensorflow._split(tf.data.Dataset.range(4).batch(4), 2).as_numpy_iterator()
    assert only.tolist() == [0, 1]


def test_gather_takes_one_part_of_each_process(monkeypatch):
    devices = tensorflow.TensorFlowDevices(tf.distribute.MirroredStrategy(["CPU:0"]))
    devices.names, devices.replicas, devices.processes = ("a", "b"), 4, 2

    def of_all(own):  # each device holds the bytes of its process
        mine = own.numpy()
        return tf.constant(np.concatenate([mine, mine, mine + 1, mine + 1]))

    monkeypatch.setattr(devices, "_all_gather", of_all)
    assert devices.gather(np.int32([5, 7])).tolist() == [[5, 7], [6, 8]]


@pytest.mark.parametrize(
    ("seeds", "taken"), [([-1, -1], 77), ([-1, 5], 5), ([5, -1], None), ([5, 5], None), ([5, 6], 0)]
)
def test_processes_agree_on_a_seed(monkeypatch, seeds, taken):
    class Two:
        calls = 0

        def gather(self, value):
            self.calls += 1
            return np.array(seeds if self.calls == 1 else [77, 78])

    given = []
    ours = None if seeds[0] < 0 else seeds[0]
    monkeypatch.setattr(tensorflow.context, "global_seed", lambda: ours)
    monkeypatch.setattr(keras.utils, "set_random_seed", given.append)
    if taken == 0:
        with pytest.raises(ValueError, match="one seed in every process. Received: 5, 6"):
            tensorflow._agree_on_a_seed(Two())
    else:
        tensorflow._agree_on_a_seed(Two())
    assert given == [taken] * bool(taken)


def test_alone_leaves_the_strategy_temporarily():
    devices = tensorflow.TensorFlowDevices(tf.distribute.MirroredStrategy(["CPU:0"]))
    with devices.active():
        assert tf.distribute.get_strategy() is devices.strategy
        with devices.alone():
            assert not tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is devices.strategy
    assert not tf.distribute.has_strategy()

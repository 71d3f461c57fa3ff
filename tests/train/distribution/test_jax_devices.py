"""JAX on several devices: four forced CPU devices, and two processes on loopback."""

import os
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import trainee
from processes import environments, forced_devices
from trainee import Plan, check_same, run_in_turn

import keras_vit

pytestmark = pytest.mark.only_on("jax")

# Two processes exchange a number again and again. In turn 20, process 1 does what argv says.
MEET = """
import os, signal, sys, threading, time
import numpy as np
from keras_vit.train import distribution

what = sys.argv[1]
os.environ["DISTRIBUTION_START_SECONDS"] = "3" if what == "alone" else "60"
os.environ["DISTRIBUTION_PEER_SECONDS"] = "10"
import keras
if what == "predict":
    import tensorflow as tf
    x = np.random.default_rng(0).standard_normal((16, 3)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x,)).batch(8)
    with distribution.scope() as devices:
        # No seed is set: the processes agree on one.
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        wanted = x @ keras.ops.convert_to_numpy(model.weights[0])
        devices.prepare(model)
        np.testing.assert_allclose(model.predict(batches, verbose=0), wanted, 1e-5, 1e-5)
        print("predictions are those of one device")
        odd = batches.unbatch().batch(6)
        np.testing.assert_allclose(model.predict(odd, verbose=0), wanted, 1e-5, 1e-5)
        model.compile("sgd", "mse", jit_compile=devices.jit_compile())
        try:
            model.fit(x + devices.process, x[:, :2], verbose=0)
        except ValueError as error:
            assert "a batch must be the same in all processes" in str(error)
            print("another batch is refused")
    sys.exit()
with distribution.scope() as devices:
    # The timer that ends a process without peers was canceled.
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    for turn in range(30):
        if turn == 20 and devices.process == 1 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if turn == 20 and devices.process == 1 and what == "stop":
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if turn == 20 and devices.process == 1 and what == "raise":
            raise KeyError("a mistake in one process")
        if turn == 20 and devices.is_chief and what == "exit":
            sys.exit(7)
        numbers = devices.gather(np.int64(2**40 + devices.process))
        assert numbers.tolist() == [2**40, 2**40 + 1]
"""


def start(what, settings):
    environment = {**os.environ, "PYTHONPATH": str(trainee.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", MEET, what],
            env={**environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for extra in settings
    ]


@pytest.fixture(scope="module")
def four():
    """Runs of one device and of several on the same batches, in one process with four devices."""
    plans = {
        "one": Plan(),
        "all": Plan(devices="all"),
        "model:2": Plan(devices="model:2"),
        "one adamw": Plan(optimizer="adamw"),
        "model:4 adamw": Plan(devices="model:4", optimizer="adamw"),
    }
    results = run_in_turn(list(plans.values()), [forced_devices(4)])
    return {name: result[0] for name, result in zip(plans, results, strict=True)}


@pytest.mark.parametrize(
    ("name", "reference", "replicas", "kind"),
    [
        ("all", "one", 4, "data parallel"),
        ("model:2", "one", 2, "weights in 2 pieces"),
        ("model:4 adamw", "one adamw", 1, "weights in 4 pieces"),
    ],
)
def test_four_devices_compute_what_one_does(four, name, reference, replicas, kind):
    check_same(four[name], four[reference])
    assert (four[name].facts["replicas"], four[name].facts["kind"]) == (replicas, kind)
    assert four[reference].facts["kind"] == "one device"


def test_comparison_tells_two_runs_apart(four):
    with pytest.raises(AssertionError):
        check_same(four["all"], four["one adamw"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (("run.steps_per_execution=5",), "sgd"),
        (("optimizer.global_clipnorm=0.1",), "sgd"),
        (("optimizer.accumulate=2", "optimizer.ema_momentum=0.9"), "adamw"),
        ((), "muon"),
    ],
)
def test_settings_have_the_same_effect_on_four_devices(settings, optimizer):
    plans = [Plan(d, optimizer, settings) for d in ("one", "all", "model:2")]
    (one,), (parallel,), (split,) = run_in_turn(plans, [forced_devices(4)])
    check_same(parallel, one)
    check_same(split, one)


def test_two_processes_compute_what_one_device_does(four, tmp_path):
    path = tmp_path / "model.keras"
    plans = [
        Plan("auto", keras_file=str(path)),
        Plan("model:2", own_part=True),
    ]
    whole, split = run_in_turn(plans, environments(**forced_devices(2)))
    for results, replicas in ((whole, 4), (split, 2)):
        for process, result in enumerate(results):
            check_same(result, four["one"])
            facts = result.facts
            assert (facts["process"], facts["processes"], facts["replicas"]) == (
                process,
                2,
                replicas,
            )
    saved = keras.saving.load_model(path)
    assert isinstance(saved, keras_vit.ViT)
    for weight in saved.weights:
        np.testing.assert_array_equal(weight, whole[0].weights[weight.path], err_msg=weight.path)


def test_process_that_is_killed_ends_the_other():
    first, second = start("kill", environments())
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 1, said
    assert "ConnectionError: process 0 of 2 lost another one" in said
    assert second.wait(60) == -signal.SIGKILL


def test_error_in_one_process_ends_the_other():
    first, second = start("raise", environments())
    said = [child.communicate(timeout=120)[0] for child in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1), said
    assert "ConnectionError: process 0 of 2 lost another one" in said[0]
    assert "KeyError: 'a mistake in one process'" in said[1]


@pytest.mark.slow
def test_process_0_that_ends_itself_ends_the_other_with_its_code():
    said = []
    for child in start("exit", environments()):
        said.append(child.communicate(timeout=120)[0])
        assert child.returncode == 7, said
    assert "process 0 ended itself with code 7, and so does process 1 of 2" in said[1]


@pytest.mark.slow
def test_predict_gives_all_predictions_to_each_process():
    for child in start("predict", environments(**forced_devices(2))):
        said = child.communicate(timeout=120)[0]
        assert child.returncode == 0, said
        assert "predictions are those of one device" in said
        assert "another batch is refused" in said


@pytest.mark.slow
def test_process_that_does_not_answer_ends_the_other():
    first, second = start("stop", environments())
    try:
        said = first.communicate(timeout=120)[0]
        assert first.returncode == -signal.SIGABRT, said
        assert "heartbeat" in said
        assert "another task died" in said
    finally:
        second.kill()
        second.communicate()


def test_process_that_never_starts_ends_the_other():
    settings = environments()
    (first,) = start("alone", settings[:1])
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 1, said
    assert "process 0 of 2 did not meet all others at 127.0.0.1" in said
    assert "within 3 seconds" in said


def test_port_in_use_is_named():
    settings = environments()
    port = int(settings[0]["KERAS_DISTRIBUTION_JOB_ADDRESSES"].rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        (first,) = start("alone", settings[:1])
        said = first.communicate(timeout=120)[0]
    assert first.returncode == 1
    assert f"127.0.0.1:{port}: another program uses it" in said


def test_one_device_has_no_distribution():
    from keras_vit.train import distribution

    with distribution.scope("one") as devices:
        assert keras.distribution.distribution() is None
        assert (devices.kind, devices.replicas, devices.names) == ("one device", 1, ("cpu:0",))
        values = np.arange(3, dtype="int64")
        np.testing.assert_array_equal(devices.gather(values), values[None])


def test_model_n_must_divide_the_devices():
    from keras_vit.train import distribution

    with (
        pytest.raises(ValueError, match="divides the 1 devices of a process"),
        distribution.scope("model:3"),
    ):
        pass


def test_scope_restores_the_previous_distribution():
    from keras_vit.train import distribution

    former = keras.distribution.DataParallel(devices=["cpu:0"])
    keras.distribution.set_distribution(former)
    try:
        with distribution.scope("one"):
            assert keras.distribution.distribution() is None
        assert keras.distribution.distribution() is former
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize(
    ("named_by", "hosts", "visible", "expected"),
    [
        ("SLURM_PROCID", "a a b b", "", [1]),
        ("SLURM_PROCID", "a a b b", "0,1", [1]),
        ("SLURM_PROCID", "a a b b", "3", None),
        ("SLURM_PROCID", "a b c d", "", None),
        ("KERAS_DISTRIBUTION_PROCESS_ID", "a a b b", "", [1]),
        ("KERAS_DISTRIBUTION_PROCESS_ID", "a", "", None),
    ],
)
def test_process_that_shares_a_machine_takes_one_gpu(named_by, hosts, visible, expected):
    from keras_vit.train.distribution.cluster import Cluster
    from keras_vit.train.distribution.jax_devices import _local_device_ids

    addresses = tuple(f"{host}:{2000 + i}" for i, host in enumerate(hosts.split()))
    several = Cluster(addresses, 4, 1, named_by, local=1)
    assert _local_device_ids(several, {"CUDA_VISIBLE_DEVICES": visible}) == expected

"""Runtimes and `fused` answer many threads at once, each with the rows of its own images.

The slow test asks for KERAS_VIT_SOAK predictions of each, and looks at the memory too.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conformance import images, tiny_model

import keras_vit
from benchmarks.serve import machine_memory
from keras_vit import runtime

SOAK = int(os.environ.get("KERAS_VIT_SOAK", "4000"))
GROWTH = 25.0
"""Megabytes that a process may grow by after a quarter of the predictions."""
FREE, ON_TENSORFLOW = pytest.mark.backend_free, pytest.mark.only_on("tensorflow")
ENGINES = {
    "keras": (),
    "onnx": FREE,
    "openvino": FREE,
    "tflite": FREE,
    "saved_model": ON_TENSORFLOW,
    "fused": ON_TENSORFLOW,
}
COUNT = 12


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in ENGINES.items()])
def logits(request, tmp_path):
    """From images to logits, by one engine."""
    model, name = tiny_model(), request.param
    if name == "fused":
        return keras_vit.fused(model)
    if name == "keras":
        return runtime.KerasRuntime(model).logits
    suffix = {"openvino": ".xml", "saved_model": ""}.get(name, f".{name}")
    options = {"output": "logits"} if name == "tflite" else {}
    getattr(keras_vit, f"export_{name}")(model, tmp_path / f"a{suffix}", **options)
    return runtime.open(tmp_path / f"a{suffix}").logits


def ask(logits, threads, predictions):
    """How far answers are from those of one thread, at most, and those of other images at least."""
    x = images(tiny_model().config, COUNT)
    alone = [np.asarray(logits(x[i : i + 1]))[0] for i in range(COUNT)]

    def client(seed):
        rng, worst, others = np.random.default_rng(seed), 0.0, np.inf
        for _ in range(predictions // threads):
            chosen = rng.integers(0, COUNT, rng.integers(1, 4))
            found = np.asarray(logits(x[chosen]))
            wanted = np.stack([alone[i] for i in chosen])
            worst = max(worst, np.abs(found - wanted).max())
            others = min(others, np.abs(found[0] - alone[(chosen[0] + 1) % COUNT]).max())
        return worst, others

    with ThreadPoolExecutor(threads) as pool:
        found = np.array(list(pool.map(client, range(threads))))
    return found[:, 0].max(), found[:, 1].min()


def test_each_thread_gets_its_own_answers(logits):
    worst, others = ask(logits, 8, 240)
    assert worst < 1e-5 < 1e-2 < others


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("threads", [1, 16])
def test_answers_do_not_change_and_memory_is_flat(logits, threads):
    ask(logits, threads, SOAK // 4)
    before = machine_memory(os.getpid())
    worst, others = ask(logits, threads, SOAK)
    after = machine_memory(os.getpid())
    print(f"{SOAK} predictions, {threads} threads: {before:.1f} MB, then {after:.1f} MB")
    assert worst < 1e-5 < 1e-2 < others
    assert after - before < GROWTH

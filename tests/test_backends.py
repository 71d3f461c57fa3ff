"""The same weights on TensorFlow, JAX and PyTorch, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BACKENDS = ("tensorflow", "jax", "torch")

WORK = """
import sys, numpy as np, keras
sys.path.insert(0, "tests")
from conformance import KINDS, arrays, images, tiny_model, to_numpy
from keras_vit import ViT
action, folder, source = sys.argv[1:]
backend = keras.backend.backend()
if action == "save":
    for kind in KINDS:
        model = tiny_model(kind)
        model.save_weights(f"{folder}/{backend}.{kind}.weights.h5")
        np.save(f"{folder}/{backend}.{kind}.npy", to_numpy(model(images(model.config))))
else:
    for kind in KINDS:
        model, saved = ViT(KINDS[kind]), arrays(tiny_model(kind))
        assert any((value != saved[path]).any() for path, value in arrays(model).items())
        model.load_weights(f"{folder}/{source}.{kind}.weights.h5")
        for path, value in arrays(model).items():
            np.testing.assert_array_equal(value, saved[path])
"""


def start(backend, action, folder, source=""):
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": "."}
    return subprocess.Popen(
        [sys.executable, "-c", WORK, action, str(folder), source],
        env=environment,
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes):
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output[-3000:]


@pytest.mark.backend_free
def test_backends_agree(tmp_path):
    """Logits within 1e-5 of one another; weights saved on one load bit for bit on the next."""
    backends = [b for b in BACKENDS if importlib.util.find_spec(b)]
    if len(backends) < 2:
        pytest.skip("only one backend is installed")
    finish([start(b, "save", tmp_path) for b in backends])
    kinds = sorted(p.name.split(".")[1] for p in tmp_path.glob("tensorflow.*.npy"))
    assert len(kinds) > 10
    for kind in kinds:
        first, *others = (np.load(tmp_path / f"{b}.{kind}.npy") for b in backends)
        for other in others:
            np.testing.assert_allclose(other, first, atol=1e-5 * max(1, np.abs(first).max()))
    assert np.abs(first).max() > 0.1
    rotated = backends[1:] + backends[:1]
    finish([start(a, "load", tmp_path, b) for a, b in zip(backends, rotated, strict=True)])

"""An export through the C++ loader that TF Serving uses, in a process without Python TensorFlow."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_export

from keras_vit.export.saved_model.export import export_saved_model

pytestmark = pytest.mark.backend_free

LOADER = Path(__file__).with_name("c_loader.py")
IMAGES = tiny_export.images(3)
FILES = [tiny_export.picture(1), tiny_export.picture(2, "PNG", (50, 20)), tiny_export.picture(3)]
REQUESTS = {
    "serving_default": {"images": IMAGES},
    "features": {"images": IMAGES},
    "serve_bytes": {"bytes": FILES},
    "classify": {"bytes": FILES},
}


def run_alone(version, folder, requests):
    """What the child process printed, and its answers."""
    arrays = {}
    for signature, inputs in requests.items():
        for name, value in inputs.items():
            if isinstance(value, list):
                for i, data in enumerate(value):
                    arrays[f"{signature}/{name}#{i}"] = np.frombuffer(data, "uint8")
            else:
                arrays[f"{signature}/{name}"] = value
    np.savez(folder / "requests.npz", **arrays)
    done = subprocess.run(
        [sys.executable, LOADER, version, "requests.npz", "answers.npz"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "answers.npz") as file:
        return json.loads(done.stdout), {name: file[name] for name in file}


@pytest.fixture(scope="module")
def run(exported, tmp_path_factory):
    return run_alone(exported / "1", tmp_path_factory.mktemp("c_loader"), REQUESTS)


def test_loader_imports_neither_tensorflow_nor_the_package(run):
    modules = set(run[0]["modules"])
    assert {"numpy", "ctypes"} <= modules
    assert not modules & {"tensorflow", "keras", "keras_vit", "jax", "torch", "google"}


def test_loader_reads_the_signatures(run, loaded):
    import tensorflow as tf

    assert run[0]["version"] == tf.__version__
    found = {k: v for k, v in run[0]["signatures"].items() if not k.startswith("__")}
    assert set(found) == set(REQUESTS)
    for name, signature in found.items():
        theirs = loaded.model.signatures[name]
        assert set(signature["inputs"]) == set(theirs.structured_input_signature[1])
        assert set(signature["outputs"]) == set(theirs.structured_outputs)
        for kind in ("inputs", "outputs"):
            for key, (_, shape) in signature[kind].items():
                assert shape[0] == -1, f"{name} {key}: the batch is not dynamic"
    assert found["serving_default"]["inputs"] == {"images": ["float32", [-1, 24, 16, 3]]}
    assert found["serve_bytes"]["inputs"] == {"bytes": ["string", [-1]]}
    assert found["classify"]["outputs"]["labels"][0] == "string"


@pytest.mark.parametrize("signature", REQUESTS)
def test_loader_computes_what_python_does(run, loaded, signature):
    (value,) = REQUESTS[signature].values()
    expected = loaded(signature, value)
    assert expected
    for name, array in expected.items():
        found = run[1][f"{signature}/{name}"]
        if array.dtype == object:
            assert found.tolist() == [[v.decode() for v in row] for row in array.tolist()]
            continue
        assert found.dtype == array.dtype and found.shape == array.shape
        scale = np.ptp(array)
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-6 * scale)
        # The pictures differ, and so must the answers.
        assert abs(found - found[::-1]).max() > 1e-3 * scale


@pytest.mark.slow
def test_loader_computes_what_python_does_in_bfloat16_from_pixels(tmp_path):
    import tensorflow as tf

    path = tmp_path / "m"
    export_saved_model(tiny_export.model(), path, dtype="bfloat16", images="uint8")
    pixels = np.random.default_rng(0).integers(0, 256, IMAGES.shape, "uint8")
    printed, found = run_alone(path / "1", tmp_path, {"serving_default": {"images": pixels}})
    assert not set(printed["modules"]) & {"tensorflow", "keras", "keras_vit"}
    signature = tf.saved_model.load(str(path / "1")).signatures["serving_default"]
    expected = signature(images=tf.constant(pixels))["logits"].numpy()
    logits = found["serving_default/logits"]
    scale = np.ptp(expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3 * scale)
    assert abs(logits - expected[::-1]).max() > 0.05 * scale

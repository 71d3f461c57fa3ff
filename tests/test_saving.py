"""Files that come back bit for bit, in a process that knows nothing but `import keras_vit`."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from conformance import KINDS, TINY, images, randomise, run, tiny_model

from keras_vit import ViT

LOAD = """
import sys, numpy as np, keras, keras_vit
folder = sys.argv[1]
x = np.load(folder + "/x.npy")
for name in sys.argv[2:]:
    model = keras.saving.load_model(f"{folder}/{name}.keras", safe_mode=True)
    np.save(f"{folder}/{name}.again.npy", keras.ops.convert_to_numpy(model(x)))
    print(name, type(model).__module__, model.config.depth)
"""


def in_a_fresh_process(folder, *names):
    """What models saved in `folder` predict when they are loaded anew."""
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), *names],
        env=environment,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [np.load(folder / f"{name}.again.npy") for name in names]


def test_keras_file_is_bitwise_the_same_in_a_fresh_process(tmp_path):
    """Plain, quantised, and with LoRA merged into it."""
    x = images(TINY)
    np.save(tmp_path / "x.npy", x)
    plain = tiny_model("registers")
    quantised = tiny_model("registers", seed=1)
    quantised.quantize("int8")
    lora = tiny_model("registers", seed=2)
    lora.enable_lora(2, ("query", "value", "mlp"))
    for v in lora.weights:
        if "lora_kernel_b" in v.path:
            v.assign(np.random.default_rng(0).normal(size=v.shape))
    models = {"plain": plain, "quantised": quantised, "lora": lora}
    before = {}
    for name, model in models.items():
        before[name] = run(model, x)
        model.save(tmp_path / f"{name}.keras")
    after = dict(zip(models, in_a_fresh_process(tmp_path, *models), strict=True))
    np.testing.assert_array_equal(after["plain"], before["plain"])
    np.testing.assert_array_equal(after["quantised"], before["quantised"])
    # Keras adds the LoRA product into the kernel as it saves: the same sum in another order.
    np.testing.assert_allclose(after["lora"], before["lora"], rtol=1e-5, atol=1e-4)
    assert np.abs(after["plain"] - before["lora"]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_file_is_bitwise_the_same(kind, tmp_path):
    model, other = tiny_model(kind), tiny_model(kind, seed=7)
    x = images(model.config)
    y = run(model, x)
    assert np.abs(run(other, x) - y).max() > 1e-3
    model.save_weights(tmp_path / "m.weights.h5")
    other.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(run(other, x), y)


def test_weights_file_of_another_shape_is_refused(tmp_path):
    tiny_model().save_weights(tmp_path / "m.weights.h5")
    for changes in ({"width": 40}, {"depth": 3}, {"num_classes": 4}):
        with pytest.raises(ValueError):
            ViT(TINY.replace(**changes)).load_weights(tmp_path / "m.weights.h5")


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_int8_is_near_the_model_and_survives(dtype, tmp_path):
    model = randomise(ViT(TINY, dtype=dtype), scale=0.2)
    x = images(TINY, 8)
    exact = run(model, x)
    model.quantize("int8")
    quantised = run(model, x)
    assert 0 < np.abs(quantised - exact).max() < 0.1 * np.abs(exact).max()
    assert model.blocks[0].attention.query_dense.quantization_mode == "int8"
    model.save(tmp_path / "q.keras")
    again = keras.saving.load_model(tmp_path / "q.keras")
    assert again.blocks[0].attention.query_dense.quantization_mode == "int8"
    assert again.blocks[0].attention.query_dense._kernel.dtype == "int8"
    np.testing.assert_array_equal(run(again, x), quantised)


def test_a_model_keeps_its_policy_name_and_flags(tmp_path):
    model = ViT(TINY.replace(labels=("a", "b", "c")), dtype="mixed_bfloat16", name="mine")
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert again.name == "mine" and again.dtype_policy.name == "mixed_bfloat16"
    assert again.config == model.config


def test_features_and_nested_models_are_saved(tmp_path):
    model = tiny_model("registers")
    grid = model.features(blocks=[0, -1], grid=True)
    inputs = keras.Input((24, 16, 3))
    nested = keras.Model(inputs, keras.layers.Dense(2)(model(inputs)))
    x = images(model.config)
    for i, saved in enumerate((grid, nested)):
        saved.save(tmp_path / f"{i}.keras")
        again = keras.saving.load_model(tmp_path / f"{i}.keras")
        expected, got = (run(m, x) for m in (saved, again))
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_array_equal(a, b)

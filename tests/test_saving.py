"""Saved models are loaded bit for bit, also in a process that only imports keras_vit."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from conformance import (
    KINDS,
    TINY,
    arrays,
    check_flags,
    flags,
    freeze_some,
    images,
    randomize,
    run,
    tiny_model,
)

from keras_vit import ViT, layers

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
    """What models saved in `folder` predict after they are loaded in a new process."""
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
    """Plain, quantized, and with LoRA merged into it."""
    x = images(TINY)
    np.save(tmp_path / "x.npy", x)
    plain = tiny_model("registers")
    quantized = tiny_model("registers", seed=1)
    quantized.quantize("int8")
    lora = tiny_model("registers", seed=2)
    lora.enable_lora(2, ("query", "value", "mlp"))
    for v in lora.weights:
        if "lora_kernel_b" in v.path:
            v.assign(np.random.default_rng(0).normal(size=v.shape))
    models = {"plain": plain, "quantized": quantized, "lora": lora}
    before = {}
    for name, model in models.items():
        before[name] = run(model, x)
        model.save(tmp_path / f"{name}.keras")
    after = dict(zip(models, in_a_fresh_process(tmp_path, *models), strict=True))
    np.testing.assert_array_equal(after["plain"], before["plain"])
    np.testing.assert_array_equal(after["quantized"], before["quantized"])
    # Keras adds the LoRA product to the kernel when it saves: the same sum in another order.
    np.testing.assert_allclose(after["lora"], before["lora"], rtol=1e-5, atol=1e-4)
    assert np.abs(after["plain"] - before["lora"]).max() > 1e-2


def test_weights_file_is_bitwise_the_same(tmp_path):
    """Of one kind: test_backends.py loads every kind's file, on another backend at that."""
    model, other = tiny_model("registers"), tiny_model("registers", seed=7)
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


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "paper"),
        ("mixed_bfloat16", "paper"),
        ("float32", "swiglu"),
        ("float32", "map"),
        ("mixed_bfloat16", "distilled"),
    ],
)
def test_int8_is_close_to_the_model_and_is_saved(dtype, kind, tmp_path):
    model = randomize(ViT(KINDS[kind], dtype=dtype), scale=0.2)
    x = images(TINY, 8)
    exact = run(model, x)
    model.quantize("int8")
    quantized = run(model, x)
    assert 0 < np.abs(quantized - exact).max() < 0.1 * np.abs(exact).max()
    assert model.blocks[0].attention.query_dense.quantization_mode == "int8"
    model.save(tmp_path / "q.keras")
    again = keras.saving.load_model(tmp_path / "q.keras")
    assert again.blocks[0].attention.query_dense.quantization_mode == "int8"
    assert again.blocks[0].attention.query_dense._kernel.dtype == "int8"
    np.testing.assert_array_equal(run(again, x), quantized)


def test_model_keeps_its_dtype_policy_and_name(tmp_path):
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


# -- what trains


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts_stay_frozen(kind, tmp_path):
    model = freeze_some(ViT(KINDS[kind]))
    again = check_flags(model, tmp_path / "m.keras")
    assert again.blocks[0].trainable is False and again.blocks[0].mlp.dense_1.trainable is True
    larger = model.resized((48, 40))
    assert flags(larger) == flags(model)


def _probe(model):
    for layer in model.layers:
        layer.trainable = layer.name == "head"


def _all_but_the_head(model):
    model.trainable = False
    model.get_layer("head").trainable = True  # a model around this one still trains it


def _all(model):
    model.trainable = False


def _int8(model):
    freeze_some(model).quantize("int8")


@pytest.mark.backend_free
@pytest.mark.parametrize("change", [_probe, _all_but_the_head, _all, _int8])
def test_trainable_flags_are_restored(change, tmp_path):
    model = ViT(KINDS["registers"])
    change(model)
    check_flags(model, tmp_path / "m.keras")


@pytest.mark.backend_free
def test_config_has_only_flags_that_differ():
    model = ViT(TINY)
    assert "trainable_parts" not in model.get_config()
    model.blocks[1].mlp.trainable = False
    assert model.get_config()["trainable_parts"] == {"encoder_block_1/mlp": False}
    model.blocks[1].mlp.dense_2.kernel.trainable = True
    model.attached = keras.layers.Dense(2)  # not in the config, so neither is its flag
    model.attached.trainable = False
    assert model.get_config()["trainable_parts"] == {
        "encoder_block_1/mlp": False,
        "encoder_block_1/mlp/dense_2/kernel": True,
    }


def test_lora_is_loaded_merged_with_frozen_kernels(tmp_path):
    model = ViT(TINY)
    model.enable_lora(2, ("query", "mlp"))
    trained = [v.path for v in model.trainable_weights]
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert [v.path for v in again.trainable_weights] == [p for p in trained if "lora" not in p]
    check_flags(again, tmp_path / "again.keras")  # and stays so when it is saved once more
    again.enable_lora(2, ("query", "mlp"))
    assert [v.path for v in again.trainable_weights] == trained


@pytest.mark.backend_free
def test_flag_from_the_constructor_reaches_every_weight():
    """A model around ours reads the flags of the weights, which Keras' constructor does not set."""
    inputs = keras.Input(TINY.input_shape)
    outer = keras.Model(
        inputs, keras.layers.Dense(2, name="new")(ViT(TINY, trainable=False)(inputs))
    )
    assert [v.path for v in outer.trainable_weights] == ["new/kernel", "new/bias"]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"block": False, "head": False, "head/x": True}, "name.*: 'block', 'head/x'$"),
        ({"head": "no"}, "map paths.*'no'"),
        (["head"], "map paths.*'head'"),
        (None, "map paths.*None"),
    ],
)
def test_flags_of_unknown_parts_are_refused(parts, message):
    with pytest.raises(ValueError, match=f"trainable_parts must {message}"):
        ViT.from_config({**ViT(TINY).get_config(), "trainable_parts": parts})


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [freeze_some, _probe])
def test_fit_continues_from_a_file_as_if_never_saved(freeze, tmp_path):
    model = tiny_model("registers")
    freeze(model)
    x, y = images(model.config, 4), np.array([0, 1, 2, 0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss)
    start = arrays(model)
    keep = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")
    model.fit(x, y, epochs=2, shuffle=False, callbacks=[keep], verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = keras.saving.load_model(tmp_path / "m.keras")
    assert not [w for w in caught if "optimizer" in str(w.message)]
    for one in (model, again):
        one.fit(x, y, epochs=2, shuffle=False, verbose=0)
    wanted, got = arrays(model), arrays(again)
    for path in wanted:
        np.testing.assert_array_equal(got[path], wanted[path], err_msg=path)
    for ours, theirs in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(v) for v in (ours, theirs)))
    frozen = {v.path for v in model.non_trainable_weights}
    assert frozen and all(np.array_equal(got[path], start[path]) for path in frozen)
    assert any(not np.array_equal(got[path], start[path]) for path in got if path not in frozen)


# -- the layers in a model that is not a ViT


@pytest.mark.backend_free
def test_blocks_in_another_model_keep_their_flags(tmp_path):
    """Keras alone loses them, even of a block that is frozen as a whole."""
    vit = freeze_some(ViT(KINDS["patch_norm"]))
    features = vit.features()
    model = keras.Model(features.input, keras.layers.Dense(2, name="new")(features.output))
    wanted = flags(model)
    model.save(tmp_path / "m.keras")
    for again in (
        keras.saving.load_model(tmp_path / "m.keras"),
        keras.models.model_from_json(model.to_json()),
        keras.models.clone_model(model),
    ):
        assert flags(again) == wanted
    assert flags(keras.models.clone_model(vit)) == flags(vit)


@pytest.mark.backend_free
def test_frozen_backbone_in_another_model_stays_frozen(tmp_path):
    features = ViT(TINY).features()
    features.trainable = False
    model = keras.Model(features.input, keras.layers.Dense(2, name="new")(features.output))
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert [v.path for v in again.trainable_weights] == ["new/kernel", "new/bias"]
    assert flags(again) == flags(model)


@pytest.mark.backend_free
@pytest.mark.parametrize("part", ["query", "attention_output", "key_norm"])
def test_attention_keeps_the_flags_of_its_sublayers(part):
    layer = layers.MultiHeadAttention(2, 3, qk_norm=True, name="a")
    x = np.ones((1, 4, 6), "float32")
    layer(x, x)
    sub = next(p for p in layer._flatten_layers() if p.name == part)
    sub.trainable = False
    config = json.loads(json.dumps(layer.get_config()))
    assert config["trainable_parts"] == {part: False}
    again = layers.MultiHeadAttention.from_config(config)
    assert again.get_config()["trainable_parts"] == {part: False}  # also before it is built
    again(x, x)
    assert flags(again) == flags(layer)
    assert again.get_config() == layer.get_config()

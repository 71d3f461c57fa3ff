"""from_pretrained and inspect: differences, heads, sizes, JSON and shards."""

import json
import logging

import keras
import numpy as np
import pytest
import weights_sources as sources
from weights_sources import bare, images, logits

import keras_vit
from keras_vit.weights.load import inspect

pytestmark = pytest.mark.usefixtures("torchvision")


@pytest.fixture(scope="module")
def arrays():
    return sources.state(sources.timm_vit())


def test_load_lists_every_difference_in_one_error(tmp_path, arrays):
    broken = dict(arrays)
    del broken["norm.weight"], broken["blocks.1.mlp.fc2.bias"]
    broken["surprise"] = np.ones(2, "float32")
    broken["blocks.1.norm1.weight"] = np.ones(7, "float32")
    broken["head.bias"] = np.array([1, np.nan, np.inf], "float32")
    with pytest.raises(ValueError) as error:
        keras_vit.from_pretrained(bare(tmp_path, broken), num_heads=5)
    text = str(error.value)
    assert "missing: 'norm.weight'" in text and "missing: 'blocks.1.mlp.fc2.bias'" in text
    assert "extra: 'surprise'" in text
    assert "wrong shape: 'blocks.1.norm1.weight' (7,), expected (20,)" in text
    assert "head.bias: 1 NaN and 1 Inf among 3 values" in text
    found = inspect(tmp_path / "vit.safetensors", num_heads=5)
    assert found.extra == ("surprise",) and len(found.missing) == 2 and len(found.misshaped) == 1


def test_load_refuses_values_that_are_not_finite(tmp_path, arrays):
    broken = {**arrays, "cls_token": arrays["cls_token"] * np.float32(np.nan)}
    with pytest.raises(ValueError, match="cls_token: 20 NaN"):
        keras_vit.from_pretrained(bare(tmp_path, broken), num_heads=5)


def test_load_reads_no_array_when_shapes_are_wrong(tmp_path, arrays, monkeypatch):
    from keras_vit.weights.files.arrays import Arrays

    read = []
    real = Arrays.__getitem__
    monkeypatch.setattr(Arrays, "__getitem__", lambda s, n: read.append(n) or real(s, n))
    wrong = {**arrays, "head.weight": np.ones((3, 19), "float32")}
    with pytest.raises(ValueError, match="head.weight"):
        keras_vit.from_pretrained(bare(tmp_path, wrong), num_heads=5)
    assert "head.weight" not in read
    inspect(bare(tmp_path, arrays), num_heads=5)
    assert len(read) == len(arrays) - 1  # inspect read none


def test_load_gives_every_weight_and_every_array_one_place(tmp_path, arrays):
    model = keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)
    found = inspect(tmp_path / "vit.safetensors", num_heads=5)
    assert set(found.loaded) == set(arrays) and not found.dropped
    assert found.parameters == model.count_params() == sum(a.size for a in arrays.values())
    assert found.num_arrays == len(arrays) and found.nbytes == 4 * found.parameters


def test_load_new_head_is_zero_and_said(tmp_path, arrays, caplog):
    path = bare(tmp_path, arrays)
    with caplog.at_level(logging.INFO, "keras_vit"):
        model = keras_vit.from_pretrained(path, num_heads=5, num_classes=7)
    assert "new and untrained: 7 classes" in caplog.text and "head.weight" in caplog.text
    assert not np.any(logits(model, images()))
    assert set(inspect(path, num_heads=5, num_classes=7).dropped) == {"head.weight", "head.bias"}
    found = inspect(path, num_heads=5, labels=[*"abcdefg"])
    assert found.config.num_classes == 7 and found.config.labels == (*"abcdefg",)
    assert np.any(logits(keras_vit.from_pretrained(path, num_heads=5, num_classes=3), images()))


def test_load_without_head_gives_features(tmp_path, arrays):
    path = bare(tmp_path, arrays)
    features = keras_vit.from_pretrained(path, num_heads=5, num_classes=0)
    model = keras_vit.from_pretrained(path, num_heads=5)
    expected = logits(features, images()) @ arrays["head.weight"].T + arrays["head.bias"]
    np.testing.assert_allclose(logits(model, images()), expected, atol=1e-5)
    dropped = inspect(path, num_heads=5, num_classes=0).dropped
    assert set(dropped) == {"head.weight", "head.bias"}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 25}, "width must be 20, as in the checkpoint"),
        ({"depth": 1}, "depth must be 2, as in the checkpoint"),
        ({"depth": 3}, "depth must be 2, as in the checkpoint. Received: depth=3, in .*'$"),
        ({"layer_scale": 0.1}, "missing"),
        ({"class_token": False, "pooling": "mean"}, "extra: 'cls_token'"),
        ({"mlp_dim": 30}, "mlp_dim must be 28"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_load_fields_that_contradict_the_arrays_are_an_error(tmp_path, arrays, fields, message):
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5, **fields)


def test_load_fields_of_the_model_are_taken(tmp_path, arrays):
    model = keras_vit.from_pretrained(
        bare(tmp_path, arrays), num_heads=5, drop_path=0.1, name="mine", dtype="mixed_bfloat16"
    )
    assert model.config.drop_path == 0.1 and model.name == "mine"
    assert model.get_layer("encoder_block_1").compute_dtype == "bfloat16"
    mean = keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5, pooling="mean")
    assert mean.config.pooling == "mean"


def test_load_half_precision_files(tmp_path, arrays):
    half = {name: array.astype("float16") for name, array in arrays.items()}
    model = keras_vit.from_pretrained(bare(tmp_path, half), num_heads=5)
    exact = {name: array.astype("float32") for name, array in half.items()}
    expected = keras_vit.from_pretrained(bare(tmp_path, exact, "b.safetensors"), num_heads=5)
    np.testing.assert_array_equal(logits(model, images()), logits(expected, images()))


def test_load_grid_of_a_bare_file_is_square_unless_it_cannot_be(tmp_path):
    source = sources.timm_vit(img_size=(24, 16))
    path = bare(tmp_path, sources.state(source))
    with pytest.raises(ValueError, match="image_size must be the checkpoint's own"):
        keras_vit.from_pretrained(path, num_heads=5)
    model = keras_vit.from_pretrained(path, num_heads=5, image_size=(24, 16))
    assert model.config.grid == (3, 2)


@pytest.mark.backend_free
def test_load_unknown_names_are_shown(tmp_path):
    path = bare(tmp_path, {"layer1.conv.weight": np.ones(3, "float32")})
    with pytest.raises(ValueError, match="names of one of google.*layer1.conv.weight"):
        keras_vit.from_pretrained(path)


def test_load_config_json_of_a_stranger_is_not_read(tmp_path, arrays):
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4}}))
    with pytest.raises(ValueError, match="num_heads must be given"):
        inspect(bare(tmp_path, arrays))
    assert inspect(bare(tmp_path, arrays, "model.safetensors")).config.num_heads == 4


def test_load_sharded_folder(tmp_path, arrays):
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    weight_map = {}
    for file, held in shards.items():
        sources.save(tmp_path / file, {name: arrays[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": 5}}))
    model = keras_vit.from_pretrained(tmp_path)
    assert model.config.num_heads == 5


def test_variants_take_weights(tmp_path, monkeypatch):
    from keras_vit import variants

    size = variants.Size(8, 20, 2, 5, 28, "here")
    monkeypatch.setitem(variants.SIZES, "vit_b16", size)
    config = {"model_args": {"num_heads": 5}}
    folder = sources.save(tmp_path / "vit", sources.state(sources.timm_vit()), config)
    model = keras_vit.vit_b16(weights=folder)
    assert model.name == "vit_b16" and model.config.num_classes == 3
    assert keras_vit.vit_b16(4, weights=str(folder), drop_path=0.1).config.drop_path == 0.1
    assert keras_vit.vit_b16(weights=folder, trainable=False).trainable_weights == []
    with pytest.raises(ValueError, match="weights must be those of a vit_b32.*width=20"):
        keras_vit.vit_b32(weights=folder)
    model.save_weights(tmp_path / "m.weights.h5")
    again = keras_vit.vit_b16(3, weights=tmp_path / "m.weights.h5", image_size=24)
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        assert np.array_equal(*map(keras.ops.convert_to_numpy, (ours, theirs))), ours.path


@pytest.mark.backend_free
def test_load_needs_no_network_client(tmp_path, arrays):
    import subprocess
    import sys

    path = bare(tmp_path, arrays)
    code = (
        "import sys, keras_vit; before = set(sys.modules);"
        f"keras_vit.from_pretrained({str(path)!r}, num_heads=5);"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "assert not new & {'torch', 'timm', 'transformers', 'flax', 'requests'}, new;"
        "assert 'keras_vit.weights.fetch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""`.weights.h5` files with the config beside them; security/ tests those that lie."""

import json

import keras
import numpy as np
import pytest
from weights_sources import TINY, images, logits, random_vit

import keras_vit
from keras_vit.weights.load import inspect

TINY_H5 = {**TINY, "image_size": (24, 16)}


def test_weights_h5_of_two_heads_gets_two_new_ones(tmp_path):
    model = random_vit(distillation_token=True, pooling="token_pair")
    model.save_weights(tmp_path / "m.weights.h5")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    same = keras_vit.from_pretrained(tmp_path / "m.weights.h5")
    new = keras_vit.from_pretrained(tmp_path / "m.weights.h5", num_classes=5)
    for saved, kept, other in zip(model.weights, same.weights, new.weights, strict=True):
        expected, found, changed = (
            keras.ops.convert_to_numpy(weight.value) for weight in (saved, kept, other)
        )
        np.testing.assert_array_equal(found, expected)
        if saved.path.startswith("head/"):
            assert changed.shape[-1] == 5 and not changed.any()
        else:
            np.testing.assert_array_equal(changed, expected)


def test_weights_h5_by_config_json_or_fields(tmp_path):
    model = random_vit(image_size=(24, 16))
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    with pytest.raises(ValueError, match="config.json"):
        keras_vit.from_pretrained(path)
    samples = images(24, 16)
    expected = logits(model, samples)
    np.testing.assert_array_equal(
        logits(keras_vit.from_pretrained(path, **TINY_H5), samples), expected
    )
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    for source in (path, tmp_path):
        again = keras_vit.from_pretrained(source)
        assert again.config == model.config
        np.testing.assert_array_equal(logits(again, samples), expected)
    larger = keras_vit.from_pretrained(path, image_size=(32, 40), num_classes=7)
    assert larger.output_shape == (None, 7) and larger.config.image_size == (32, 40)
    assert inspect(path).format == "keras" and inspect(path).parameters == model.count_params()
    with pytest.raises(ValueError, match="mlp_dim must be 28, as in the checkpoint"):
        keras_vit.from_pretrained(path, mlp_dim=30)


@pytest.mark.parametrize("variant", ["vit_so400m14", "vit_splus16"])
def test_weights_h5_of_a_factory_has_its_fields(tmp_path, variant):
    """Of class token, pooling, GELU, epsilon, positions and pixels no array of the file tells."""
    factory = getattr(keras_vit, variant)
    size = 28 if variant.endswith("14") else 32
    fields = {"depth": 1, "width": 16, "num_heads": 2, "mlp_dim": 20, "image_size": size}
    fields["num_classes"] = 3
    model = factory(**fields)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.standard_normal(weight.shape) * 0.3)
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    again = factory(weights=path, **fields)
    assert again.config == model.config
    expected = logits(model, images(size))
    np.testing.assert_array_equal(logits(again, images(size)), expected)
    other = factory(weights=path, **fields, norm_epsilon=10.0)
    assert np.abs(logits(other, images(size)) - expected).max() > 1e-3
    # A config.json beside it precedes the factory's fields.
    stated = model.config.replace(gelu="quick", pixel_mean=0.25).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert factory(weights=path, **fields).config.pixel_mean == 0.25


def test_keras_file_gets_another_head_size_and_dtype(tmp_path, caplog):
    """As for fine-tuning: the file has no head, as after training without labels."""
    model = random_vit(image_size=(24, 16), num_classes=0)
    path = tmp_path / "model.keras"
    model.save(path)
    samples = images(24, 16)
    for source in (path, tmp_path):  # the file, and the run folder that it is in
        same = keras_vit.from_pretrained(source)
        assert same.config == model.config
        np.testing.assert_array_equal(logits(same, samples), logits(model, samples))
    new = keras_vit.from_pretrained(
        path, num_classes=5, labels=list("abcde"), drop_path=0.1, image_size=32, dtype="float64"
    )
    assert "The head is new and untrained: 5 classes; the checkpoint has no head" in caplog.text
    assert new.config.labels == tuple("abcde") and new.config.drop_path == 0.1
    assert new.output_shape == (None, 5) and new.dtype_policy.name == "float64"
    values = {w.path: keras.ops.convert_to_numpy(w) for w in new.weights}
    assert not values["head/kernel"].any()
    for weight in model.weights:
        same = np.array_equal(values[weight.path], keras.ops.convert_to_numpy(weight))
        assert same == (weight.path != "position_embedding/table")  # of another grid


def test_other_weights_of_a_folder_come_before_its_keras_file(tmp_path):
    """Another library's repository may hold a model.keras that is no ViT of ours."""
    model = random_vit(image_size=(24, 16))
    keras_vit.save_pretrained(model, tmp_path, format="timm")
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    dense.save(tmp_path / "model.keras")
    same = keras_vit.from_pretrained(tmp_path)
    samples = images(24, 16)
    np.testing.assert_allclose(logits(same, samples), logits(model, samples), atol=1e-5)


def test_keras_file_that_does_not_fit_is_refused(tmp_path):
    model = random_vit(image_size=(24, 16))
    model.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="depth must be 2, as in .* depth=9, in '.*m.keras'$"):
        keras_vit.from_pretrained(tmp_path / "m.keras", depth=9)
    with pytest.raises(ValueError, match="hold exactly the expected arrays"):
        keras_vit.from_pretrained(tmp_path / "m.keras", layer_scale=0.1)
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    dense.save(tmp_path / "dense.keras")
    with pytest.raises(ValueError, match=r"path must hold a ViT.*dense\.keras, a Sequential"):
        keras_vit.from_pretrained(tmp_path / "dense.keras")
    model.get_layer("head").kernel.assign(np.nan * model.get_layer("head").kernel)
    model.save(tmp_path / "nan.keras")
    with pytest.raises(ValueError, match="head/kernel"):
        keras_vit.from_pretrained(tmp_path / "nan.keras")


@pytest.mark.backend_free
def test_damaged_keras_file_is_named(tmp_path):
    """Keras and zipfile raise errors of their own, which do not say what file they read."""
    path = tmp_path / "model.keras"
    model = random_vit(image_size=(24, 16))
    model.save(path)
    content = path.read_bytes()
    # The checksum of the weights is now wrong.
    at = content.index(keras.ops.convert_to_numpy(model.weights[0].value).tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for read in (keras_vit.from_pretrained, keras_vit.runtime.open):
        with pytest.raises(ValueError, match=r"that Keras loads.*model\.keras.*Bad CRC-32"):
            read(path)

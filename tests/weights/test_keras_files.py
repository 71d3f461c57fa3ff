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
    with pytest.raises(ValueError, match="hold exactly the expected arrays"):
        keras_vit.from_pretrained(path, mlp_dim=30)

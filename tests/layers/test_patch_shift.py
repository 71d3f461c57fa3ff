"""PatchShift: where each pixel goes, by hand; and models of shifted patches."""

import json

import keras
import numpy as np
import pytest
from conformance import images, randomize, run, to_numpy

import keras_vit
from keras_vit import layers


def test_patch_shift_by_hand():
    """Half a patch of 3 is one pixel: the image moves down or up, and right or left."""
    image = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], "float32")
    y = to_numpy(layers.PatchShift(3)(image[None, ..., None]))[0]
    expected = [
        image,
        [[0, 0, 0], [0, 1, 2], [0, 4, 5]],
        [[0, 0, 0], [2, 3, 0], [5, 6, 0]],
        [[0, 4, 5], [0, 7, 8], [0, 0, 0]],
        [[5, 6, 0], [8, 9, 0], [0, 0, 0]],
    ]
    np.testing.assert_array_equal(np.moveaxis(y, -1, 0), expected)
    wide = to_numpy(layers.PatchShift((2, 4))(np.ones((1, 2, 4, 2), "float32")))
    np.testing.assert_array_equal(wide[0, ..., 2], [[0, 0, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(wide[..., 2::2], wide[..., 3::2])  # channels stay together


SHIFTED = {"patch_shift": True, "patch_norm": "before"}
LOCAL = {"score_scale": "learned", "score_diagonal": False}


def small(**fields):
    """A model for small data, with random weights."""
    fields = {"image_size": 16, "patch_size": 4, "width": 20, "depth": 2, "num_heads": 5} | fields
    config = keras_vit.ViTConfig(mlp_dim=28, num_classes=3, **fields)
    return randomize(keras_vit.ViT(config))


def test_shifted_patches_keep_their_size_at_other_resolutions():
    model = small(**SHIFTED, **LOCAL)
    larger = model.resized((24, 16))
    assert larger.config.grid == (6, 4) and run(larger, images(larger.config)).shape == (3, 3)
    for path in ("patches/projection/kernel", "encoder_block_1/attention/score_scale"):
        before, after = (
            next(to_numpy(w.value) for w in m.weights if w.path == path) for m in (model, larger)
        )
        np.testing.assert_array_equal(after, before)
    for fields in ({"patch_shift": True}, SHIFTED):
        with pytest.raises(ValueError, match="patch_size must be .* patch_shift or a stem.*Rec"):
            small(**fields).resized(16, patch_size=8)


def test_shifted_patches_load_with_other_channels(tmp_path):
    """A gray image gives what its three equal channels give; another patch size is refused."""
    model = small(patch_shift=True, **LOCAL)
    model.save_weights(tmp_path / "m.weights.h5")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    gray = keras_vit.from_pretrained(tmp_path, in_channels=1)
    x = images(gray.config)
    expected = run(model, np.repeat(x, 3, axis=-1))
    np.testing.assert_allclose(run(gray, x), expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(run(gray, -x) - expected).max() > 1e-2
    with pytest.raises(ValueError, match="patches/projection/kernel"):
        keras_vit.from_pretrained(tmp_path, patch_size=8)


def test_lora_freezes_the_learned_scales():
    model = small(**LOCAL)
    model.enable_lora(2)
    trained = {w.path.split("/")[-1] for w in model.trainable_weights}
    assert trained == {"bias", "kernel", "lora_kernel_a", "lora_kernel_b"}
    again = type(model).from_config(model.get_config())
    assert not any(block.attention.scale.trainable for block in again.blocks)


def test_small_model_learns():
    """Every learned scale moves, and the loss falls."""
    model = small(**SHIFTED, **LOCAL)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, *model.config.input_shape)).astype("float32")
    y = (x[:, 7:9, 7:9].mean((1, 2, 3)) > 0).astype("int32")
    before = [to_numpy(b.attention.scale.value) for b in model.blocks]
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = model.fit(x, y, batch_size=32, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for block, scale in zip(model.blocks, before, strict=True):
        assert (to_numpy(block.attention.scale.value) != scale).all()

"""RotaryEmbedding and RotaryRescale: which numbers they rotate, by which angles."""

import math

import keras
import numpy as np
import pytest
from conformance import built_at_random, images, run, tiny_model, to_numpy

from keras_vit import ViT, layers
from keras_vit.explain import rollout_map


def rotary(x, **arguments):
    return to_numpy(layers.RotaryEmbedding(**arguments)(x))


def test_rotary_by_hand():
    """One frequency an axis: (1, 0, 0, 1) in the third row and second column."""
    x = np.tile(np.array([1.0, 0.0, 0.0, 1.0], "float32"), (1, 7, 1, 1))
    index = {"grid": (3, 2), "num_prefix_tokens": 1, "coordinates": "index"}
    cos, sin = np.cos, np.sin
    halves = [cos(2), -sin(1), sin(2), cos(1)]  # pairs (1, 0) by 2, (0, 1) by 1
    np.testing.assert_allclose(rotary(x, **index)[0, 6, 0], halves, atol=1e-6)
    columns = [cos(1), -sin(2), sin(1), cos(2)]
    found = rotary(x, **index, order="columns_first")
    np.testing.assert_allclose(found[0, 6, 0], columns, atol=1e-6)
    neighbors = [cos(2), sin(2), -sin(1), cos(1)]
    found = rotary(x, **index, pairs="neighbors")
    np.testing.assert_allclose(found[0, 6, 0], neighbors, atol=1e-6)
    shifted = [cos(2.5), -sin(1.5), sin(2.5), cos(1.5)]
    np.testing.assert_allclose(rotary(x, **index, offset=0.5)[0, 6, 0], shifted, atol=1e-6)
    scaled = [cos(4), -sin(0.5), sin(4), cos(0.5)]  # onto 6 rows and 1 column
    found = rotary(x, **index, reference_grid=(6, 1))
    np.testing.assert_allclose(found[0, 6, 0], scaled, atol=1e-6)
    down, right = 2 * math.pi * 2 / 3, 2 * math.pi / 2  # centers of 3 and 2 in [-1, 1]
    centered = [cos(down), -sin(right), sin(down), cos(right)]
    found = rotary(x, grid=(3, 2), num_prefix_tokens=1)
    np.testing.assert_allclose(found[0, 6, 0], centered, atol=1e-6)
    np.testing.assert_array_equal(found[:, 0], x[:, 0])  # the token before the patches


def test_rotary_learned_angles_are_sums():
    layer = layers.RotaryEmbedding(grid=(3, 2), learned=True, coordinates="index")
    x = np.tile(np.array([1.0, 0.0, 0.0, 0.0], "float32"), (1, 6, 2, 1))
    layer.build(x.shape)
    layer.frequencies.assign(np.arange(8).reshape(2, 2, 2) / 10)
    found = to_numpy(layer(x))[0, 5]  # row 2, column 1
    for head, (down, right) in enumerate([(0.0, 0.4), (0.2, 0.6)]):
        angle = 2 * down + right
        expected = [np.cos(angle), 0, np.sin(angle), 0]
        np.testing.assert_allclose(found[head], expected, atol=1e-6)


def test_rotary_learned_frequencies_start_as_the_fixed_ones_turned():
    keras.utils.set_random_seed(0)
    layer = layers.RotaryEmbedding(grid=(3, 2), learned=True, base=10.0)
    layer.build((None, 6, 4, 16))
    first, second = to_numpy(layer.frequencies.value)  # (h, d/2)
    length = np.hypot(first, second)
    expected = 10.0 ** -(np.arange(4) / 4)
    np.testing.assert_allclose(length, np.tile(expected, (4, 2)), rtol=1e-5)
    np.testing.assert_allclose((first * np.roll(first, 4, -1) + second * np.roll(second, 4, -1)), 0,
                               atol=1e-6)  # fmt: skip
    assert np.abs(first[0] - first[1]).max() > 1e-3  # each head has its own axes


def test_rotary_makes_products_depend_on_differences():
    rng = np.random.default_rng(0)
    q, k = (np.tile(rng.normal(size=(1, 1, 1, 8)), (1, 12, 1, 1)) for _ in range(2))
    q, k = (rotary(v.astype("float32"), grid=(3, 4), coordinates="index") for v in (q, k))
    scores = (q[0, :, 0] @ k[0, :, 0].T).reshape(3, 4, 3, 4)
    np.testing.assert_allclose(scores[0, 0, 1, 2], scores[1, 1, 2, 3], rtol=1e-4)
    assert abs(scores[0, 0, 1, 2] - scores[0, 0, 2, 1]) > 1e-3


@pytest.mark.parametrize("shape", [(2, 6, 5, 8), (2, 7, 5, 6)])
def test_rotary_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="x must have .* Received"):
        layers.RotaryEmbedding(grid=(3, 2), num_prefix_tokens=1)(np.ones(shape, "float32"))


def test_rotary_rotates_in_every_path_of_attention():
    """With a mask of ones Keras' own path, quantized as well; without, ours."""
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    rope = {"grid": (3, 2), "num_prefix_tokens": 1, "coordinates": "index"}
    layer = built_at_random(layers.MultiHeadAttention(5, 4, rope=rope), x, x)
    plain = layers.MultiHeadAttention(5, 4)
    plain.build(x.shape, x.shape)
    plain.set_weights(layer.get_weights())
    expected = to_numpy(layer(x, x))
    assert np.abs(to_numpy(plain(x, x)) - expected).max() > 1e-2
    everyone = np.ones((1, 7, 7), bool)
    np.testing.assert_allclose(to_numpy(layer(x, x, attention_mask=everyone)), expected, atol=1e-5)
    found, _ = layer(x, x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(found), expected, atol=1e-5)
    layer.query_dense.enable_lora(2)
    np.testing.assert_allclose(to_numpy(layer(x, x)), expected, atol=1e-5)


def test_rotary_quantized_model_is_near():
    model = tiny_model("rope")
    x = images(model.config)
    expected = run(model, x)
    model.quantize("int8")
    assert np.abs(run(model, x) - expected).max() < 0.1 * np.ptp(expected)


@pytest.mark.parametrize("kind", ["rope", "learned_rope", "rope_mixed"])
def test_rotary_model_sees_where_its_patches_are(kind):
    """Without a table, only rotary positions can tell an image from its patches reordered."""
    model = tiny_model(kind, position_embedding="rope_mixed" if "mixed" in kind else "rope")
    x = images(model.config)
    other = x[:, ::-1].reshape(3, 3, 8, 16, 3)[:, :, ::-1].reshape(x.shape)  # rows of patches
    assert np.abs(run(model, other) - run(model, x)).max() > 1e-3
    blind = ViT(model.config.replace(position_embedding="none"))
    values = {w.path: w.value for w in model.weights}
    for weight in blind.weights:
        weight.assign(values[weight.path])
    np.testing.assert_allclose(run(blind, other), run(blind, x), atol=1e-5)


def test_rotary_rescale_is_one_factor_for_all_blocks():
    model = tiny_model("rope", rope_rescale=2.0)
    plain = ViT(model.config.replace(rope_rescale=None))
    plain.set_weights(model.get_weights())
    x = images(model.config)
    np.testing.assert_allclose(run(model, x), run(plain, x), atol=1e-5)
    drawn = [to_numpy(layers.RotaryRescale(2.0, seed=i)(x, training=True))[0] for i in range(50)]
    assert 0.5 <= min(drawn) < 0.7 and 1.4 < max(drawn) <= 2.0
    np.testing.assert_allclose(rollout_map(model, x), rollout_map(plain, x), atol=1e-5)
    z = np.random.default_rng(0).normal(size=(2, model.config.num_tokens, 20)).astype("float32")
    block = model.blocks[0]
    twice = to_numpy(block(z, rope_scale=np.array([2.0], "float32")))
    assert np.abs(twice - to_numpy(block(z))).max() > 1e-3
    again = to_numpy(block(z, rope_scale=np.ones(1, "float32")))
    np.testing.assert_allclose(again, to_numpy(block(z)), atol=1e-5)


@pytest.mark.parametrize("kind", ["rope", "learned_rope", "rope_mixed"])
def test_rotary_model_resized_has_the_tables_of_the_new_grid(kind):
    model = tiny_model(kind)
    larger = model.resized((40, 24))
    fresh = ViT(larger.config)
    fresh.set_weights(larger.get_weights())
    x = images(larger.config)
    np.testing.assert_array_equal(run(larger, x), run(fresh, x))
    back = larger.resized(model.config.image_size)
    if kind != "learned_rope":  # whose table is resampled twice
        x = images(model.config)
        np.testing.assert_array_equal(run(back, x), run(model, x))

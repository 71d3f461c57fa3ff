"""The two small tables everything rests on: layouts, and the shapes of our weights."""

import numpy as np
import pytest

import keras_vit
from keras_vit.model import weight_shapes
from keras_vit.weights.formats.layout import Layout

TINY = {
    "image_size": (24, 16),
    "patch_size": 8,
    "width": 20,
    "num_heads": 5,
    "mlp_dim": 28,
    "depth": 2,
    "num_classes": 3,
}


@pytest.mark.parametrize(
    ("pattern", "shape", "expected"),
    [
        ("", (2, 3), (2, 3)),
        ("i o -> o i", (2, 3), (3, 2)),
        ("h w c d -> d (h w c)", (2, 3, 4, 5), (5, 24)),
        ("i h d -> (h d) i", (6, 2, 3), (6, 6)),
        ("1 n d -> n d", (1, 4, 5), (4, 5)),
        ("t d -> 1 t d", (4, 5), (1, 4, 5)),
    ],
)
def test_layout_there_and_back_is_bitwise(pattern, shape, expected):
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    layout = Layout(pattern)
    moved = layout.to_source(array)
    assert moved.shape == expected == layout.source_shape(shape)
    np.testing.assert_array_equal(layout.to_ours(moved, shape), array)


def test_layout_is_einsum():
    array = np.random.default_rng(0).standard_normal((6, 2, 3))
    expected = np.einsum("ihd->hdi", array).reshape(6, 6)
    np.testing.assert_array_equal(Layout("i h d -> (h d) i").to_source(array), expected)
    assert not np.array_equal(Layout("i h d -> i (h d)").to_source(array), expected)


@pytest.mark.parametrize("pattern", ["a b -> a", "a -> a b", "a a -> a a"])
def test_layout_names_each_axis_once(pattern):
    with pytest.raises(ValueError, match="pattern must name the same axes"):
        Layout(pattern)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_classes": 0, "class_token": False, "pooling": "mean", "num_registers": 2},
        {"qk_norm": True, "qkv_bias": False, "head_dim": 3, "layer_scale": 0.1},
        {"patch_norm": True, "final_norm": "none", "representation_size": 6},
        {"position_embedding": "learned_2d"},
        {"position_embedding": "sincos_2d", "position_class_row": False},
        {"position_class_row": False, "in_channels": 1, "final_norm": "after_pooling"},
    ],
)
def test_weight_shapes_are_those_of_the_model(fields):
    config = keras_vit.ViTConfig.from_dict({**TINY, **fields})
    found = {w.path: tuple(w.shape) for w in keras_vit.ViT(config).weights}
    assert weight_shapes(config) == found

"""`Layout` in both directions."""

import numpy as np
import pytest

from keras_vit.weights.formats.layout import Layout


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

"""PositionEmbedding: its tables."""

import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers
from keras_vit.layers.position_embedding import sincos_2d


def test_position_embedding_2d_adds_rows_and_columns():
    x = np.zeros((1, 6, 4), "float32")
    layer = built_at_random(layers.PositionEmbedding((3, 2), kind="learned_2d"), x)
    y = to_numpy(layer(x))[0].reshape(3, 2, 4)
    rows, columns = to_numpy(layer.rows), to_numpy(layer.columns)
    for r in range(3):
        for c in range(2):
            np.testing.assert_array_equal(y[r, c], np.concatenate([rows[r], columns[c]]))


def test_sincos_2d_has_the_published_values():
    table = sincos_2d((2, 3), 8)  # frequencies 1 and 1e-4
    assert table.shape == (6, 8)
    r, c = 1, 2
    expected = [np.sin(c), np.sin(c * 1e-4), np.cos(c), np.cos(c * 1e-4)]
    expected += [np.sin(r), np.sin(r * 1e-4), np.cos(r), np.cos(r * 1e-4)]
    np.testing.assert_allclose(table[r * 3 + c], expected, atol=1e-6)


def test_position_embedding_refuses_another_length():
    with pytest.raises(ValueError, match="x must have 7 tokens.*Received"):
        layers.PositionEmbedding((3, 2), class_row=True)(np.zeros((1, 6, 4), "float32"))

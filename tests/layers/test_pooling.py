"""Pooling: Eq. 4."""

import numpy as np
import pytest
from conformance import to_numpy

from keras_vit import layers


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", [1.0]),
        ("token_pair", [1.0, 1.5]),
        ("token_mean", [1.0, 6.0]),
        ("mean", [6.0]),
        ("mean_all", [4.1]),
    ],
)
def test_pooling_by_hand(mode, expected):
    x = np.array([[[1.0], [1.5], [5.0], [9.0], [4.0]]], "float32")
    y = layers.Pooling(mode, num_prefix_tokens=2)(x)
    np.testing.assert_allclose(to_numpy(y), [expected], rtol=1e-6)

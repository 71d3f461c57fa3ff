"""PatchGrid: tokens in the image's rows and columns."""

import numpy as np
from conformance import to_numpy

from keras_vit import layers


def test_patch_grid_by_hand():
    x = np.arange(7, dtype="float32").reshape(1, 7, 1)
    y = to_numpy(layers.PatchGrid((2, 3), num_prefix_tokens=1)(x))
    np.testing.assert_array_equal(y[0, ..., 0], [[1, 2, 3], [4, 5, 6]])

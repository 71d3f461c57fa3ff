"""Patches: their order and their errors."""

import numpy as np
import pytest
from conformance import to_numpy

from keras_vit import layers


def test_patches_are_read_row_by_row():
    image = np.arange(4 * 6, dtype="float32").reshape(1, 4, 6, 1)
    layer = layers.Patches(width=4, patch_size=2)
    layer.build(image.shape)
    layer.projection.kernel.assign(np.eye(4).reshape(2, 2, 1, 4))
    y = to_numpy(layer(image))[0]
    np.testing.assert_array_equal(y[0], [0, 1, 6, 7])
    np.testing.assert_array_equal(y[1], [2, 3, 8, 9])
    np.testing.assert_array_equal(y[3], [12, 13, 18, 19])


@pytest.mark.parametrize("shape", [(1, 20, 16, 3), (1, 16, 3)])
def test_patches_refuse_wrong_images(shape):
    with pytest.raises(ValueError, match="images must.*Received"):
        layers.Patches(width=4, patch_size=8)(np.zeros(shape, "float32"))


def test_patches_ignore_the_remainder_on_request():
    layer = layers.Patches(width=4, patch_size=2, ignore_remainder=True)
    image = np.arange(5 * 7, dtype="float32").reshape(1, 5, 7, 1)
    layer.build(image.shape)
    layer.projection.kernel.assign(np.eye(4).reshape(2, 2, 1, 4))
    y = to_numpy(layer(image))[0]
    assert len(y) == 2 * 3
    np.testing.assert_array_equal(y[2], [4, 5, 11, 12])
    np.testing.assert_array_equal(y[5], [18, 19, 25, 26])

"""The ResNet stem: its kernels by hand, its edges, and what a new bottleneck is."""

import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers


@pytest.mark.parametrize(
    ("standardization", "divisor"),
    [("deviation", 2e-5 + 1e-5), ("variance", (4e-10 + 1e-8) ** 0.5)],
)
def test_std_conv_standardizes_its_kernel(standardization, divisor):
    """Of 1e-5 * (1, 5) the mean is 3e-5 and the deviation 2e-5, small beside what is added."""
    layer = layers.StdConv2D(1, 1, standardization=standardization)
    layer.build((None, None, None, 2))
    layer.kernel.assign(np.reshape([1e-5, 5e-5], (1, 1, 2, 1)))
    y = to_numpy(layer(np.reshape([0.0, 1.0], (1, 1, 1, 2)).astype("float32")))
    np.testing.assert_allclose(y.item(), 2e-5 / divisor, rtol=1e-4)


def test_std_conv_pads_more_below_and_on_the_right():
    """With a stride of 2 a 3x3 kernel starts on the first pixel, as in TensorFlow."""
    image = np.zeros((1, 4, 4, 1), "float32")
    image[0, 0, 0] = 1
    layer = layers.StdConv2D(1, 3, 2)
    layer.build(image.shape)
    kernel = np.arange(9.0).reshape(3, 3, 1, 1)
    layer.kernel.assign(kernel)
    y = to_numpy(layer(image))[0, ..., 0]
    np.testing.assert_allclose(y, [[-4 / np.std(kernel), 0], [0, 0]], rtol=1e-4, atol=1e-6)


def test_resnet_stem_pools_the_maximum_of_windows_from_the_first_cell_on():
    x = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype("float32")
    stem = layers.ResNetStem(width=32)
    stem = built_at_random(stem, x)
    root = np.maximum(to_numpy(stem.root_norm(stem.root_conv(x))), 0)  # (1, 4, 4, 32)
    y = to_numpy(stem(x))
    np.testing.assert_allclose(y[0, 0, 0], root[0, :3, :3].max((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(y[0, 1, 1], root[0, 2:, 2:].max((0, 1)), rtol=1e-6)


def test_new_bottleneck_is_its_shortcut():
    x = np.abs(np.random.default_rng(0).normal(size=(2, 4, 4, 128))).astype("float32")
    layer = layers.Bottleneck(32)
    np.testing.assert_array_equal(to_numpy(layer(x)), x)
    assert layer.shortcut_conv is None
    assert np.abs(to_numpy(built_at_random(layer, x)(x)) - x).max() > 0.1


def test_resnet_stem_refuses_what_is_no_image():
    with pytest.raises(ValueError, match="images must be.*Received"):
        layers.ResNetStem()(np.zeros((1, 16, 3), "float32"))

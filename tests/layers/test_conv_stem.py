"""The convolutional stem: its sizes are the paper's, its values by hand, and what cannot be."""

import numpy as np
import pytest
from conformance import to_numpy

from keras_vit import ViTConfig, layers
from keras_vit.model_weights import weight_shapes


@pytest.mark.backend_free
def test_conv_stem_has_the_sizes_of_the_paper():
    """ViT_C-18GF (Appendix A): 64, 128, 128, 256, 256 and 512 channels, then 1x1 to the width."""
    config = ViTConfig(stem="conv", stem_depths=(1, 2, 2, 1), stem_width=64)
    shapes = weight_shapes(config)
    kernels = [
        shape for path, shape in shapes.items() if path.startswith("stem/") and "conv" in path
    ]
    sizes = [3, 64, 128, 128, 256, 256, 512]
    assert kernels == [(3, 3, *pair) for pair in zip(sizes, sizes[1:], strict=False)]
    assert shapes["patches/projection/kernel"] == (1, 1, 512, 768)
    small = ViTConfig(image_size=32, patch_size=4, stem="conv", stem_width=48)
    assert weight_shapes(small)["patches/projection/kernel"] == (1, 1, 96, 768)


def test_conv_stem_by_hand():
    """Of 2 x 2 cells that see 1, 2, 3 and 6 the mean is 3, so that 6 alone is above it."""
    image = np.zeros((1, 4, 4, 1), "float32")
    image[0, ::2, ::2, 0] = [[1, 2], [3, 6]]
    stem = layers.ConvStem(depths=(1,), width=16, epsilon=0.5)
    stem.build(image.shape)
    kernel = np.zeros((3, 3, 1, 16))
    kernel[0, 0] = 1  # a window starts on the first pixel
    stem.root_conv.kernel.assign(kernel)
    y = to_numpy(stem(image))
    assert y.shape == (1, 2, 2, 16)
    expected = [[0, 0], [0, 3 / 2]]  # the variance is (4 + 1 + 0 + 9) / 4 = 3.5, plus epsilon 4
    np.testing.assert_allclose(y[0, ..., 5], expected, atol=1e-5)
    stem.norms[0].beta.assign(np.full(16, 1.0))
    np.testing.assert_allclose(to_numpy(stem(image))[0, ..., 5], [[0, 0.5], [1, 2.5]], atol=1e-5)


def test_conv_stem_refuses_what_is_no_image():
    with pytest.raises(ValueError, match="images must be.*Received"):
        layers.ConvStem()(np.zeros((1, 16, 3), "float32"))

"""LayerScale: a gain per channel."""

import numpy as np
from conformance import to_numpy

from keras_vit import layers


def test_layer_scale_by_hand():
    layer = layers.LayerScale(0.5)
    layer.build((1, 1, 2))
    layer.gamma.assign([0.5, 3.0])
    np.testing.assert_array_equal(to_numpy(layer(np.array([[[2.0, 4.0]]]))), [[[1.0, 12.0]]])

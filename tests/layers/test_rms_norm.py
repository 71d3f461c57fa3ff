"""RMSNormalization: by hand."""

import numpy as np
from conformance import to_numpy

from keras_vit import layers


def test_rms_norm_by_hand():
    layer = layers.RMSNormalization(epsilon=9.5)
    layer.build((1, 1, 2))
    layer.gamma.assign([1.0, 2.0])
    # The mean square of 3 and 8 is 36.5, and the root of 36.5 + 9.5 is 6.78233
    y = to_numpy(layer(np.array([[[3.0, 8.0]]], "float32")))
    np.testing.assert_allclose(y, [[[3 / 6.7823300, 16 / 6.7823300]]], rtol=1e-6)

"""ClassToken: where its tokens are inserted."""

import numpy as np
from conformance import built_at_random, to_numpy

from keras_vit import layers


def test_class_token_stands_at_its_index():
    x = np.ones((2, 4, 3), "float32")
    layer = built_at_random(layers.ClassToken(num_tokens=2, index=1), x)
    y = to_numpy(layer(x))
    np.testing.assert_array_equal(y[:, [0, 3, 4, 5]], x)
    np.testing.assert_array_equal(y[1, 1:3], to_numpy(layer.tokens)[0])

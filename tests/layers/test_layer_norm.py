"""LayerNormalization: Keras' values, computed faster."""

import keras
import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers


def test_layer_norm_by_hand():
    layer = layers.LayerNormalization(epsilon=3.0)
    layer.build((1, 1, 2))
    layer.set_weights([np.array([1.0, 10.0]), np.array([0.0, 5.0])])
    # mean 4, variance 1: -1 / sqrt(1 + 3) and 1 / sqrt(1 + 3), times gamma, plus beta
    np.testing.assert_allclose(to_numpy(layer(np.array([[[3.0, 5.0]]]))), [[[-0.5, 10.0]]])


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_layer_norm_is_that_of_keras(dtype):
    x = np.random.default_rng(0).normal(1, 3, (2, 7, 20)).astype("float32")
    ours = built_at_random(layers.LayerNormalization(epsilon=1e-3, dtype=dtype), x)
    keras_own = keras.layers.LayerNormalization(epsilon=1e-3, dtype=dtype)
    keras_own.build(x.shape)
    keras_own.set_weights([to_numpy(w) for w in ours.weights])
    wanted, got = (to_numpy(keras.ops.cast(f(x), "float32")) for f in (keras_own, ours))
    tolerance = {"float32": 2e-6, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}[dtype]
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())
    keras_own.epsilon = 1.0  # the negative control
    other = to_numpy(keras.ops.cast(keras_own(x), "float32"))
    assert np.abs(other - wanted).max() > tolerance * np.abs(wanted).max()

"""GroupNormalization: Keras' layer, and more exact where the mean is large."""

import keras
import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [((2, 5, 3, 12), {}), ((2, 5, 12), {}), ((2, 5, 3, 12), {"scale": False})],
)
def test_group_norm_is_that_of_keras(shape, arguments):
    x = np.random.default_rng(0).normal(1, 2, size=shape).astype("float32")
    ours = built_at_random(layers.GroupNormalization(4, epsilon=0.1, **arguments), x)
    theirs = built_at_random(keras.layers.GroupNormalization(4, epsilon=0.1, **arguments), x)
    np.testing.assert_allclose(to_numpy(ours(x)), to_numpy(theirs(x)), atol=1e-5)
    other = built_at_random(keras.layers.GroupNormalization(6, epsilon=0.1, **arguments), x)
    assert np.abs(to_numpy(ours(x)) - to_numpy(other(x))).max() > 0.1


def test_group_norm_keeps_digits_beside_a_large_mean():
    x = np.random.default_rng(0).normal(300, 1, size=(2, 5, 3, 12)).astype("float32")
    z = x.astype("float64").reshape(2, 15, 4, 3)
    z = (z - z.mean((1, 3), keepdims=True)) / np.sqrt(z.var((1, 3), keepdims=True) + 1e-6)
    found = to_numpy(layers.GroupNormalization(4, epsilon=1e-6)(x))
    np.testing.assert_allclose(found, z.reshape(x.shape), atol=1e-4)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_group_norm_in_half_precision(dtype):
    layer = layers.GroupNormalization(4, epsilon=0.1, dtype=dtype)
    x = np.random.default_rng(0).normal(1, 2, size=(2, 5, 3, 12))
    x = keras.ops.cast(x, layer.compute_dtype)
    built_at_random(layer, x)
    z = to_numpy(keras.ops.cast(x, "float32")).astype("float64").reshape(2, 15, 4, 3)
    z = (z - z.mean((1, 3), keepdims=True)) / np.sqrt(z.var((1, 3), keepdims=True) + 0.1)
    expected = z.reshape(x.shape) * to_numpy(layer.gamma) + to_numpy(layer.beta)
    found = layer(x)
    assert keras.backend.standardize_dtype(found.dtype) == layer.compute_dtype
    found = to_numpy(keras.ops.cast(found, "float32"))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
    assert np.abs(found - z.reshape(x.shape)).max() > 0.1  # gain and offset count

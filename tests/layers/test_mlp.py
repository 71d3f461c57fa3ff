"""MLP: Eq. 3's second branch."""

import numpy as np
from conformance import built_at_random, to_numpy

from keras_vit import layers


def test_mlp_by_hand():
    layer = layers.MLP(hidden_dim=2, width=1)
    layer.build((1, 1, 1))
    layer.set_weights([np.array([[1.0, -1.0]]), np.zeros(2), np.array([[2.0], [1.0]]), np.ones(1)])
    # GELU(1) = 0.8413447 and GELU(-1) = -0.1586553, the normal distribution at 1 and at -1
    expected = 2 * 0.8413447 - 0.1586553 + 1
    np.testing.assert_allclose(to_numpy(layer(np.ones((1, 1, 1)))), [[[expected]]], rtol=1e-5)


def test_mlp_trains_with_the_gelu_it_predicts_with():
    x = np.random.default_rng(0).normal(0, 2, (2, 7, 20)).astype("float32")
    for gelu in ("exact", "tanh"):
        layer = built_at_random(layers.MLP(28, 20, gelu=gelu), x)
        np.testing.assert_allclose(
            to_numpy(layer(x, training=True)), to_numpy(layer(x)), rtol=1e-5, atol=2e-6
        )

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
    for gelu in ("exact", "tanh", "quick"):
        layer = built_at_random(layers.MLP(28, 20, gelu=gelu), x)
        np.testing.assert_allclose(
            to_numpy(layer(x, training=True)), to_numpy(layer(x)), rtol=1e-5, atol=2e-6
        )


def test_swiglu_by_hand():
    layer = layers.MLP(hidden_dim=2, width=1, kind="swiglu")
    layer.build((1, 1, 1))
    gate, first, second = np.array([[1.0, -1.0]]), np.array([[2.0, 3.0]]), np.array([[1.0], [5.0]])
    layer.set_weights([gate, np.zeros(2), first, np.zeros(2), second, np.ones(1)])
    # SiLU(1) = 0.7310586 and SiLU(-1) = -0.2689414, each times its hidden value
    expected = 0.7310586 * 2 - 0.2689414 * 3 * 5 + 1
    np.testing.assert_allclose(to_numpy(layer(np.ones((1, 1, 1)))), [[[expected]]], rtol=1e-5)


def test_mlp_inner_norm_by_hand():
    layer = layers.MLP(hidden_dim=2, width=1, inner_norm=True, norm_epsilon=1e-12)
    layer.build((1, 1, 1))
    gamma, beta = np.array([3.0, 1.0]), np.ones(2)
    first, second = np.array([[1.0, -1.0]]), np.array([[2.0], [1.0]])
    layer.set_weights([first, np.zeros(2), gamma, beta, second, np.zeros(1)])
    # Of two values LayerNorm leaves 1 and -1: 2 * (3 * 1 + 1) + (1 * -1 + 1)
    np.testing.assert_allclose(to_numpy(layer(np.ones((1, 1, 1)))), [[[8.0]]], rtol=1e-5)

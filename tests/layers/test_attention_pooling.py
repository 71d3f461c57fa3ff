"""AttentionPooling: the attention of a probe, and an MLP."""

import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers


def test_attention_pooling_by_hand():
    """Without the MLP, which is zero, and with values that are the tokens themselves."""
    layer = layers.AttentionPooling(1, 1, 1, num_ignored_tokens=1)
    x = np.array([[[100.0], [0.0], [1.0]]], "float32")
    layer.build(x.shape)
    for v in layer.weights:
        v.assign(np.zeros(v.shape))
    layer.probe.assign(np.full((1, 1, 1), np.log(3.0)))  # so that exp(q k) is 1 and 3
    attention = layer.attention
    for dense in (attention.query_dense, attention.key_dense, attention.value_dense):
        dense.kernel.assign(np.ones((1, 1, 1)))
    attention.output_dense.kernel.assign(np.full((1, 1, 1), 2.0))
    y, scores = layer(x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(scores), [[[0.25, 0.75]]], rtol=1e-6)
    np.testing.assert_allclose(to_numpy(y), [[1.5]], rtol=1e-6)
    np.testing.assert_allclose(to_numpy(layer(x)), [[1.5]], rtol=1e-6)


def test_attention_pooling_adds_its_mlp_to_what_it_read():
    x = np.random.default_rng(0).normal(size=(3, 7, 20)).astype("float32")
    layer = built_at_random(layers.AttentionPooling(20, 5, 28), x)
    z, scores = layer.attention(
        np.tile(to_numpy(layer.probe), (3, 1, 1)), x, return_attention_scores=True
    )
    expected = to_numpy(z) + to_numpy(layer.mlp(layer.norm(z)))
    found, weights = layer(x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(found), expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(to_numpy(weights), to_numpy(scores)[:, :, 0], atol=1e-6)
    # The order of the tokens does not matter, their values do.
    np.testing.assert_allclose(to_numpy(layer(x[:, ::-1])), to_numpy(found), atol=1e-5)
    assert np.abs(to_numpy(layer(x + 1)) - to_numpy(found)).max() > 1e-2
    assert np.abs(to_numpy(layer(x[:, 1:])) - to_numpy(found)).max() > 1e-3


def test_attention_pooling_refuses_another_width():
    with pytest.raises(ValueError, match="x must have width=20.*Received"):
        layers.AttentionPooling(20, 5, 28)(np.ones((2, 7, 16), "float32"))

"""MultiHeadAttention: Eq. 5 to 8, and what it shares with Keras' layer."""

import keras
import numpy as np
import pytest
from conformance import built_at_random, to_numpy
from keras import ops

from keras_vit import layers


def test_attention_by_hand():
    layer = layers.MultiHeadAttention(num_heads=1, key_dim=1)
    x = np.array([[[0.0], [1.0]]], "float32")
    layer.build(x.shape, x.shape)
    one, zero = np.ones((1, 1, 1)), np.zeros((1, 1))
    log3 = np.log(3.0) * one  # the query's kernel, so that exp(q k) is 1 and 3
    layer.set_weights([log3, zero, one, zero, one, zero, 2 * one, np.zeros(1)])
    y, scores = layer(x, x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(scores)[0, 0], [[0.5, 0.5], [0.25, 0.75]], rtol=1e-5)
    np.testing.assert_allclose(to_numpy(y)[0], [[1.0], [1.5]], rtol=1e-5)
    np.testing.assert_allclose(to_numpy(layer(x, x)), to_numpy(y), rtol=1e-5)


def test_attention_equals_keras_own():
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    ours = built_at_random(layers.MultiHeadAttention(5, 4), x, x)
    keras_own = keras.layers.MultiHeadAttention(5, 4)
    keras_own.build(x.shape, x.shape)
    assert [v.path.split("/", 1)[1] for v in ours.weights] == [
        v.path.split("/", 1)[1] for v in keras_own.weights
    ]
    keras_own.set_weights(ours.get_weights())
    expected, expected_scores = keras_own(x, x, return_attention_scores=True)
    y, scores = ours(x, x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(y), to_numpy(expected), atol=1e-5)
    np.testing.assert_allclose(to_numpy(scores), to_numpy(expected_scores), atol=1e-6)
    np.testing.assert_allclose(to_numpy(ours(x, x)), to_numpy(expected), atol=1e-5)

    mask = np.tril(np.ones((1, 7, 7), bool))
    masked = to_numpy(ours(x, x, attention_mask=mask))
    np.testing.assert_allclose(masked, to_numpy(keras_own(x, x, attention_mask=mask)), atol=1e-5)
    assert np.abs(masked - to_numpy(y)).max() > 1e-3
    causal = to_numpy(ours(x, x, use_causal_mask=True))
    np.testing.assert_allclose(causal, masked, atol=1e-5)
    cross = to_numpy(ours(x, x[:, :3]))
    np.testing.assert_allclose(cross, to_numpy(keras_own(x, x[:, :3])), atol=1e-5)


def test_attention_without_key_bias_is_the_one_whose_key_bias_is_zero():
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    bare = built_at_random(layers.MultiHeadAttention(5, 4, key_bias=False), x, x)
    full = layers.MultiHeadAttention(5, 4)
    full.build(x.shape, x.shape)
    names = [v.path.split("/", 1)[1] for v in full.weights]
    assert [v.path.split("/", 1)[1] for v in bare.weights] == [n for n in names if n != "key/bias"]
    values = {v.path.split("/", 1)[1]: to_numpy(v.value) for v in bare.weights}
    full.set_weights([values.get(name, np.zeros((5, 4))) for name in names])
    np.testing.assert_allclose(to_numpy(bare(x, x)), to_numpy(full(x, x)), atol=1e-6)

    bare.key_dense.enable_lora(2)
    before = to_numpy(bare(x, x))
    bare.key_dense.lora_kernel_b.assign(np.ones(bare.key_dense.lora_kernel_b.shape))
    assert np.abs(to_numpy(bare(x, x)) - before).max() > 1e-3
    quantized = built_at_random(layers.MultiHeadAttention(5, 4, key_bias=False), x, x)
    expected = to_numpy(quantized(x, x))
    for dense in (quantized.query_dense, quantized.key_dense):
        dense.quantize("int8")
    assert 0 < np.abs(to_numpy(quantized(x, x)) - expected).max() < 0.05 * np.ptp(expected)


def test_attention_scores_are_float32_inside():
    """In bfloat16 a softmax over 400 equal scores sums far from 1; in float32 it does not."""
    x = np.ones((1, 400, 20), "float32")
    layer = built_at_random(layers.MultiHeadAttention(5, 4, dtype="mixed_bfloat16"), x, x)
    _, scores = layer(x, x, return_attention_scores=True)
    total = to_numpy(ops.sum(ops.cast(scores, "float32"), -1))
    np.testing.assert_allclose(total, 1.0, atol=4e-3)


@pytest.mark.parametrize("target", ["query_dense", "value_dense", "output_dense"])
def test_attention_lora_changes_the_output(target):
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    layer = built_at_random(layers.MultiHeadAttention(5, 4), x, x)
    before = to_numpy(layer(x, x))
    dense = getattr(layer, target)
    dense.enable_lora(2)
    np.testing.assert_allclose(to_numpy(layer(x, x)), before, atol=1e-6)  # B starts at zero
    dense.lora_kernel_b.assign(np.ones(dense.lora_kernel_b.shape))
    assert np.abs(to_numpy(layer(x, x)) - before).max() > 1e-3

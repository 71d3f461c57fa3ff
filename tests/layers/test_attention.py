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


def test_locality_attention_by_hand():
    """Scores 0 and log 3 of two other tokens, once with the learned scale 1 and once with 2."""
    layer = layers.MultiHeadAttention(1, 1, score_scale="learned", score_diagonal=False)
    x = np.array([[[1.0], [0.0], [np.log(3.0)]]], "float32")
    layer.build(x.shape, x.shape)
    assert to_numpy(layer.scale.value) == [1.0]  # 1 / sqrt(d)
    one, zero = np.ones((1, 1, 1)), np.zeros((1, 1))
    for scale, first in ((1.0, [0, 1 / 4, 3 / 4]), (2.0, [0, 1 / 10, 9 / 10])):
        layer.set_weights([np.array([scale]), one, zero, one, zero, one, zero, one, np.zeros(1)])
        y, scores = layer(x, x, return_attention_scores=True)
        np.testing.assert_allclose(to_numpy(scores)[0, 0, 0], first, rtol=1e-5)
        assert (np.diagonal(to_numpy(scores)[0, 0]) == 0).all()
        np.testing.assert_allclose(to_numpy(y)[0, 0, 0], first @ x[0], rtol=1e-5)
        np.testing.assert_allclose(to_numpy(layer(x, x)), to_numpy(y), rtol=1e-5)


def test_learned_scales_start_as_the_fixed_one():
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    fixed = built_at_random(layers.MultiHeadAttention(5, 4), x, x)
    learned = layers.MultiHeadAttention(5, 4, score_scale="learned")
    learned.build(x.shape, x.shape)
    learned.set_weights([to_numpy(learned.scale.value), *fixed.get_weights()])
    np.testing.assert_allclose(to_numpy(learned(x, x)), to_numpy(fixed(x, x)), atol=1e-6)
    learned.scale.assign(np.array([0.5, 0.5, 0.5, 0.5, 1.5]))
    assert np.abs(to_numpy(learned(x, x)) - to_numpy(fixed(x, x))).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_locality_attention_adds_its_mask_to_the_callers(dtype):
    """The same weights with a mask without the diagonal, in Keras' code."""
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    plain = built_at_random(layers.MultiHeadAttention(5, 4, dtype=dtype), x, x)
    local = layers.MultiHeadAttention(5, 4, score_diagonal=False, dtype=dtype)
    local.build(x.shape, x.shape)
    local.set_weights(plain.get_weights())
    tolerance = 1e-5 if dtype == "float32" else 0.05

    def difference(expected, **arguments):
        y, expected = local(x, x, **arguments), plain(x, x, attention_mask=expected)
        return np.abs(to_numpy(ops.cast(y, "float32") - ops.cast(expected, "float32"))).max()

    other = ~np.eye(7, dtype=bool)[None]
    assert difference(other) < tolerance < difference(other | True)
    seen = np.arange(7) < 5
    assert difference(other & seen, attention_mask=seen[None, None]) < tolerance
    causal = np.tril(np.ones((1, 7, 7), bool))
    causal[:, 0] = True  # otherwise the first token would see none
    both = difference(other & causal, attention_mask=causal)
    assert both < tolerance < difference(other, attention_mask=causal)
    with pytest.raises(ValueError, match="value must have as many tokens as query.*Received: 3"):
        local(x, x[:, :3])


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


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float32"])
def test_torch_trains_short_sequences_in_half_precision_without_its_kernel(dtype, monkeypatch):
    """Its gradient is slow there; the numbers are the same."""
    if keras.backend.backend() != "torch":
        pytest.skip("torch's kernel")
    calls = []
    kernel = ops.dot_product_attention
    monkeypatch.setattr(
        ops, "dot_product_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k)
    )
    layer = layers.MultiHeadAttention(2, 8, dtype=dtype)
    x = keras.random.normal((1, 12, 16), seed=0, dtype=layer.compute_dtype)
    inferred = ops.convert_to_numpy(ops.cast(layer(x, x, training=False), "float32"))
    assert len(calls) == 1
    trained = ops.convert_to_numpy(ops.cast(layer(x, x, training=True), "float32"))
    assert len(calls) == (1 if dtype == "mixed_bfloat16" else 2)
    np.testing.assert_allclose(trained, inferred, atol=2e-2)
    long = keras.random.normal((1, 201, 16), seed=0, dtype=layer.compute_dtype)
    before = len(calls)
    layer(long, long, training=True)
    assert len(calls) == before + 1

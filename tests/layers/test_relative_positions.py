"""RelativePositions: what it adds for each pair of tokens, and where attention adds it."""

import keras
import numpy as np
import pytest
from conformance import built_at_random, to_numpy
from keras import ops

from keras_vit import layers

GRID = {"grid": (3, 2), "num_prefix_tokens": 1}
KINDS = ("relative", "relative_bias", "relative_mlp")


def attention(kind, seed=0, **arguments):
    """A layer with random weights, and tokens for it."""
    x = np.random.default_rng(seed).normal(size=(2, 7, 20)).astype("float32")
    relative = {"kind": kind, "mlp_dim": 6, **GRID}
    layer = layers.MultiHeadAttention(5, 4, relative=relative, **arguments)
    return built_at_random(layer, x, x), x


def test_relative_bias_by_hand():
    """A column of two patches: offsets -1, 0, 1, then class to patch, patch to class, class."""
    layer = layers.RelativePositions("relative_bias", grid=(2, 1), num_prefix_tokens=1)
    query = np.zeros((1, 3, 1, 4), "float32")
    layer.build(query.shape)
    layer.table.assign(np.array([[10.0], [20], [30], [1], [2], [3]]))
    expected = [[3, 1, 1], [2, 20, 10], [2, 30, 20]]
    np.testing.assert_array_equal(to_numpy(layer(query))[0], expected)


def test_relative_by_hand():
    """Queries 1 and 10, and the keys 3, 5, 7 of the offsets i - j = -1, 0, 1."""
    layer = layers.RelativePositions("relative", grid=(1, 2))
    query = np.array([[1.0], [10]], "float32").reshape(1, 2, 1, 1)
    layer.build(query.shape)
    layer.keys.assign(np.array([3.0, 5, 7]).reshape(3, 1, 1))
    np.testing.assert_array_equal(to_numpy(layer(query))[0, 0], [[5, 3], [70, 50]])


def test_relative_mlp_by_hand():
    """One hidden unit that reads the rows: relu(log(1 + a)) for the offset of a rows down."""
    layer = layers.RelativePositions("relative_mlp", (3, 1), num_prefix_tokens=1, mlp_dim=1)
    query = np.zeros((1, 4, 1, 4), "float32")
    layer.build(query.shape)
    one = np.ones((1, 1))
    values = [[1.0], [0.0]], [0.0], one, [0.5]
    layer.set_weights([np.array(value) for value in values])
    near, far = 0.5 + np.log(2), 0.5 + np.log(3)
    expected = [[0, 0, 0, 0], [0, 0.5, 0.5, 0.5], [0, near, 0.5, 0.5], [0, far, near, 0.5]]
    np.testing.assert_allclose(to_numpy(layer(query))[0], expected, atol=1e-6)


def test_one_patch_has_one_offset():
    layer = layers.RelativePositions("relative", grid=(1, 1))
    query = np.full((1, 1, 1, 1), 2.0, "float32")
    layer.build(query.shape)
    layer.keys.assign(np.full((1, 1, 1), 3.0))
    assert to_numpy(layer(query)).item() == 6


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_of_attention_adds_the_positions(kind):
    layer, x = attention(kind)
    expected, scores = (to_numpy(v) for v in layer(x, x, return_attention_scores=True))
    np.testing.assert_allclose(to_numpy(layer(x, x)), expected, atol=1e-5)
    everything = np.ones((2, 7, 7), bool)
    masked = to_numpy(layer(x, x, attention_mask=everything))
    np.testing.assert_allclose(masked, expected, atol=1e-5)
    causal, seen = (
        to_numpy(v) for v in layer(x, x, use_causal_mask=True, return_attention_scores=True)
    )
    lower = np.tril(scores)
    np.testing.assert_allclose(seen, lower / lower.sum(-1, keepdims=True), atol=1e-5)
    lower = to_numpy(layer(x, x, attention_mask=np.tril(everything)))
    np.testing.assert_allclose(causal, lower, atol=1e-5)

    plain = layers.MultiHeadAttention(5, 4)
    plain.build(x.shape, x.shape)
    values = {v.path.split("/", 1)[1]: v.value for v in layer.weights}
    plain.set_weights([values[v.path.split("/", 1)[1]] for v in plain.weights])
    assert np.abs(to_numpy(plain(x, x)) - expected).max() > 1e-3
    with pytest.raises(ValueError, match="value must have as many tokens as query.*Received"):
        layer(x, x[:, :3])
    with pytest.raises(ValueError, match="query must have 7 tokens.*Received"):
        layers.MultiHeadAttention(5, 4, relative={"kind": kind, **GRID})(x[:, 1:], x[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_dropout_keeps_the_positions(kind):
    layer, x = attention(kind, dropout=0.5)
    _, scores = layer(x, x, return_attention_scores=True, training=True)
    _, expected = layer(x, x, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(scores), to_numpy(expected), atol=1e-6)


@pytest.mark.parametrize("kind", ["relative_bias", "relative_mlp"])
def test_biases_are_added_in_float32(kind):
    """300 and 300.5 are the same number in bfloat16."""
    x = ops.cast(np.zeros((1, 7, 20)), "bfloat16")
    layer, _ = attention(kind, dtype="mixed_bfloat16")
    positions = layer.relative_positions
    if kind == "relative_bias":
        rows = np.full(positions.table.shape, 300.0)
        rows[::2] += 0.5
        positions.table.assign(rows)
    else:
        positions.bias_bias.assign(np.full(5, 300.0))
    _, scores = layer(x, x, return_attention_scores=True)
    bias = to_numpy(positions(ops.zeros((1, 7, 5, 4), "bfloat16"))).astype("float64")
    bias = np.exp(bias - bias.max(-1, keepdims=True))
    expected = bias / bias.sum(-1, keepdims=True)
    found = to_numpy(ops.cast(scores, "float32"))[0]
    np.testing.assert_allclose(found, expected, atol=4e-3)
    fused = to_numpy(ops.cast(layer(x, x), "float32"))
    explicit = to_numpy(ops.cast(layer(x, x, return_attention_scores=True)[0], "float32"))
    np.testing.assert_allclose(fused, explicit, atol=4e-3)
    assert keras.backend.standardize_dtype(positions.weights[0].dtype) == "float32"

"""The layer contract over every layer, and what each of them promises beyond it."""

import keras
import numpy as np
import pytest
from conformance import check_layer, randomize, to_numpy
from keras import ops

from keras_vit import layers
from keras_vit.layers.position_embedding import sincos_2d

KEY_BIAS = "key/bias"  # softmax does not see it, nor a shift of the normalized keys


def self_attention(layer, x, **kwargs):
    return layer(x, x, **kwargs)


CASES = {
    "patches": (
        layers.Patches,
        {"width": 20, "patch_size": (8, 4)},
        (2, 24, 16, 3),
        {"bad": [{"width": 0}, {"patch_size": 0}, {"patch_size": (8, 4, 2)}]},
    ),
    "patches_norm": (
        layers.Patches,
        {"width": 20, "patch_size": 8, "norm": True, "norm_epsilon": 1e-3},
        (2, 24, 16, 3),
        {},
    ),
    "class_token": (
        layers.ClassToken,
        {},
        (2, 6, 20),
        {"bad": [{"num_tokens": 0}, {"index": -1}, {"num_tokens": 1.5}]},
    ),
    "registers": (layers.ClassToken, {"num_tokens": 3, "index": 1}, (2, 6, 20), {}),
    "position_embedding": (
        layers.PositionEmbedding,
        {"grid": (3, 2), "class_row": True},
        (2, 7, 20),
        {"bad": [{"grid": (3, 0)}, {"kind": "rope"}, {"kind": "sincos_2d"}]},
    ),
    "position_embedding_2d": (
        layers.PositionEmbedding,
        {"grid": (3, 2), "kind": "learned_2d", "class_row": True},
        (2, 7, 20),
        {},
    ),
    "position_embedding_sincos": (
        layers.PositionEmbedding,
        {"grid": (3, 2), "kind": "sincos_2d"},
        (2, 6, 20),
        {},
    ),
    "attention": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4},
        (2, 7, 20),
        {"call": self_attention, "exempt": [KEY_BIAS], "bad": []},
    ),
    "attention_qk_norm": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 3, "qk_norm": True, "use_bias": False, "output_bias": True},
        (2, 7, 20),
        {"call": self_attention, "exempt": ["key_norm/beta"]},
    ),
    "attention_dropout": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4, "dropout": 0.4},
        (2, 7, 20),
        {"call": self_attention, "exempt": [KEY_BIAS], "drops": True},
    ),
    "mlp": (
        layers.MLP,
        {"hidden_dim": 28, "width": 20, "gelu": "tanh", "dropout": 0.3},
        (2, 7, 20),
        {"drops": True, "bad": [{"gelu": "relu"}, {"dropout": 1.5}]},
    ),
    "layer_norm": (layers.LayerNormalization, {"epsilon": 1e-6}, (2, 7, 20), {}),
    "layer_scale": (layers.LayerScale, {"initial_value": 0.3}, (2, 7, 20), {}),
    "patch_dropout": (
        layers.PatchDropout,
        {"rate": 0.5, "num_prefix_tokens": 1},
        (2, 9, 20),
        {"drops": True, "bad": [{"rate": 1.0}, {"rate": -0.1}]},
    ),
    "pooling_token": (layers.Pooling, {"mode": "token"}, (2, 7, 20), {"bad": [{"mode": "max"}]}),
    "pooling_mean": (layers.Pooling, {"mode": "mean", "num_prefix_tokens": 1}, (2, 7, 20), {}),
    "patch_grid": (
        layers.PatchGrid,
        {"grid": (3, 2), "num_prefix_tokens": 1},
        (2, 7, 20),
        {"bad": [{"grid": (3,)}]},
    ),
    "encoder_block": (
        layers.EncoderBlock,
        {"width": 20, "num_heads": 5, "mlp_dim": 28, "layer_scale": 0.5, "drop_path": 0.3},
        (4, 7, 20),
        {
            "exempt": [KEY_BIAS],
            "drops": True,
            "bad": [{"num_heads": 3}, {"block_norm": "both"}, {"gelu": "relu"}],
        },
    ),
    "encoder_block_post": (
        layers.EncoderBlock,
        {"width": 20, "num_heads": 5, "mlp_dim": 28, "block_norm": "post", "dropout": 0.2},
        (4, 7, 20),
        {"exempt": [KEY_BIAS], "drops": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layer_keeps_the_contract(case):
    cls, arguments, shape, options = CASES[case]
    check_layer(cls, arguments, shape, **options)


def test_check_layer_sees_a_forgotten_config_key():
    class Forgetful(layers.LayerScale):
        def get_config(self):
            config = super().get_config()
            del config["initial_value"]
            return config

    with pytest.raises(AssertionError):
        check_layer(Forgetful, {"initial_value": 0.3}, (2, 7, 20))


def test_every_layer_is_checked():
    checked = {cls for cls, *_ in CASES.values()}
    assert checked == {getattr(layers, name) for name in layers.__all__}


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_layer_norm_is_that_of_keras(dtype):
    x = np.random.default_rng(0).normal(1, 3, (2, 7, 20)).astype("float32")
    ours = randomize_built(layers.LayerNormalization(epsilon=1e-3, dtype=dtype), x)
    keras_own = keras.layers.LayerNormalization(epsilon=1e-3, dtype=dtype)
    keras_own.build(x.shape)
    keras_own.set_weights([to_numpy(w) for w in ours.weights])
    wanted, got = (to_numpy(keras.ops.cast(f(x), "float32")) for f in (keras_own, ours))
    tolerance = {"float32": 2e-6, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}[dtype]
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())
    keras_own.epsilon = 1.0  # the negative control
    other = to_numpy(keras.ops.cast(keras_own(x), "float32"))
    assert np.abs(other - wanted).max() > tolerance * np.abs(wanted).max()


def test_mlp_trains_with_the_gelu_it_predicts_with():
    x = np.random.default_rng(0).normal(0, 2, (2, 7, 20)).astype("float32")
    for gelu in ("exact", "tanh"):
        layer = randomize_built(layers.MLP(28, 20, gelu=gelu), x)
        np.testing.assert_allclose(
            to_numpy(layer(x, training=True)), to_numpy(layer(x)), rtol=1e-5, atol=2e-6
        )


def test_class_token_stands_at_its_index():
    x = np.ones((2, 4, 3), "float32")
    layer = randomize_built(layers.ClassToken(num_tokens=2, index=1), x)
    y = to_numpy(layer(x))
    np.testing.assert_array_equal(y[:, [0, 3, 4, 5]], x)
    np.testing.assert_array_equal(y[1, 1:3], to_numpy(layer.tokens)[0])


def test_position_embedding_2d_adds_rows_and_columns():
    x = np.zeros((1, 6, 4), "float32")
    layer = randomize_built(layers.PositionEmbedding((3, 2), kind="learned_2d"), x)
    y = to_numpy(layer(x))[0].reshape(3, 2, 4)
    rows, columns = to_numpy(layer.rows), to_numpy(layer.columns)
    for r in range(3):
        for c in range(2):
            np.testing.assert_array_equal(y[r, c], np.concatenate([rows[r], columns[c]]))


def test_sincos_2d_has_the_published_values():
    table = sincos_2d((2, 3), 8)  # frequencies 1 and 1e-4
    assert table.shape == (6, 8)
    r, c = 1, 2
    expected = [np.sin(c), np.sin(c * 1e-4), np.cos(c), np.cos(c * 1e-4)]
    expected += [np.sin(r), np.sin(r * 1e-4), np.cos(r), np.cos(r * 1e-4)]
    np.testing.assert_allclose(table[r * 3 + c], expected, atol=1e-6)


def test_position_embedding_refuses_another_length():
    with pytest.raises(ValueError, match="x must have 7 tokens.*Received"):
        layers.PositionEmbedding((3, 2), class_row=True)(np.zeros((1, 6, 4), "float32"))


def test_patches_are_read_row_by_row():
    image = np.arange(4 * 6, dtype="float32").reshape(1, 4, 6, 1)
    layer = layers.Patches(width=4, patch_size=2)
    layer.build(image.shape)
    layer.projection.kernel.assign(np.eye(4).reshape(2, 2, 1, 4))
    y = to_numpy(layer(image))[0]
    np.testing.assert_array_equal(y[0], [0, 1, 6, 7])
    np.testing.assert_array_equal(y[1], [2, 3, 8, 9])
    np.testing.assert_array_equal(y[3], [12, 13, 18, 19])


@pytest.mark.parametrize("shape", [(1, 20, 16, 3), (1, 16, 3)])
def test_patches_refuse_wrong_images(shape):
    with pytest.raises(ValueError, match="images must.*Received"):
        layers.Patches(width=4, patch_size=8)(np.zeros(shape, "float32"))


def test_patch_dropout_keeps_prefix_and_order():
    x = np.arange(2 * 10 * 1, dtype="float32").reshape(2, 10, 1)
    y = to_numpy(layers.PatchDropout(0.5, num_prefix_tokens=2)(x, training=True))
    assert y.shape == (2, 6, 1)
    np.testing.assert_array_equal(y[:, :2], x[:, :2])
    for i in range(2):
        kept = y[i, 2:, 0].tolist()
        assert kept == sorted(kept) and set(kept) <= set(x[i, 2:, 0].tolist())
        assert len(set(kept)) == 4


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    block = layers.EncoderBlock(width=20, num_heads=5, mlp_dim=28, drop_path=0.5)
    x = np.ones((400, 3, 20), "float32")
    y = to_numpy(block.mlp_drop_path(x, training=True))
    per_image = y.reshape(400, -1)
    assert (per_image == per_image[:, :1]).all()  # one draw an image
    assert set(np.unique(y)) == {0.0, 2.0}
    assert abs(y.mean() - 1) < 0.2


def test_attention_equals_keras_own():
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    ours = randomize_built(layers.MultiHeadAttention(5, 4), x, x)
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


def test_attention_scores_are_float32_inside():
    """In bfloat16 a softmax over 400 equal scores sums far from 1; in float32 it does not."""
    x = np.ones((1, 400, 20), "float32")
    layer = randomize_built(layers.MultiHeadAttention(5, 4, dtype="mixed_bfloat16"), x, x)
    _, scores = layer(x, x, return_attention_scores=True)
    total = to_numpy(ops.sum(ops.cast(scores, "float32"), -1))
    np.testing.assert_allclose(total, 1.0, atol=4e-3)


@pytest.mark.parametrize("target", ["query_dense", "value_dense", "output_dense"])
def test_attention_lora_changes_the_output(target):
    x = np.random.default_rng(0).normal(size=(2, 7, 20)).astype("float32")
    layer = randomize_built(layers.MultiHeadAttention(5, 4), x, x)
    before = to_numpy(layer(x, x))
    dense = getattr(layer, target)
    dense.enable_lora(2)
    np.testing.assert_allclose(to_numpy(layer(x, x)), before, atol=1e-6)  # B starts at zero
    dense.lora_kernel_b.assign(np.ones(dense.lora_kernel_b.shape))
    assert np.abs(to_numpy(layer(x, x)) - before).max() > 1e-3


def test_encoder_block_initializes_attention_as_a_matrix():
    """Glorot over (D, h * d), not over the three axes of the kernel."""
    block = layers.EncoderBlock(width=96, num_heads=4, mlp_dim=8)
    block.build((None, 5, 96))
    limit = np.sqrt(6 / (96 + 96))
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        kernel = to_numpy(getattr(block.attention, name).kernel)
        assert 0.95 * limit < np.abs(kernel).max() <= limit
    query, key = (
        to_numpy(getattr(block.attention, n).kernel) for n in ("query_dense", "key_dense")
    )
    assert np.abs(query - key).max() > 0


def test_encoder_block_refuses_another_width():
    with pytest.raises(ValueError, match="x must have width=20.*Received"):
        layers.EncoderBlock(width=20, num_heads=5, mlp_dim=28)(np.zeros((1, 3, 16), "float32"))


def randomize_built(layer, *inputs):
    layer(*inputs)
    return randomize(layer)

"""The layer contract, over every layer."""

import pytest
from conformance import check_layer

from keras_vit import layers

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
        {"bad": [{"grid": (3, 0)}, {"kind": "rope"}, {"kind": "sincos_2d"}, {"class_row": 3}]},
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
    "attention_pooling": (
        layers.AttentionPooling,
        {"width": 20, "num_heads": 5, "mlp_dim": 28, "num_ignored_tokens": 1, "gelu": "tanh"},
        (2, 7, 20),
        {"exempt": [KEY_BIAS], "bad": [{"num_heads": 3}, {"gelu": "relu"}]},
    ),
    "pooling_token": (layers.Pooling, {"mode": "token"}, (2, 7, 20), {"bad": [{"mode": "max"}]}),
    "pooling_mean": (layers.Pooling, {"mode": "mean", "num_prefix_tokens": 1}, (2, 7, 20), {}),
    "pooling_token_mean": (layers.Pooling, {"mode": "token_mean"}, (2, 7, 20), {}),
    "distilled_head": (
        layers.DistilledHead,
        {"units": 3, "activation": "softmax"},
        (2, 20),
        {"bad": [{"units": 0}]},
    ),
    "position_embedding_distilled": (
        layers.PositionEmbedding,
        {"grid": (3, 2), "kind": "learned_2d", "class_row": 2},
        (2, 8, 20),
        {},
    ),
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

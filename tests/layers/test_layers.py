"""The layer contract, over every layer."""

import keras
import pytest
from conformance import check_layer
from keras import ops

from keras_vit import layers

KEY_BIAS = "key/bias"  # softmax does not see it, nor a shift of the normalized keys


def self_attention(layer, x, **kwargs):
    return layer(x, x, **kwargs)


def rescaled(layer, x, **kwargs):
    return keras.ops.multiply(x, layer(x, **kwargs))


def merged(layer, x, **kwargs):
    """The tokens, which are also the keys of four heads."""
    keys = ops.reshape(x, (-1, x.shape[1], 4, x.shape[2] // 4))
    return layer(x, keys, **kwargs)[0]


def tokens_of(layer, x, **kwargs):
    """The first of the outputs, without the sizes."""
    return layer(x, **kwargs)[0]


def scores(layer, x, **kwargs):
    """As part of the output of attention: in the layer's dtype, with a batch axis."""
    y = ops.cast(layer(x, **kwargs), layer.compute_dtype)
    y = y if len(y.shape) == 4 else ops.add(ops.expand_dims(y, 0), 0 * x[:, :1, :, :1, None][:, 0])
    return ops.mean(y, axis=1)


CASES = {
    "patches": (
        layers.Patches,
        {"width": 20, "patch_size": (8, 4), "use_bias": False},
        (2, 24, 16, 3),
        {"bad": [{"width": 0}, {"patch_size": 0}, {"patch_size": (8, 4, 2)}]},
    ),
    "patches_norm": (
        layers.Patches,
        {"width": 20, "patch_size": 8, "norm": True, "norm_epsilon": 1e-3},
        (2, 24, 16, 3),
        {"bad": [{"norm": "around"}]},
    ),
    "patches_norm_before": (
        layers.Patches,
        {"width": 20, "patch_size": 8, "norm": "before"},
        (2, 24, 16, 3),
        {},
    ),
    "patch_shift": (
        layers.PatchShift,
        {"patch_size": (8, 5)},
        (2, 24, 15, 3),
        {"bad": [{"patch_size": 1}, {"patch_size": (8, 4, 2)}]},
    ),
    "patches_norm_after": (
        layers.Patches,
        {"width": 20, "patch_size": 8, "norm": "after", "norm_kind": "rms"},
        (2, 24, 16, 3),
        {},
    ),
    "std_conv": (
        layers.StdConv2D,
        {"filters": 6, "kernel_size": 3, "strides": 2, "standardization": "variance"},
        (2, 6, 4, 3),
        {"bad": [{"filters": 0}, {"strides": 1.5}, {"standardization": "both"}]},
    ),
    "bottleneck": (
        layers.Bottleneck,
        {"filters": 32, "strides": 2, "epsilon": 1e-3},
        (2, 6, 4, 5),
        {"bad": [{"filters": -32}, {"standardization": None}]},
    ),
    "resnet_stem": (
        layers.ResNetStem,
        {"depths": [1, 2], "width": 32, "standardization": "variance"},
        (2, 24, 16, 3),
        {"bad": [{"depths": [0]}, {"width": 20}]},
    ),
    "conv_stem": (
        layers.ConvStem,
        {"depths": [1, 2], "width": 32, "epsilon": 1e-3},
        (2, 24, 15, 3),
        {"bad": [{"depths": [0]}, {"depths": []}, {"width": 20}]},
    ),
    "std_conv_plain": (
        layers.StdConv2D,
        {"filters": 6, "kernel_size": 3, "standardization": "none"},
        (2, 6, 4, 3),
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
    "attention_no_key_bias": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4, "key_bias": False},
        (2, 7, 20),
        {"call": self_attention},
    ),
    "attention_inner_norm": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 3, "inner_norm": True},
        (2, 7, 20),
        {"call": self_attention, "exempt": [KEY_BIAS]},
    ),
    "attention_dropout": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4, "dropout": 0.4},
        (2, 7, 20),
        {"call": self_attention, "exempt": [KEY_BIAS], "drops": True},
    ),
    "attention_rope": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4, "rope": {"grid": (3, 2), "num_prefix_tokens": 1}},
        (2, 7, 20),
        {"call": self_attention, "bad": [{"rope": {"grid": (3, 0)}}]},  # keys' bias is seen
    ),
    "rotary": (
        layers.RotaryEmbedding,
        {"grid": (3, 2), "num_prefix_tokens": 1},
        (2, 7, 5, 8),
        {
            "bad": [
                {"coordinates": "pixel"},
                {"order": "xy"},
                {"pairs": "all"},
                {"grid": (3,)},
                {"reference_grid": (2, 2)},
            ]
        },
    ),
    "rotary_learned": (
        layers.RotaryEmbedding,
        {
            "grid": (3, 2),
            "learned": True,
            "coordinates": "index",
            "pairs": "neighbors",
            "reference_grid": (2, 2),
        },
        (2, 6, 5, 8),
        {},
    ),
    "rotary_rescale": (
        layers.RotaryRescale,
        {"limit": 2.0},
        (2, 7, 20),
        {"call": rescaled, "drops": True, "bad": [{"limit": 0.5}]},
    ),
    "attention_relative_bias": (
        layers.MultiHeadAttention,
        {
            "num_heads": 5,
            "key_dim": 4,
            "relative": {"kind": "relative_bias", "grid": (3, 2), "num_prefix_tokens": 1},
        },
        (2, 7, 20),
        {
            "call": self_attention,
            "exempt": [KEY_BIAS],
            "bad": [{"relative": {"kind": "rope", "grid": (3, 2)}}],
        },
    ),
    "attention_locality": (
        layers.MultiHeadAttention,
        {"num_heads": 5, "key_dim": 4, "score_scale": "learned", "score_diagonal": False},
        (2, 7, 20),
        {"call": self_attention, "exempt": [KEY_BIAS], "bad": [{"score_scale": "free"}]},
    ),
    "relative": (
        layers.RelativePositions,
        {"kind": "relative", "grid": (3, 2), "num_prefix_tokens": 2},
        (2, 8, 5, 4),
        {"call": scores},
    ),
    "relative_bias": (
        layers.RelativePositions,
        {"kind": "relative_bias", "grid": (3, 2), "num_prefix_tokens": 1},
        (2, 7, 5, 4),
        {
            "call": scores,
            "bad": [{"kind": "rope"}, {"grid": (3, 0)}, {"num_prefix_tokens": 2}],
        },
    ),
    "relative_mlp": (
        layers.RelativePositions,
        {"kind": "relative_mlp", "grid": (3, 2), "num_prefix_tokens": 2, "mlp_dim": 6},
        (2, 8, 5, 4),
        {"call": scores, "bad": [{"num_prefix_tokens": -1}]},
    ),
    "mlp": (
        layers.MLP,
        {"hidden_dim": 28, "width": 20, "gelu": "tanh", "dropout": 0.3},
        (2, 7, 20),
        {"drops": True, "bad": [{"gelu": "relu"}, {"dropout": 1.5}, {"kind": "glu"}]},
    ),
    "mlp_swiglu": (
        layers.MLP,
        {"hidden_dim": 28, "width": 20, "kind": "swiglu", "inner_norm": True, "dropout": 0.3},
        (2, 7, 20),
        {"drops": True},
    ),
    "layer_norm": (layers.LayerNormalization, {"epsilon": 1e-6}, (2, 7, 20), {}),
    "rms_norm": (layers.RMSNormalization, {"epsilon": 1e-5}, (2, 7, 20), {}),
    "group_norm": (layers.GroupNormalization, {"groups": 4}, (2, 6, 3, 20), {}),
    "layer_scale": (layers.LayerScale, {"initial_value": 0.3}, (2, 7, 20), {}),
    "patch_dropout": (
        layers.PatchDropout,
        {"rate": 0.5, "num_prefix_tokens": 1},
        (2, 9, 20),
        {"drops": True, "bad": [{"rate": 1.0}, {"rate": -0.1}]},
    ),
    "token_merging": (
        layers.TokenMerging,
        {"num_merged": 3, "num_prefix_tokens": 1},
        (2, 9, 20),
        {"call": merged, "bad": [{"num_merged": -1}, {"num_prefix_tokens": 0.5}]},
    ),
    "encoder_block_merging": (
        layers.EncoderBlock,
        {
            "width": 20,
            "num_heads": 5,
            "mlp_dim": 28,
            "drop_path": 0.3,
            "token_merging": 2,
            "num_prefix_tokens": 1,
        },
        (4, 7, 20),
        {"call": tokens_of, "exempt": [KEY_BIAS], "drops": True, "bad": [{"token_merging": -1}]},
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
    "encoder_block_rms": (
        layers.EncoderBlock,
        {
            "width": 20,
            "num_heads": 5,
            "mlp_dim": 28,
            "norm_kind": "rms",
            "dense_bias": False,
            "drop_path": 0.3,
        },
        (4, 7, 20),
        {"exempt": [KEY_BIAS], "drops": True, "bad": [{"norm_kind": "batch"}]},
    ),
    "encoder_block_res_post": (
        layers.EncoderBlock,
        {"width": 20, "num_heads": 5, "mlp_dim": 28, "block_norm": "res_post", "drop_path": 0.3},
        (4, 7, 20),
        {"exempt": [KEY_BIAS], "drops": True},
    ),
    "encoder_block_post": (
        layers.EncoderBlock,
        {"width": 20, "num_heads": 5, "mlp_dim": 28, "block_norm": "post", "dropout": 0.2},
        (4, 7, 20),
        {"exempt": [KEY_BIAS], "drops": True},
    ),
}


def cases():
    """All; of each class, one runs on every backend."""
    seen = set()
    for name, (cls, *_) in CASES.items():
        yield pytest.param(name, marks=pytest.mark.sampled(cases=0) if cls in seen else ())
        seen.add(cls)


@pytest.mark.parametrize("case", cases())
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

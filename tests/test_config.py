"""ViTConfig: its rules, what follows from it, and its way through JSON."""

import dataclasses
import json

import pytest
from conformance import KINDS, TINY

from keras_vit import ViTConfig

pytestmark = pytest.mark.backend_free


def test_config_defaults_are_vit_b16():
    config = ViTConfig()
    assert (config.width, config.depth, config.num_heads, config.mlp_dim) == (768, 12, 12, 3072)
    assert (config.grid, config.num_patches, config.num_tokens) == ((14, 14), 196, 197)
    assert config.key_dim == 64 and config.class_row


@pytest.mark.parametrize("kind", KINDS)
def test_config_survives_json(kind):
    config = KINDS[kind].replace(pixel_mean=0.1, labels=None)
    again = ViTConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)
    assert again != config.replace(depth=7)


def test_config_lists_become_tuples():
    config = ViTConfig(
        image_size=[32, 16], num_classes=2, labels=["cat", "dog"], pixel_mean=[0.1, 0.2, 0.3]
    )
    assert config.image_size == (32, 16) and config.labels == ("cat", "dog")
    assert config.pixel_mean == (0.1, 0.2, 0.3)


def test_config_every_field_is_documented():
    source = open(ViTConfig.__module__.replace(".", "/") + ".py").read()
    for field in dataclasses.fields(ViTConfig):
        after = source.split(f"\n    {field.name}: ")[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), field.name


def test_config_replace_validates():
    assert TINY.replace(width=40).key_dim == 8  # a head is width / heads again, not a stale 4
    with pytest.raises(ValueError, match="num_heads must divide width=21"):
        TINY.replace(width=21)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 0}, "image_size must be a positive int or a .height, width. pair"),
        ({"image_size": (24, 16, 3)}, "image_size must be a positive int"),
        ({"image_size": 24.0}, "image_size must be a positive int"),
        ({"image_size": True}, "image_size must be a positive int"),
        ({"image_size": (24, 18)}, r"image_size must be a multiple of patch_size=\(8, 8\)"),
        ({"patch_size": -8}, "patch_size must be a positive int"),
        ({"in_channels": 0}, "in_channels must be a positive int"),
        ({"width": "20"}, "width must be a positive int"),
        ({"depth": 0}, "depth must be a positive int"),
        ({"num_heads": 3}, "num_heads must divide width=20 unless head_dim is given"),
        ({"head_dim": 0}, "head_dim must be None or a positive int"),
        ({"mlp_dim": None}, "mlp_dim must be a positive int"),
        ({"block_norm": "sandwich"}, "block_norm must be one of 'pre', 'post'"),
        ({"qkv_bias": 1}, "qkv_bias must be True or False"),
        ({"gelu": "quick"}, "gelu must be one of 'exact', 'tanh'"),
        ({"norm_epsilon": 0}, "norm_epsilon must be a positive number"),
        ({"layer_scale": -1e-4}, "layer_scale must be None or a positive number"),
        ({"class_token": "yes"}, "class_token must be True or False"),
        ({"class_token": False}, "pooling must be 'mean', 'mean_all', 'map', 'map_all' or None"),
        ({"num_registers": -1}, "num_registers must be an int >= 0"),
        ({"position_embedding": "rope"}, "position_embedding must be one of 'learned'"),
        ({"position_embedding": "sincos_2d", "width": 30}, "width must be a multiple of 4"),
        ({"position_embedding": "learned_2d", "width": 15}, "width must be a multiple of 2"),
        ({"interpolation": "nearest"}, "interpolation must be one of 'google'"),
        (
            {"pooling": "max"},
            "pooling must be one of 'token', 'token_pair', 'token_mean', 'mean'",
        ),
        ({"pooling_heads": 0}, "pooling_heads must be None or a positive int"),
        ({"pooling_mlp_dim": 2.0}, "pooling_mlp_dim must be None or a positive int"),
        ({"pooling": "map", "pooling_heads": 3}, "pooling_heads must divide width=20"),
        ({"pooling": "map", "num_heads": 3, "head_dim": 7}, "num_heads must divide width=20"),
        ({"pooling_heads": 1 << 21}, "pooling_heads must be at most"),
        ({"pooling_mlp_dim": 1 << 21}, "pooling_mlp_dim must be at most"),
        ({"pooling": "token_pair"}, "pooling must be another .* distillation_token=False"),
        (
            {"pooling": "token_mean", "final_norm": "after_pooling"},
            "final_norm must be 'before_pooling' or 'none' for pooling='token_mean'",
        ),
        (
            {"pooling": "token_pair", "distillation_token": True, "representation_size": 5},
            "representation_size must be None for pooling='token_pair'",
        ),
        ({"distillation_token": 1}, "distillation_token must be True or False"),
        (
            {"distillation_token": True, "class_token": False, "pooling": "mean"},
            "distillation_token must be False where class_token=False",
        ),
        ({"final_norm": "both"}, "final_norm must be one of"),
        ({"representation_size": 0}, "representation_size must be None or a positive int"),
        ({"num_classes": -1}, "num_classes must be an int >= 0"),
        ({"num_classes": 2.0}, "num_classes must be an int >= 0"),
        ({"labels": ("a", "b")}, "labels must be None or a sequence of num_classes=3 strings"),
        ({"labels": (1, 2, 3)}, "labels must be None or a sequence"),
        ({"head_init": "ones"}, "head_init must be one of"),
        ({"head_bias": "low"}, "head_bias must be a number, or None"),
        ({"classifier_activation": 3}, "classifier_activation must be None or the name"),
        ({"dropout": 1.0}, r"dropout must be a rate in \[0, 1\)"),
        ({"attention_dropout": -0.1}, "attention_dropout must be a rate"),
        ({"drop_path": float("nan")}, "drop_path must be a rate"),
        ({"patch_dropout": None}, "patch_dropout must be a rate"),
        ({"resize_method": "area"}, "resize_method must be one of"),
        ({"crop_fraction": 1.5}, r"crop_fraction must be None or a number in \(0, 1\]"),
        ({"pixel_mean": (0.5, 0.5)}, "pixel_mean must be a number, or one per channel"),
        ({"pixel_std": 0}, "pixel_std must be greater than 0"),
    ],
)
def test_config_refuses_what_does_not_fit(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        TINY.replace(**fields)
    assert "Received: " in str(caught.value)


def test_config_unknown_field_names_the_near_ones():
    with pytest.raises(ValueError, match="did you mean num_heads"):
        ViTConfig.from_dict({"num_head": 3})

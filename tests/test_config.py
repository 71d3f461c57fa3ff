"""ViTConfig: its rules, what follows from it, and its way through JSON."""

import dataclasses
import json

import pytest
from conformance import KINDS, PLAIN_HEAD, TINY

from keras_vit import ViTConfig

pytestmark = pytest.mark.backend_free
STEM = {"stem": "resnet", "stem_depths": ()}


def test_config_defaults_are_vit_b16():
    config = ViTConfig()
    assert (config.width, config.depth, config.num_heads, config.mlp_dim) == (768, 12, 12, 3072)
    assert (config.grid, config.num_patches, config.num_tokens) == ((14, 14), 196, 197)
    assert config.key_dim == 64 and config.class_row


def test_config_names_the_parts_of_its_positions():
    parts = {
        "learned": ("learned", None),
        "none": (None, None),
        "rope": (None, "rope"),
        "learned+rope": ("learned", "rope"),
        "sincos_2d+rope_mixed": ("sincos_2d", "rope_mixed"),
    }
    for words, expected in parts.items():
        config = ViTConfig(position_embedding=words)
        assert (config.position_table, config.attention_positions) == expected
        assert config.class_row == (expected[0] == "learned")


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


@pytest.mark.parametrize(
    ("depths", "stride", "patch", "kernel"),
    [((), 4, 32, 8), ((3,), 4, 4, 1), ((3, 4, 9), 16, (16, 32), (1, 2)), ((2, 2, 2, 2), 32, 32, 1)],
)
def test_config_counts_pixels_with_a_stem(depths, stride, patch, kernel):
    config = ViTConfig(stem="resnet", stem_depths=list(depths), patch_size=patch)
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    assert (config.stem_depths, config.stem_stride) == (depths, stride)
    assert config.patch_kernel == kernel
    assert config.grid == ViTConfig(patch_size=patch).grid
    assert ViTConfig(patch_size=(8, 4)).patch_kernel == (8, 4)
    assert ViTConfig(patch_size=(8, 4)).patch_shifts == (4, 2)


@pytest.mark.parametrize(
    ("depths", "patch", "stages", "kernel"),
    [
        ((), 4, (1, 1), (1, 1)),
        ((), 16, (1, 1, 1, 1), (1, 1)),
        ((), 14, (1,), (7, 7)),
        ((), (8, 12), (1, 1), (2, 3)),
        ((1, 2), 16, (1, 2), (4, 4)),
    ],
)
def test_config_counts_pixels_with_convolutions(depths, patch, stages, kernel):
    config = ViTConfig(stem="conv", stem_depths=depths, patch_size=patch, image_size=336)
    assert (config.stem_stages, config.patch_kernel) == (stages, kernel)
    assert config.stem_stride == 2 ** len(stages)
    assert config.grid == ViTConfig(patch_size=patch, image_size=336).grid


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
        ({"stem": "convnext"}, "stem must be one of None, 'resnet'"),
        ({"stem_depths": (1,)}, "stem_depths must be a tuple .* without a stem"),
        ({**STEM, "stem_depths": 3}, "stem_depths must be a tuple of positive ints"),
        ({**STEM, "stem_depths": (3, 0)}, "stem_depths must be a tuple of positive ints"),
        ({**STEM, "stem_depths": ([1], 2)}, "stem_depths must be a tuple of positive ints"),
        ({**STEM, "stem_depths": (4000, 97)}, "stem_depths must be .*at most 4096 in sum"),
        ({**STEM, "stem_depths": (1, 1, 1)}, "patch_size must be a multiple of 16, the stride"),
        ({**STEM, "stem_width": 20}, "stem_width must be a multiple of 32"),
        ({**STEM, "stem_width": 1 << 20}, "stem_width must be .*at most 524288 with 0 stages"),
        ({"stem_width": 0}, "stem_width must be a positive int"),
        ({"stem_epsilon": -1}, "stem_epsilon must be a positive number"),
        ({"stem_standardization": "batch"}, "stem_standardization must be one of 'deviation'"),
        ({"stem": "conv", "patch_size": (8, 3), "image_size": 24}, "patch_size must be even in"),
        ({"stem": "conv", "stem_width": 24}, "stem_width must be a multiple of 16"),
        ({"stem": "conv", "stem_width": 1 << 19}, "stem_width must be .*at most 262144 with 3 sta"),
        ({"stem": "conv", "stem_depths": (1, 1, 1, 1)}, "patch_size must be a multiple of 16"),
        ({"stem": "conv", "stem_depths": (1, 0)}, "stem_depths must be a tuple of positive ints"),
        ({"width": "20"}, "width must be a positive int"),
        ({"depth": 0}, "depth must be a positive int"),
        ({"num_heads": 3}, "num_heads must divide width=20 unless head_dim is given"),
        ({"head_dim": 0}, "head_dim must be None or a positive int"),
        ({"mlp_dim": None}, "mlp_dim must be a positive int"),
        ({"block_norm": "sandwich"}, "block_norm must be one of 'pre', 'post'"),
        ({"mlp": "glu"}, "mlp must be one of 'mlp', 'swiglu'"),
        ({"mlp": True}, "mlp must be one of 'mlp', 'swiglu'"),
        ({"mlp_inner_norm": 1}, "mlp_inner_norm must be True or False"),
        ({"block_norm": "res_post", "layer_scale": 0.1}, "layer_scale must be None for block_norm"),
        ({"qkv_bias": 1}, "qkv_bias must be True or False"),
        ({"key_bias": 0}, "key_bias must be True or False"),
        ({"gelu": "relu"}, "gelu must be one of 'exact', 'tanh', 'quick'"),
        ({"attention_inner_norm": 0}, "attention_inner_norm must be True or False"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'"),
        ({"norm": "rms", "pooling": "map"}, "norm must be 'layer' for pooling='map'"),
        ({"dense_bias": None}, "dense_bias must be True or False"),
        ({"patch_norm": "around"}, "patch_norm must be True, False, 'before' or 'after'"),
        ({"patch_norm": 1}, "patch_norm must be True, False, 'before' or 'after'"),
        ({"patch_shift": 1}, "patch_shift must be True or False"),
        ({"patch_shift": True, "patch_size": (8, 1)}, "patch_size must be at least 2 in height"),
        ({**STEM, "patch_shift": True}, "patch_shift must be False with a stem"),
        ({"score_scale": 0.5}, "score_scale must be one of 'fixed', 'learned'"),
        ({"score_diagonal": 0}, "score_diagonal must be True or False"),
        (
            {**PLAIN_HEAD, "score_diagonal": False, "image_size": 8},
            "score_diagonal must be True for a single token",
        ),
        ({"patch_bias": 1}, "patch_bias must be True or False"),
        ({"embedding_norm": None}, "embedding_norm must be True or False"),
        ({"norm_epsilon": 0}, "norm_epsilon must be a positive number"),
        ({"layer_scale": -1e-4}, "layer_scale must be None or a positive number"),
        ({"class_token": "yes"}, "class_token must be True or False"),
        ({"class_token": False}, "pooling must be 'mean', 'mean_all', 'map', 'map_all' or None"),
        ({"num_registers": -1}, "num_registers must be an int >= 0"),
        ({"position_embedding": "rotary"}, "position_embedding must be one of 'learned'"),
        ({"position_embedding": "none+rope"}, "position_embedding must be one of 'learned'"),
        ({"position_embedding": "rope", "head_dim": 6}, "head_dim must be a multiple of 4"),
        ({"position_embedding": "rope", "patch_dropout": 0.5}, "patch_dropout must be 0 for"),
        ({"position_embedding": "rope", "rope_grid": 4}, "rope_grid must be None for rope_coord"),
        ({"rope_base": 0.5}, "rope_base must be a number of at least 1"),
        ({"rope_base": "100"}, "rope_base must be a number of at least 1"),
        ({"rope_coordinates": "pixel"}, "rope_coordinates must be one of 'centered', 'index'"),
        ({"rope_order": "ij"}, "rope_order must be one of 'rows_first', 'columns_first'"),
        ({"rope_pairs": True}, "rope_pairs must be one of 'halves', 'neighbors'"),
        ({"rope_offset": 1e9}, "rope_offset must be a number in"),
        ({"rope_grid": (0, 4)}, "rope_grid must be a positive int or a .height, width. pair"),
        ({"rope_rescale": 0.5}, "rope_rescale must be None or a number of at least 1"),
        ({"position_embedding": "sincos_2d", "width": 30}, "width must be a multiple of 4"),
        ({"position_embedding": "learned_2d", "width": 15}, "width must be a multiple of 2"),
        ({"position_embedding": "none+relative"}, "position_embedding must be one of"),
        ({"relative_mlp_dim": 0}, "relative_mlp_dim must be a positive int"),
        (
            {"position_embedding": "relative", "image_size": 8 * 91, "patch_size": 8},
            "image_size must have at most 67108864 pairs of tokens",
        ),
        (
            {"position_embedding": "relative", "patch_dropout": 0.5},
            "patch_dropout must be 0 for position_embedding='relative', which must",
        ),
        (
            {"position_embedding": "learned+relative_bias", "num_registers": 1},
            "num_registers must be 0 for position_embedding='learned.relative_bias', whose table",
        ),
        ({"position_embedding": "sincos_2d+relative", "width": 30}, "width must be a multiple of"),
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


@pytest.mark.parametrize(
    ("word", "table", "attention"),
    [
        ("learned", "learned", None),
        ("none", None, None),
        ("relative_bias", None, "relative_bias"),
        ("learned_2d+relative", "learned_2d", "relative"),
    ],
)
def test_config_position_embedding_names_a_table_and_what_attention_adds(word, table, attention):
    config = TINY.replace(position_embedding=word)
    assert (config.position_table, config.attention_positions) == (table, attention)
    assert config.class_row == (table is not None)


def test_config_unknown_field_names_the_near_ones():
    with pytest.raises(ValueError, match="did you mean num_heads"):
        ViTConfig.from_dict({"num_head": 3})

"""timm's `config.json`: the fields that it states, and the file that we write."""

import csv
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.config_rules import RESIZE_METHODS, short
from keras_vit.weights.formats.table import per_channel
from keras_vit.weights.formats.timm_arguments import POOLINGS, choice, read_arguments

ACTS = {"exact": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}

POOLS = {ours: theirs for theirs, ours in POOLINGS.items()} | {
    "mean_all": "avg",
    "map_all": "map",
    "token_pair": "token",
}

# In the names of timm's functions, by width. Any function works: all arguments are written out.
SIZES = {192: "tiny", 384: "small", 1024: "large", 1280: "huge", 1408: "giant", 1664: "gigantic"}
BASE = "vit_base_patch16_224"
DISTILLED = "deit_base_distilled_patch16_224"
# Classes and the epsilon are no arguments that JSON can hold: functions that set them.
GATED = "vit_giant_patch14_dinov2"
RES_POST = "vit_base_patch16_rpn_224"
EPSILON_1E_5 = "vit_base_patch16_clip_224"
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
"""timm's functions for hybrids, by the depths of their ResNet, which is no argument of them."""


@functools.cache
def architectures() -> dict[str, dict[str, Any]]:
    """What no array shows of timm's ViT architectures: fields of a `ViTConfig`, by name.

    An architecture that a `ViT` cannot compute has the single entry "unlike", the reason.
    `derive_architectures.py` in the tests derives the table, `timm_architectures.csv`, from timm's
    own modules, and a test compares the two. A cell is JSON or plain text; an empty one says
    nothing.
    """
    with Path(__file__).with_name("timm_architectures.csv").open(encoding="utf-8") as file:
        return {
            row.pop("architecture"): {field: _value(cell) for field, cell in row.items() if cell}
            for row in csv.DictReader(file)
        }


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def stated_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ViTConfig` that `config.json` states."""
    fields = check_architecture(config["architecture"]) if "architecture" in config else {}
    arguments = dict(config.get("model_args") or {})
    fields = read_arguments(arguments, fields)
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is not None:
        every = str(fields.get("pooling")).endswith("_all")  # the architecture's own
        fields["pooling"] = choice("global_pool", pool, POOLINGS)
        every = arguments.get("pool_include_prefix", every)
        if every and fields["pooling"] in ("mean", "map"):
            fields["pooling"] += "_all"
    return fields | _pixels(config) | _size(arguments, config)


def check_architecture(name: Any) -> dict[str, Any]:
    """The fields that timm's function of this name sets. Refuses other kinds of model."""
    row = architectures().get(str(name).split(".")[0])
    if row is None:
        raise ValueError(
            "architecture in config.json must be one of timm's ViTs that keras_vit knows. If it is "
            "a plain ViT, remove the entry and pass num_heads, gelu, norm_epsilon and pooling. "
            f"Received: architecture={short(name)}"
        )
    if "unlike" in row:
        raise ValueError(
            f"source must be a plain ViT. This one has {row['unlike']}, which ViT does not have. "
            f"Received: architecture={short(name)}"
        )
    return dict(row)


def _size(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    size = arguments.get("img_size") or (_pretrained(config).get("input_size") or [None])[1:]
    return {"image_size": size} if size else {}


def _pixels(config: Mapping[str, Any]) -> dict[str, Any]:
    cfg = _pretrained(config)
    fields: dict[str, Any] = {}
    for theirs, ours in (("mean", "pixel_mean"), ("std", "pixel_std")):
        if cfg.get(theirs):
            values = tuple(float(v) for v in cfg[theirs])
            fields[ours] = values[0] if len(set(values)) == 1 else values
    if cfg.get("interpolation") in RESIZE_METHODS:
        fields["resize_method"] = cfg["interpolation"]
    if cfg.get("crop_pct"):
        squash = cfg.get("crop_mode") == "squash"
        fields["crop_fraction"] = None if squash else float(cfg["crop_pct"])
    labels = config.get("label_names") or cfg.get("label_names")
    if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
        fields["labels"] = tuple(labels)
    return fields


def _pretrained(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Files written before 2023 have these entries at the top level.
    return config.get("pretrained_cfg") or config


def config_json(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` from which `timm.create_model("local-dir:...")` builds this model."""
    gated = config.mlp == "swiglu"
    name = f"vit_{SIZES.get(config.width, 'base')}_patch{config.patch_size[0]}_224"
    name = name if name in architectures() else BASE
    for special, function in (
        (config.distillation_token, DISTILLED),
        (gated, GATED),
        (config.block_norm == "res_post", RES_POST),
        (config.norm_epsilon == 1e-5, EPSILON_1E_5),
    ):
        name = function if special else name
    first_conv = "patch_embed.proj"
    if config.stem:
        name = HYBRIDS[config.stem_depths]
        first_conv = "patch_embed.backbone." + ("stem.conv" if config.stem_depths else "conv")
    pool = POOLS[config.pooling]
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": list(config.patch_kernel),
        "in_chans": config.in_channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": _ratio(config.mlp_dim * (2 if gated else 1), config.width),
        "scale_attn_norm": config.attention_inner_norm,
        "scale_mlp_norm": config.mlp_inner_norm,
        "qkv_bias": config.qkv_bias,
        "proj_bias": config.dense_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "reg_tokens": config.num_registers,
        "no_embed_class": not config.class_row,
        "pos_embed": "learn" if config.position_embedding == "learned" else "none",
        "global_pool": pool,
        "pool_include_prefix": config.pooling in ("mean_all", "map_all"),
        "pre_norm": config.embedding_norm,
        "final_norm": config.final_norm != "none",
        "fc_norm": config.final_norm == "after_pooling",
        **({} if gated else {"act_layer": ACTS[config.gelu]}),
    }
    labels = {} if config.labels is None else {"label_names": list(config.labels)}
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": pool,
        "model_args": arguments,
        **labels,
        "pretrained_cfg": {
            "input_size": [config.in_channels, *config.image_size],
            "fixed_input_size": True,
            "interpolation": config.resize_method,
            "crop_pct": config.crop_fraction or 1.0,
            "crop_mode": "squash" if config.crop_fraction is None else "center",
            "mean": per_channel(config.pixel_mean, config.in_channels),
            "std": per_channel(config.pixel_std, config.in_channels),
            "num_classes": config.num_classes,
            "first_conv": first_conv,
            "classifier": ["head", "head_dist"] if config.distillation_token else "head",
        },
    }


def _ratio(hidden: int, width: int) -> float:
    # timm rounds down: a ratio such as 4304 / 1152 may be slightly too small.
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width

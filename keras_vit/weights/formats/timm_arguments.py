"""`model_args` of timm's `config.json`: the arguments with which the model was created.

Arrays show most of them. Of the others, some are read here, some have no effect, and some may only
say what the architecture has anyway. The rest is refused, whatever its value: `False` may remove
what the architecture has.
"""

from collections.abc import Mapping
from typing import Any

from keras_vit.config_rules import short

POOLINGS = {"token": "token", "avg": "mean", "": None, "map": "map"}
GELUS = {"gelu": "exact", "gelu_erf": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
NORMS = {"layernorm": 1e-6}  # epsilon if only the name is given

SHOWN = (
    *("img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth"),
    *("num_heads", "mlp_ratio", "qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token"),
    *("pos_embed", "no_embed_class", "reg_tokens", "pre_norm", "final_norm", "fc_norm"),
    *("use_abs_pos_emb", "use_rel_pos_bias", "use_shared_rel_pos_bias", "use_fc_norm"),
    *("rel_pos_type", "rel_pos_dim", "shared_rel_pos", "head_init_scale"),
    *("pool_include_prefix", "scale_attn_norm", "scale_mlp_norm", "norm_layer", "act_layer"),
)
"""What arrays show, or `read_arguments` reads."""
IDLE = (
    *("dynamic_img_size", "strict_img_size", "weight_init", "fix_init", "pretrained_strict"),
    "dynamic_img_pad",  # where patches divide the image, which `timm_reading` checks
)
"""Without effect on a model at its own size that does not train."""
ROTARY = ("use_rot_pos_emb", "rope_rotate_half", "rope_grid_offset", "ref_feat_shape")
"""Rotary positions, of which no array tells."""
OFF = (
    *("attn_only_layer_scale", "features_only", "num_kv_heads", "use_naflex"),
    *("rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords", "rope_mrope_section"),
    *("num_reg_tokens", "qkv_fused", "scale_attn_inner", "scale_mlp", "swiglu_align_to"),
    *("swiglu_mlp", "use_pre_transformer_norm", "use_post_transformer_norm", "attn_pool_mlp_ratio"),
)
"""Of these a false value is what all architectures have, or arrays show it."""
PARTS = {
    "use_post_norm": "block_norm",
    "attn_pool_num_heads": "pooling_heads",
    "pos_embed_ar_preserving": "keeps_aspect",
    "rope_type": "rope_base",
    "rope_temperature": "rope_base",
    "rope_grid_indexing": "rope_base",
}
"""Of these a false value is what an architecture without this field has."""


def read_arguments(arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ViTConfig` that the arguments state.

    Args:
        arguments: `model_args`.
        fields: What the architecture's name states, which the arguments overrule.
    """
    fields, read = _rotary(arguments, dict(fields))
    for name, value in arguments.items():
        if not (name in read or _is_known(name, value, fields)):
            raise ValueError(
                "model_args in config.json must describe a plain ViT. keras_vit does not know "
                f"this argument. Received: {name}={short(value)}"
            )
    if "num_heads" in arguments:
        fields["num_heads"] = arguments["num_heads"]
    if arguments.get("act_layer") is not None:
        fields["gelu"] = choice("act_layer", arguments["act_layer"], GELUS)
    if isinstance(arguments.get("init_values"), float):
        fields["layer_scale"] = arguments["init_values"]
    if arguments.get("norm_layer") is not None:
        fields["norm_epsilon"] = choice("norm_layer", arguments["norm_layer"], NORMS)
    if arguments.get("pos_embed") in ("none", ""):
        fields["position_embedding"] = "none"
    return fields


def _is_known(name: str, value: Any, fields: Mapping[str, Any]) -> bool:
    if name in SHOWN + IDLE or name.endswith("drop_rate"):
        return True
    if value:
        return False
    return name in OFF + ROTARY or (name in PARTS and PARTS[name] not in fields)


def _rotary(
    arguments: Mapping[str, Any], fields: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields with what the arguments say of rotary positions, and the arguments it read."""
    if "rope_base" not in fields:
        return fields, ()
    kind = fields["position_embedding"]
    if not arguments.get("use_rot_pos_emb", True):
        fields = {name: value for name, value in fields.items() if not name.startswith("rope_")}
        # A table that the architecture has beside them stays.
        fields["position_embedding"] = "learned" if kind.startswith("learned+") else "none"
        return fields, ROTARY
    if kind.endswith("rope_mixed"):
        return fields, ("use_rot_pos_emb",)
    if "rope_rotate_half" in arguments:
        fields["rope_pairs"] = "halves" if arguments["rope_rotate_half"] else "neighbors"
    if fields["rope_coordinates"] == "centered":  # DINOv3's have no offset and no other grid
        return fields, ("use_rot_pos_emb", "rope_rotate_half")
    if "rope_grid_offset" in arguments:
        fields["rope_offset"] = float(arguments["rope_grid_offset"] or 0)
    if "ref_feat_shape" in arguments:
        grid = arguments["ref_feat_shape"]
        fields["rope_grid"] = (grid, grid) if isinstance(grid, int) else grid
    return fields, ROTARY


def choice(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    """What a value of `config.json` means; refuses one that is not known."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{name} in config.json must be one of {', '.join(map(repr, known))}. "
            f"Received: {name}={short(value)}"
        )
    return known[value]

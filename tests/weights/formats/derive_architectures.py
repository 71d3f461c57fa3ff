"""Derives the table of timm's architectures from the installed timm's modules.

When timm has new architectures, regenerate the table:

    cd tests/weights/formats
    python derive_architectures.py > ../../../keras_vit/weights/formats/timm_architectures.csv

Each architecture is built without memory (torch's "meta" device), and its modules show what no
array shows. `test_timm_architectures.py` compares the table with what this file derives.
"""

import csv
import json
import sys
import warnings
from pathlib import Path

MODULES = ("vision_transformer", "deit", "beit", "eva", "vision_transformer_hybrid",
           "vision_transformer_relpos", "naflexvit")  # fmt: skip
ROPE = ("rope_base", "rope_coordinates", "rope_order", "rope_pairs", "rope_offset", "rope_grid")
COLUMNS = (
    *("architecture", "num_heads", "block_norm", "gelu", "norm_epsilon", "pooling"),
    *("pooling_heads", "interpolation", "keeps_aspect", "position_embedding", *ROPE, "unlike"),
)
NAFLEX_RULES = {  # mode, antialias, align_corners
    ("bicubic", True, False): "timm",
    ("bilinear", True, False): "flexivit",
    ("bilinear", False, False): "timm_npz",
    ("bilinear", False, True): "google",
}
BLOCKS = {
    "Block": "pre",
    "EvaBlock": "pre",
    "RelPosBlock": "pre",
    "ResPostBlock": "res_post",
    "EvaBlockPostNorm": "res_post",
    "ResPostRelPosBlock": "res_post",
}
ROTARY = {
    "RotaryEmbeddingDinoV3": ("rope", "centered"),
    "RotaryEmbeddingCat": ("rope", "index"),
    "RotaryEmbeddingMixed": ("rope_mixed", "index"),
}
GELUS = {"GELU": "exact", "GELUTanh": "tanh", "QuickGELU": "quick"}
POOLINGS = {"token": "token", "avg": "mean", "": None, "map": "map"}


def architectures() -> dict[str, str]:
    """The file of every architecture of timm's ViT files, including old names, by name."""
    import timm  # noqa: F401  it fills the registry
    from timm.models._registry import _module_to_models

    return {
        name: module
        for module in MODULES
        for name in sorted(_module_to_models[module])
        if not name.endswith("_sam")  # two old names whose new ones timm no longer has
    }


def derive(name: str, file: str) -> dict:
    """The fields of one architecture that no array shows; those of a default may be left out."""
    import timm
    import torch

    with torch.device("meta"):
        module = timm.create_model(name)
    reason = unlike(module, file)
    if reason:
        return {"unlike": reason}
    block = module.blocks[0]
    pooling = POOLINGS[module.global_pool]
    # Eva's attention pooling reads all tokens.
    if pooling in ("mean", "map") and getattr(module, "pool_include_prefix", pooling == "map"):
        pooling += "_all"
    if hasattr(module, "dist_token"):
        pooling = "token_pair"
    pool = getattr(module, "attn_pool", None)
    heads = {} if pool is None else {"pooling_heads": pool.num_heads}
    if heads == {"pooling_heads": block.attn.num_heads}:
        heads = {}
    interpolation = {}  # of position tables and patch kernels, as its loader passes it on
    if file == "naflexvit":
        interpolation = naflex_table(module.embeds)
    elif name.startswith("flexivit") or "radio" in name:
        from timm.models.vision_transformer import _RADIO_ALIGN_CORNERS

        corners = any(part in name for part in _RADIO_ALIGN_CORNERS)
        interpolation = {"interpolation": "google" if corners else "timm_npz"}
    gelu = type(block.mlp.act).__name__
    placed = BLOCKS[type(block).__name__]
    return interpolation | {
        "num_heads": block.attn.num_heads,
        **({} if placed == "pre" else {"block_norm": placed}),
        **({} if gelu == "SiLU" else {"gelu": GELUS[gelu]}),  # a gated MLP has none
        "norm_epsilon": block.norm1.eps,
        "pooling": pooling,
        **heads,
        **rotary(module),
    }


def naflex_table(embeds) -> dict:
    """How a position table is resampled for an image."""
    aspect = {"keeps_aspect": True} if embeds.pos_embed_ar_preserving else {}
    if embeds.pos_embed_type == "factorized":
        return aspect | {"interpolation": "timm_npz"}
    antialias, corners = embeds.pos_embed_antialias, embeds.pos_embed_align_corners
    rule = (embeds.pos_embed_interp_mode, antialias, corners)
    return aspect | {"interpolation": NAFLEX_RULES[rule]}


def rotary(module) -> dict:
    """The fields of rotary positions; none without them."""
    rope = getattr(module, "rope", None)
    if rope is None:
        return {}
    kind, coordinates = ROTARY[type(rope).__name__]
    columns = rope.grid_indexing == "xy"
    grid = getattr(rope, "ref_feat_shape", None)
    return {
        "position_embedding": kind if module.pos_embed is None else f"learned+{kind}",
        "rope_base": rope.temperature,
        "rope_coordinates": coordinates,
        "rope_order": "columns_first" if columns else "rows_first",
        "rope_pairs": "halves" if module.blocks[0].attn.rotate_half else "neighbors",
        "rope_offset": getattr(rope, "grid_offset", 0.0),
        **({"rope_grid": list(grid)} if grid else {}),
    }


def unlike(module, file: str) -> str:
    """Why a `ViT` cannot compute the same; "" for a plain ViT."""
    if file == "vision_transformer_hybrid" and not has_resnet_stem(module):
        return "a convolutional stem"
    rope = getattr(module, "rope", None)
    if rope is not None and type(rope).__name__ not in ROTARY:
        return f"other rotary positions ({type(rope).__name__})"
    block = module.blocks[0]
    if type(block).__name__ not in BLOCKS:
        return f"blocks of another kind ({type(block).__name__})"
    mlps = ("GluMlp", "SwiGLU") if _is_swiglu(block.mlp) else ("Mlp",)
    embeddings = ("PatchEmbed", "HybridEmbed", "NaFlexEmbeds")
    attentions = ("Attention", "EvaAttention", "AttentionRope", "RelPosAttention")
    embedding, norms = _embedding(module), ("LayerNorm", "RmsNorm")
    plain = ("Identity", "NoneType")
    patch_norm = getattr(embedding, "norm", None)
    for what, part, known in (
        ("another patch embedding", embedding, embeddings),
        ("another normalization", block.norm1, norms),
        ("another norm of its patches", patch_norm, (*plain, type(block.norm1).__name__)),
        ("another attention", block.attn, attentions),
        ("another MLP", block.mlp, mlps),
    ):
        if type(part).__name__ not in known:
            return f"{what} ({type(part).__name__})"
    if type(getattr(module, "attn_pool", None)).__name__ not in ("NoneType", "AttentionPoolLatent"):
        return f"another attention pooling ({type(module.attn_pool).__name__})"
    if getattr(block.attn, "gate", None) is not None:
        return "a gate in its attention"
    if any(getattr(other.attn, "num_kv_groups", 1) != 1 for other in module.blocks):
        return "fewer keys than queries (grouped-query attention)"
    if getattr(block, "gamma_1", None) is not None and block.gamma_2 is None:
        return "LayerScale on attention alone"
    return ""


def _embedding(module):
    return module.embeds if hasattr(module, "embeds") else module.patch_embed


def _is_swiglu(mlp) -> bool:
    """Whether an MLP is SiLU(gate) * gated, in one Linear in this order or in two."""
    return type(mlp.act).__name__ == "SiLU" and not getattr(mlp, "gate_last", False)


def has_resnet_stem(module) -> bool:
    """Whether a hybrid's backbone is a `ResNetStem` with the numerics of `resnet_names.TIMM`."""
    from torch import nn

    backbone = module.patch_embed.backbone
    for part in backbone.modules():
        kind = type(part).__name__
        if isinstance(part, nn.Conv2d) and (kind, getattr(part, "eps", None)) != (
            "StdConv2dSame",
            1e-8,
        ):
            return False
        if isinstance(part, nn.GroupNorm) and (part.num_groups, part.eps) != (32, 1e-5):
            return False
        if isinstance(part, nn.BatchNorm2d | nn.GELU | nn.SiLU | nn.AvgPool2d):
            return False
    return type(backbone).__name__ in ("ResNetV2", "Sequential")


def write(stream) -> None:
    """Writes the whole table."""
    table = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    table.writeheader()
    for name, file in sorted(architectures().items()):
        table.writerow(
            {"architecture": name} | {k: _cell(v) for k, v in derive(name, file).items()}
        )


def _cell(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from cpu_torchvision import import_torchvision

    import_torchvision()
    warnings.simplefilter("ignore")  # of timm's own renamed architectures
    write(sys.stdout)

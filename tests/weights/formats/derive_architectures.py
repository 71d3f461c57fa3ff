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
COLUMNS = ("architecture", "num_heads", "gelu", "norm_epsilon", "pooling",
           "pooling_heads", "unlike")  # fmt: skip
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
    return {
        "num_heads": block.attn.num_heads,
        "gelu": GELUS[type(block.mlp.act).__name__],
        "norm_epsilon": block.norm1.eps,
        "pooling": pooling,
        **heads,
    }


def unlike(module, file: str) -> str:
    """Why a `ViT` cannot compute the same; "" for a plain ViT."""
    if file == "vision_transformer_hybrid":
        return "a convolutional stem"
    if file in ("vision_transformer_relpos", "beit"):
        return "relative positions"
    if file == "naflexvit":
        return "images of any size in one batch (NaFlex)"
    if getattr(module, "rope", None) is not None:
        return "rotary positions (RoPE)"
    block = module.blocks[0]
    if type(block).__name__ not in ("Block", "EvaBlock"):
        return {
            "ResPostBlock": "a LayerNorm after each branch",
            "EvaBlockPostNorm": "a LayerNorm after each branch",
        }.get(type(block).__name__, f"blocks of another kind ({type(block).__name__})")
    for what, part, plain in (
        ("a LayerNorm in front of the blocks", module.norm_pre, "Identity"),
        ("another patch embedding", module.patch_embed, "PatchEmbed"),
        ("another normalization", block.norm1, "LayerNorm"),
        ("another attention", block.attn, "Attention"),
        ("another MLP", block.mlp, "Mlp"),
        ("a LayerNorm in its attention", block.attn.norm, "Identity"),
        ("a LayerNorm in its MLP", block.mlp.norm, "Identity"),
    ):
        if type(part).__name__ != plain:
            return f"{what} ({type(part).__name__})" if "another" in what else what
    if type(module.attn_pool).__name__ not in ("NoneType", "AttentionPoolLatent"):
        return f"another attention pooling ({type(module.attn_pool).__name__})"
    if type(block.mlp.act).__name__ == "QuickGELU":
        return "QuickGELU"
    return ""


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

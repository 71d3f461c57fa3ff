"""Every architecture of timm's vision_transformer.py: read rightly from shapes, or refused."""

import pytest

from keras_vit.weights.plan import make_plan

pytestmark = pytest.mark.slow

GELUS = {"GELU": "exact", "GELUTanh": "tanh"}


def architectures():
    from timm.models import list_models

    names = list_models(module="vision_transformer") + list_models(module="deit")
    assert len(names) > 150
    return names


def plan(name, module):
    shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    cfg = module.pretrained_cfg
    config = {
        "architecture": name,
        "global_pool": module.global_pool,
        "pretrained_cfg": {k: cfg.get(k) for k in ("mean", "std", "crop_pct", "interpolation")},
    }
    return make_plan(shapes, {}, config=config, pixels={}, stated={})


def is_plain(module):
    """Whether our ViT computes the same, by timm's own modules."""
    kinds = [type(block).__name__ for block in module.blocks]
    block = module.blocks[0]
    return (
        set(kinds) == {"Block"}
        and type(block.norm1).__name__ == "LayerNorm"
        and type(block.attn).__name__ == "Attention"
        and type(block.mlp).__name__ == "Mlp"
        and type(block.attn.norm).__name__ == type(block.mlp.norm).__name__ == "Identity"
        and type(block.mlp.act).__name__ in GELUS
        and type(module.norm_pre).__name__ == "Identity"
        and type(module.patch_embed).__name__ == "PatchEmbed"
        and module.patch_embed.proj.bias is not None
        and module.global_pool in ("token", "avg", "")
        and not hasattr(module, "dist_token")
    )


def test_timm_architectures_are_read_rightly_or_refused():
    import timm
    import torch

    read, wrong = 0, []
    for name in architectures():
        with torch.device("meta"):
            module = timm.create_model(name)
        try:
            found = plan(name, module)
        except ValueError as error:
            if is_plain(module):
                wrong.append(f"{name}: refused: {error}")
            continue
        if not is_plain(module):
            if not found.differences():
                wrong.append(f"{name}: not refused")
            continue
        if found.differences():
            wrong.append(f"{name}: {found.differences()[:3]}")
            continue
        read += 1
        block, config = module.blocks[0], found.target
        pooling = {"token": "token", "avg": "mean", "": None}[module.global_pool]
        expected = {
            "num_heads": block.attn.num_heads,
            "key_dim": block.attn.head_dim,
            "norm_epsilon": block.norm1.eps,
            "gelu": GELUS[type(block.mlp.act).__name__],
            "pooling": "mean_all" if module.pool_include_prefix and pooling == "mean" else pooling,
            "depth": len(module.blocks),
            "grid": tuple(module.patch_embed.grid_size),
            "num_registers": getattr(module, "num_reg_tokens", 0),
            "class_token": module.cls_token is not None,
            "num_classes": module.num_classes,
        }
        got = {field: getattr(config, field) for field in expected}
        if got != expected:
            different = {k: (got[k], expected[k]) for k in got if got[k] != expected[k]}
            wrong.append(f"{name}: {different}")
    assert not wrong, "\n".join(wrong)
    assert read > 70

"""State dicts of timm's `VisionTransformer`, and the raw ones of DeiT-III, DINOv2 and MAE.

They share nearly all names. LayerNorm's epsilon is 1e-6 and GELU exact unless the architecture says
otherwise; `config.json` brings the pixel contract.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import timm_config
from keras_vit.weights.formats.table import Derived, Format, Header, Pair, Reading, Row, table_grid
from keras_vit.weights.formats.torch_names import CONV, FROM_HEADS, TABLE, linear, norm, qkv

NAMES = {"registers": "reg_token", "scales": ("ls1.gamma", "ls2.gamma")}
RAW_DEIT3 = {**NAMES, "scales": ("gamma_1", "gamma_2")}
RAW_DINOV2 = {**NAMES, "registers": "register_tokens"}
DISTILLED = {**NAMES, "registers": "dist_token"}

DROPPED = {
    r"mask_token$": "a token of masked training",
    r"decoder_": "the decoder of masked training",
    r"head_dist\.": "the head of a distillation token, replaced as asked for",
    r"attn_pool\.": "attention pooling, replaced as asked for",
}
REFUSED = {
    r"norm_pre\.": "a LayerNorm in front of the blocks (CLIP)",
    r"blocks\.0\.mlp\.(w12|fc1_g|gate)": "a gated MLP (SwiGLU)",
    r"blocks\.0\.0\.": "blocks in chunks; load the file without block chunks",
    r"patch_embed\.(backbone|conv1)": "a stem of several convolutions",
    r"(rope|rope_embed)\.|storage_tokens$|blocks\.0\.attn\.rope\.": "rotary positions (RoPE)",
    r"(blocks\.0\.attn\.)?rel_pos(_bias)?\.|blocks\.0\.attn\.relative_": "relative positions",
}


def read(header: Header, names: Mapping[str, Any] = NAMES) -> Reading:
    """The config: shapes first, then `config.json`, then timm's own defaults."""
    width, channels, ph, pw = header.shape("patch_embed.proj.weight", 4)
    stated = timm_config.read(header.config)
    # Positions too: a model with a table may have rotary ones, which have no arrays, beside it.
    unsaid = ("num_heads", "gelu", "norm_epsilon", "pooling", "position_embedding")
    assumed = set() if "architecture" in header.config else header.unstated(unsaid, stated)
    if header.has("dist_token$"):
        _needs_new_head(header, "two class tokens with a head each (DeiT distilled)")
        names = DISTILLED
    pooled = header.has(r"attn_pool\.") or stated.get("pooling") == "map"
    if pooled:
        _needs_new_head(header, "attention pooling", frozenset({"pooling"}))
    registers = (header.shapes.get(names["registers"]) or (0, 0))[1]
    token = "cls_token" in header.shapes
    rows = (header.shapes.get("pos_embed") or (0, 0))[1]
    if not rows:
        _check_no_positions(header, stated)
    grid, row, fold = _grid(header, rows, (ph, pw), int(token), registers, stated)
    qkv_rows = header.shape("blocks.0.attn.qkv.weight", 2)[0]
    hidden = header.shape("blocks.0.mlp.fc1.weight", 2)[0]
    if header.shape("blocks.0.mlp.fc2.weight", 2)[1] != hidden:
        raise ValueError(
            "source must have a plain MLP, a gated one is not ours. Received: "
            f"blocks.0.mlp.fc1.weight with {hidden} rows for blocks.0.mlp.fc2.weight with "
            f"{header.shape('blocks.0.mlp.fc2.weight', 2)[1]} columns"
        )
    if per_head := header.shapes.get("blocks.0.attn.q_norm.weight"):
        stated["num_heads"] = qkv_rows // (3 * max(per_head[0], 1))
        assumed -= {"num_heads"}
    heads = header.heads(width, stated.pop("num_heads", None))
    _check_block_norm(header)
    head = header.shapes.get("head.weight")
    fields = {
        "image_size": (grid[0] * ph, grid[1] * pw),
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"blocks\.(\d+)\.norm1\."),
        "num_heads": heads,
        "head_dim": None if qkv_rows == 3 * width else qkv_rows // (3 * heads),
        "mlp_dim": hidden,
        "norm_epsilon": 1e-6,
        "gelu": "exact",
        "qkv_bias": "blocks.0.attn.qkv.bias" in header.shapes,
        "qk_norm": "blocks.0.attn.q_norm.weight" in header.shapes,
        "layer_scale": 1e-5 if f"blocks.0.{names['scales'][0]}" in header.shapes else None,
        "class_token": token,
        "num_registers": registers,
        "position_embedding": "learned" if rows else "none",
        "position_class_row": bool(row),
        "pooling": "mean" if not token or header.has(r"fc_norm\.") else "token",
        "final_norm": _final_norm(header),
        "representation_size": (header.shapes.get("pre_logits.fc.weight") or (None,))[0],
        "num_classes": head[0] if head else 0,
        "interpolation": "timm",
    }
    stated.pop("image_size", None)
    if pooled:
        stated.pop("pooling", None)
    if fields["layer_scale"] is None:
        stated.pop("layer_scale", None)
    style = {"names": names, "fold": fold}
    fits = {k: v for k, v in stated.items() if not isinstance(v, tuple) or len(v) == channels}
    if not token or header.has(r"fc_norm\."):
        assumed -= {"pooling"}
    return Reading(fields | fits, style, pooled or names is DISTILLED, tuple(sorted(assumed)))


def _grid(header, rows, patch, token, registers, stated):
    """The grid, whether the class token has a row, and how many rows the registers have."""
    given = header.given.get("image_size")
    if not rows:
        size = given or stated.get("image_size") or 224
        size = (size, size) if isinstance(size, int) else tuple(size)
        return (size[0] // patch[0], size[1] // patch[1]), 0, 0
    prefixes = [0, token] + ([token + registers] if registers else [])
    grid, before = table_grid(rows, prefixes, patch, stated.get("image_size"), given)
    fold = registers if registers and before == token + registers else 0
    return grid, before - fold, fold


def _check_no_positions(header: Header, stated: Mapping[str, Any]) -> None:
    """Rotary positions have no arrays: a model without a table is not one without positions."""
    if "none" not in (stated.get("position_embedding"), header.given.get("position_embedding")):
        raise ValueError(
            "source must hold a table of positions, or position_embedding='none' must be passed: "
            "a model without a table may have rotary positions (RoPE), which ViT does not have. "
            "Received: no array 'pos_embed'"
        )


def _check_block_norm(header: Header) -> None:
    """A LayerNorm after each branch has the names and shapes of one in front of it."""
    plain = ("attn.qkv.bias", "attn.q_norm.weight", "ls1.gamma", "gamma_1")
    known = "architecture" in header.config or "block_norm" in header.given
    if not known and not any(f"blocks.0.{name}" in header.shapes for name in plain):
        raise ValueError(
            "source must say where its LayerNorms stand: timm's models without biases on query, "
            "key and value, without q/k norm and without LayerScale have them after each branch, "
            "which ViT does not have. If they stand in front of it, pass block_norm='pre'. "
            "Received: no array 'blocks.0.attn.qkv.bias'"
        )


def _final_norm(header: Header) -> str:
    if header.has(r"fc_norm\."):
        return "after_pooling"
    return "before_pooling" if header.has(r"norm\.") else "none"


def _needs_new_head(header: Header, what: str, also: frozenset[str] = frozenset()) -> None:
    needed = {"num_classes"} | also
    if not needed <= header.given.keys():
        way = "num_classes=0, or a number for a new head" + (", and pooling='mean'" if also else "")
        raise ValueError(
            f"source must not have {what}, which ViT has not; load its trunk with {way}. "
            f"Received: a checkpoint with {what}"
        )


def pairs(config: ViTConfig, names: Mapping[str, Any] = NAMES, fold: int = 0) -> Iterator[Row]:
    """The table of names; `fold` rows of the table belong to registers and are added to them."""
    yield from linear("patch_embed.proj", "patches/projection", CONV)
    if config.class_token:
        yield Pair("cls_token", ("class_token/tokens",))
    if fold:
        yield from folded(config, names["registers"], "pos_embed", fold)
    else:
        if config.num_registers:
            yield Pair(names["registers"], ("registers/tokens",))
        if config.position_embedding == "learned":
            yield Pair("pos_embed", ("position_embedding/table",), TABLE)
    for i in range(config.depth):
        yield from _block(config, f"blocks.{i}", f"encoder_block_{i}", names["scales"])
    if config.final_norm != "none":
        after = config.final_norm == "after_pooling"
        yield from norm("fc_norm" if after else "norm", "encoder_norm")
    if config.representation_size is not None:
        yield from linear("pre_logits.fc", "pre_logits")
    if config.num_classes:
        yield from linear("head", "head")


def _block(config, theirs, ours, scales) -> Iterator[Pair]:
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm")
    bias = f"{theirs}.attn.qkv.bias" if config.qkv_bias else None
    yield from qkv(f"{theirs}.attn.qkv.weight", bias, f"{ours}/attention")
    if config.qk_norm:
        yield from norm(f"{theirs}.attn.q_norm", f"{ours}/attention/query_norm")
        yield from norm(f"{theirs}.attn.k_norm", f"{ours}/attention/key_norm")
    yield from linear(f"{theirs}.attn.proj", f"{ours}/attention/attention_output", FROM_HEADS)
    yield from norm(f"{theirs}.norm2", f"{ours}/mlp_norm")
    yield from linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/dense_1")
    yield from linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/dense_2")
    if config.layer_scale is not None:
        for theirs_scale, branch in zip(scales, ("attention", "mlp"), strict=True):
            yield Pair(f"{theirs}.{theirs_scale}", (f"{ours}/{branch}_scale/gamma",))


def folded(config: ViTConfig, registers: str, positions: str, rows: int) -> Iterator[Derived]:
    """Registers and a table in which they have rows; added once, they need none."""
    token, width = int(config.class_row), config.width
    table = (1, token + rows + config.num_patches, width)
    yield Derived(
        "registers/tokens",
        {registers: (1, rows, width), positions: table},
        lambda tokens, all_rows: tokens + all_rows[:, token : token + rows],
    )
    yield Derived(
        "position_embedding/table",
        {positions: table},
        lambda all_rows: np.delete(all_rows[0], np.s_[token : token + rows], axis=0),
    )


def read_deit3(header: Header) -> Reading:
    """Raw DeiT-III: gains without a module of their own."""
    # Models with rotary positions beside the table (RoPE-ViT) were trained with this code too.
    return _raw(read(header, RAW_DEIT3), "deit", ("num_heads", "position_embedding"))


def read_dinov2(header: Header) -> Reading:
    """Raw DINOv2: registers under another name, and a rule of its own for other sizes."""
    registers = "register_tokens" in header.shapes
    reading = read(header, RAW_DINOV2)
    return _raw(reading, "huggingface_dinov2_registers" if registers else "dinov2")


def read_mae(header: Header) -> Reading:
    """Raw MAE: an encoder with a decoder that is dropped."""
    return _raw(read(header), "deit")


def _raw(reading: Reading, interpolation: str, unsaid: tuple[str, ...] = ("num_heads",)) -> Reading:
    """With the pixels of these projects; their own code fixes all but what is `unsaid`."""
    pixels = {
        "interpolation": interpolation,
        "resize_method": "bicubic",
        "crop_fraction": 224 / 256,
    }
    if reading.fields["in_channels"] == 3:
        pixels |= {"pixel_mean": timm_config.IMAGENET_MEAN, "pixel_std": timm_config.IMAGENET_STD}
    assumed = tuple(name for name in reading.assumed if name in unsaid)
    return Reading(reading.fields | pixels, reading.style, reading.new_head, assumed)


MARK = r"(?P<prefix>.*)patch_embed\.proj\.weight"
TIMM = Format(
    name="timm",
    mark=MARK,
    read=read,
    pairs=pairs,
    needs=(r"blocks\.0\.attn\.qkv\.weight$", r"norm_pre\."),
    dropped=DROPPED,
    refused=REFUSED,
    writes=timm_config.WRITES,
    complaints=timm_config.complaints,
    config_json=timm_config.write,
)
DEIT3 = Format(
    name="deit3", mark=MARK, read=read_deit3, pairs=pairs, needs=(r"blocks\.0\.gamma_1$",)
)
DINOV2 = Format(
    name="dinov2",
    mark=MARK,
    read=read_dinov2,
    pairs=pairs,
    needs=(r"mask_token$", r"register_tokens$"),
    dropped=DROPPED,
    refused=REFUSED,
)
MAE = Format(
    name="mae",
    mark=MARK,
    read=read_mae,
    pairs=pairs,
    needs=(r"decoder_embed\.",),
    dropped=DROPPED,
)

"""State dicts of timm's `VisionTransformer`, and the raw ones of DeiT-III, DINOv2 and MAE.

They share nearly all names. LayerNorm's epsilon is 1e-6 and GELU is exact unless the architecture
says otherwise. `config.json` states the pixel range.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import timm_config
from keras_vit.weights.formats.relative_positions import (
    INDEX,
    INDEX_REASON,
    held,
    relative_fields,
    relative_rows,
    with_table,
)
from keras_vit.weights.formats.table import (
    STANDARD_HEADS,
    Derived,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
    Row,
)
from keras_vit.weights.formats.torch_names import (
    CONV,
    FROM_HEADS,
    HEADS_BIAS,
    IMAGENET_PIXELS,
    TABLE,
    linear,
    norm,
    qkv,
)

NAMES = {
    "registers": "reg_token",
    "scales": ("ls1.gamma", "ls2.gamma"),
    "relative": ("blocks.{}.attn.rel_pos.", "shared_rel_pos."),
}
RAW_DEIT3 = {**NAMES, "scales": ("gamma_1", "gamma_2")}
RAW_DINOV2 = {**NAMES, "registers": "register_tokens"}
DISTILLED = {**NAMES, "registers": "dist_token"}

DROPPED = {
    r"mask_token$": "the mask token of pretraining",
    r"decoder_": "the decoder of pretraining",
    r"head_dist\.": "the head of a distillation token, replaced as requested",
    r"attn_pool\.": "attention pooling, replaced as requested",
    r"lm_head\.": "the head of pretraining",
    INDEX: INDEX_REASON,
}
REFUSED = {
    r"norm_pre\.": "a LayerNorm before the blocks (CLIP)",
    r"blocks\.0\.mlp\.(w12|fc1_g|gate)": "a gated MLP (SwiGLU)",
    r"blocks\.0\.0\.": "blocks in chunks (save it without block chunks)",
    r"patch_embed\.(backbone|conv1)": "a stem of several convolutions",
    r"(rope|rope_embed)\.|storage_tokens$|blocks\.0\.attn\.rope\.": "rotary positions (RoPE)",
}


def read_timm(header: Header, names: Mapping[str, Any] = NAMES) -> Reading:
    """The config: from shapes, then from `config.json`, then timm's own defaults."""
    width, channels, ph, pw = header.shape("patch_embed.proj.weight", 4)
    stated = timm_config.stated_fields(header.config)
    # Also the positions: beside a table there may be rotary ones, which have no arrays.
    unstated = ("num_heads", "gelu", "norm_epsilon", "pooling", "position_embedding")
    assumed = set() if "architecture" in header.config else header.unstated(unstated, stated)
    if header.has("dist_token$"):
        header.require_new_head("two class tokens with a head each (DeiT distilled)")
        names = DISTILLED
    pooled = header.has(r"attn_pool\.") or stated.get("pooling") == "map"
    if pooled:
        header.require_new_head("attention pooling", pooling=True)
        stated.pop("pooling", None)
    registers = header.size(names["registers"], 1, 0)
    token = "cls_token" in header.shapes
    rows = header.size("pos_embed", 1, 0)
    places = (names["relative"][0].format(0), names["relative"][1])
    relative = relative_fields(header, *places, (ph, pw), stated)
    if relative:
        assumed -= {"position_embedding"}
        stated.pop("position_embedding", None)
        _check_size_is_known(header, stated, rows or "image_size" in relative)
    elif not rows:
        _check_no_positions(header, stated)
    shown = relative.pop("image_size", None)  # by a table of offsets
    stated["image_size"] = shown or stated.get("image_size")
    size, row, fold = _table(header, rows, (ph, pw), int(token), registers, stated)
    size = shown or size
    qkv_rows = header.shape("blocks.0.attn.qkv.weight", 2)[0]
    hidden = header.shape("blocks.0.mlp.fc1.weight", 2)[0]
    if header.shape("blocks.0.mlp.fc2.weight", 2)[1] != hidden:
        raise ValueError(
            "source must have a plain MLP, not a gated one. Received: "
            f"blocks.0.mlp.fc1.weight with {hidden} rows for blocks.0.mlp.fc2.weight with "
            f"{header.shape('blocks.0.mlp.fc2.weight', 2)[1]} columns"
        )
    if per_head := header.shapes.get("blocks.0.attn.q_norm.weight"):
        stated["num_heads"] = qkv_rows // (3 * max(per_head[0], 1))
        assumed -= {"num_heads"}
    heads = header.heads(width, stated.pop("num_heads", None))
    _check_block_norm(header)
    averaged = not token or header.has(r"fc_norm\.")
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"blocks\.(\d+)\.norm1\."),
        "num_heads": heads,
        "head_dim": None if qkv_rows == 3 * width else qkv_rows // (3 * heads),
        "mlp_dim": hidden,
        "norm_epsilon": 1e-6,
        "gelu": "exact",
        "qkv_bias": header.has(r"blocks\.0\.attn\.(qkv\.bias|q_bias)$"),
        "key_bias": "blocks.0.attn.q_bias" not in header.shapes,
        "qk_norm": "blocks.0.attn.q_norm.weight" in header.shapes,
        "layer_scale": 1e-5 if f"blocks.0.{names['scales'][0]}" in header.shapes else None,
        "class_token": token,
        "num_registers": registers,
        **relative,
        "position_embedding": with_table(relative, bool(rows)),
        "position_class_row": bool(row),
        "pooling": "mean" if averaged else "token",
        "final_norm": _final_norm(header),
        "representation_size": header.size("pre_logits.fc.weight", 0, None),
        "num_classes": header.size("head.weight", 0, 0),
        "interpolation": "timm",
    }
    stated.pop("image_size", None)
    if fields["layer_scale"] is None:
        stated.pop("layer_scale", None)
    style = {"names": names, "fold": fold, "relative": held(header, *places)}
    for name in ("pixel_mean", "pixel_std"):
        if isinstance(stated.get(name), tuple) and len(stated[name]) != channels:
            del stated[name]
    if averaged:
        assumed -= {"pooling"}
    return Reading(fields | stated, style, pooled or names is DISTILLED, tuple(sorted(assumed)))


def _table(header, rows, patch, token, registers, stated):
    """The image size, whether the class token has a row, and how many rows the registers have."""
    if not rows:
        size = header.given.get("image_size") or stated.get("image_size") or 224
        sides = (size, size) if isinstance(size, int) else size
        return tuple(side // p * p for side, p in zip(sides, patch, strict=True)), 0, 0
    prefixes = [0, token] + ([token + registers] if registers else [])
    size, before = header.table_size(rows, prefixes, patch, stated.get("image_size"))
    fold = registers if registers and before == token + registers else 0
    return size, before - fold, fold


def _check_no_positions(header: Header, stated: Mapping[str, Any]) -> None:
    """Refuses a model without a table that may have rotary positions, which have no arrays."""
    if "none" not in (stated.get("position_embedding"), header.given.get("position_embedding")):
        raise ValueError(
            "source must hold a position table, or position_embedding='none' must be passed: a "
            "model without one may have rotary positions (RoPE), which ViT does not have. "
            "Received: no array 'pos_embed'"
        )


def _check_size_is_known(header: Header, stated: Mapping[str, Any], shown: Any) -> None:
    if not (shown or stated.get("image_size") or header.given.get("image_size")):
        raise ValueError(
            "image_size must be passed: an MLP of relative positions fits any size. "
            "Received: no table of positions, and no image_size"
        )


def _check_block_norm(header: Header) -> None:
    """Refuses a model that may have its LayerNorms after each branch, under the same names."""
    plain = ("attn.q_norm.weight", "ls1.gamma", "gamma_1", "attn.q_bias")
    # With relative positions there are biases in either case.
    if not header.has(r"(blocks\.0\.attn\.|shared_)rel_pos\."):
        plain += ("attn.qkv.bias",)
    known = "architecture" in header.config or "block_norm" in header.given
    if not known and not any(f"blocks.0.{name}" in header.shapes for name in plain):
        raise ValueError(
            "source must state where its LayerNorms are: timm's models without query, key and "
            "value biases, q/k norm and LayerScale have them after each branch, which ViT does "
            "not have. If they are before each branch, pass block_norm='pre'. "
            "Received: no array 'blocks.0.attn.qkv.bias'"
        )


def _final_norm(header: Header) -> str:
    if header.has(r"fc_norm\."):
        return "after_pooling"
    return "before_pooling" if header.has(r"norm\.") else "none"


def timm_rows(
    config: ViTConfig, names: Mapping[str, Any] = NAMES, fold: int = 0, relative: str = "own"
) -> Iterator[Row]:
    """The table of names. `fold` rows of the position table are the registers'."""
    yield from linear("patch_embed.proj", "patches/projection", CONV)
    if config.class_token:
        yield Pair("cls_token", ("class_token/tokens",))
    if fold:
        yield from folded_registers(config, names["registers"], "pos_embed", fold)
    else:
        if config.num_registers:
            yield Pair(names["registers"], ("registers/tokens",))
        if config.position_table == "learned":
            yield Pair("pos_embed", ("position_embedding/table",), TABLE)
    for i in range(config.depth):
        yield from _block(config, f"blocks.{i}", f"encoder_block_{i}", names["scales"])
        own, shared = names["relative"]
        yield from relative_rows(config, i, own.format(i), shared, relative)
    if config.final_norm != "none":
        after = config.final_norm == "after_pooling"
        yield from norm("fc_norm" if after else "norm", "encoder_norm")
    if config.representation_size is not None:
        yield from linear("pre_logits.fc", "pre_logits")
    if config.num_classes:
        yield from linear("head", "head")


def _block(config, theirs, ours, scales) -> Iterator[Pair]:
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm")
    bias = f"{theirs}.attn.qkv.bias" if config.qkv_bias and config.key_bias else None
    if config.qkv_bias and not config.key_bias:
        yield Pair(f"{theirs}.attn.q_bias", (f"{ours}/attention/query/bias",), HEADS_BIAS)
        yield Pair(f"{theirs}.attn.v_bias", (f"{ours}/attention/value/bias",), HEADS_BIAS)
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


def folded_registers(
    config: ViTConfig, registers: str, positions: str, rows: int
) -> Iterator[Derived]:
    """Registers with rows in the position table: the rows are added to them once."""
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
    """Raw DeiT-III: LayerScale's gains have no module of their own."""
    # RoPE-ViT, which has rotary positions beside the table, was trained with the same code.
    return _raw(read_timm(header, RAW_DEIT3), "deit", ("num_heads", "position_embedding"))


def read_dinov2(header: Header) -> Reading:
    """Raw DINOv2: registers have another name, and the table has a resampling rule of its own."""
    registers = "register_tokens" in header.shapes
    reading = read_timm(header, RAW_DINOV2)
    return _raw(reading, "huggingface_dinov2_registers" if registers else "dinov2")


def read_mae(header: Header) -> Reading:
    """Raw MAE: an encoder, and a decoder that is dropped."""
    return _raw(read_timm(header), "deit")


def _raw(
    reading: Reading, interpolation: str, unstated: tuple[str, ...] = ("num_heads",)
) -> Reading:
    """Adds these projects' pixel range. Their code fixes every field that is not `unstated`."""
    pixels = {
        "interpolation": interpolation,
        "resize_method": "bicubic",
        "crop_fraction": 224 / 256,
    }
    if reading.fields["in_channels"] == 3:
        pixels |= IMAGENET_PIXELS
    assumed = tuple(name for name in reading.assumed if name in unstated)
    return Reading(reading.fields | pixels, reading.style, reading.new_head, assumed)


TIMM = Format(
    name="timm",
    mark=r"(?P<prefix>.*)patch_embed\.proj\.weight",
    read_config=read_timm,
    rows=timm_rows,
    needs=(r"blocks\.0\.attn\.qkv\.weight$", r"norm_pre\."),
    dropped=DROPPED,
    refused=REFUSED,
    writable={
        "norm_epsilon": (1e-6,),
        "block_norm": ("pre",),
        "key_bias": (True,),
        "patch_norm": (False,),
        "position_embedding": ("learned", "none"),
        "representation_size": (None,),
        "classifier_activation": (None,),
    },
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: not (c.num_registers and c.class_row),
            "position_class_row must be False if there are registers: timm's table has rows for "
            "all tokens before the patches, or for none",
        ),
    ),
    json_files={"config.json": timm_config.config_json},
)
# Read-only, with the same rows.
RAW = dataclasses.replace(TIMM, writable=None, limits=(), json_files={})
DEIT3 = dataclasses.replace(
    RAW, name="deit3", read_config=read_deit3, needs=(r"blocks\.0\.gamma_1$",)
)
DINOV2 = dataclasses.replace(
    RAW, name="dinov2", read_config=read_dinov2, needs=(r"mask_token$", r"register_tokens$")
)
MAE = dataclasses.replace(RAW, name="mae", read_config=read_mae, needs=(r"decoder_embed\.",))

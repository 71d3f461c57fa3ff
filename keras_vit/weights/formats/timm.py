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
    mlp,
    norm,
    qkv,
)

# Names of an MLP's Linears: timm's, raw DINOv2's, and with a gate apart timm's and raw EVA's.
MLPS = (("fc1", "fc2"), ("w12", "w3"), ("fc1_g", "fc1_x", "fc2"), ("w1", "w2", "w3"))
NAMES = {"registers": "reg_token", "scales": ("ls1.gamma", "ls2.gamma"), "mlp": MLPS[0]}
RAW_DEIT3 = {**NAMES, "scales": ("gamma_1", "gamma_2")}
RAW_DINOV2 = {**NAMES, "registers": "register_tokens"}
DISTILLED = {**NAMES, "registers": "dist_token"}

DROPPED = {
    r"mask_token$": "the mask token of pretraining",
    r"decoder_": "the decoder of pretraining",
    r"head_dist\.": "the head of a distillation token, replaced as requested",
    r"attn_pool\.": "attention pooling, replaced as requested",
}
REFUSED = {
    r"blocks\.0\.0\.": "blocks in chunks (save it without block chunks)",
    r"patch_embed\.(backbone|conv1)": "a stem of several convolutions",
    r"(rope|rope_embed)\.|storage_tokens$|blocks\.0\.attn\.rope\.": "rotary positions (RoPE)",
    r"(blocks\.0\.attn\.)?rel_pos(_bias)?\.|blocks\.0\.attn\.relative_": "relative positions",
}


def read_timm(header: Header, names: Mapping[str, Any] = NAMES) -> Reading:
    """The config: from shapes, then from `config.json`, then timm's own defaults."""
    width, channels, ph, pw = header.shape("patch_embed.proj.weight", 4)
    stated = timm_config.stated_fields(header.config)
    # Also the positions: beside a table there may be rotary ones, which have no arrays.
    unstated = ("num_heads", "gelu", "norm_epsilon", "pooling", "position_embedding")
    assumed = set() if "architecture" in header.config else header.unstated(unstated, stated)
    names = {**names, "mlp": _mlp_names(header)}
    distilled = header.has("dist_token$")
    if distilled:
        header.require_new_head("two class tokens with a head each (DeiT distilled)")
        names = {**names, "registers": DISTILLED["registers"]}
    pooled = header.has(r"attn_pool\.") or stated.get("pooling") == "map"
    if pooled:
        header.require_new_head("attention pooling", pooling=True)
        stated.pop("pooling", None)
    registers = header.size(names["registers"], 1, 0)
    token = "cls_token" in header.shapes
    rows = header.size("pos_embed", 1, 0)
    if not rows:
        _check_no_positions(header, stated)
    size, row, fold = _table(header, rows, (ph, pw), int(token), registers, stated)
    qkv_rows = header.shape("blocks.0.attn.qkv.weight", 2)[0]
    hidden, gated = _mlp(header, names["mlp"])
    if gated:
        stated.pop("gelu", None)
        assumed -= {"gelu"}
        if "architecture" not in header.config and names["mlp"] == ("fc1", "fc2"):
            assumed |= {"mlp"}  # these names say nothing of what the gate computes
    if per_head := header.shapes.get("blocks.0.attn.q_norm.weight"):
        stated["num_heads"] = qkv_rows // (3 * max(per_head[0], 1))
        assumed -= {"num_heads"}
    heads = header.heads(width, stated.pop("num_heads", None))
    _check_block_norm(header)
    rms = "blocks.0.norm1.bias" not in header.shapes
    if rms and "architecture" not in header.config:
        assumed |= {"norm"}  # a LayerNorm without an offset has the same arrays
    averaged = not token or header.has(r"fc_norm\.")
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"blocks\.(\d+)\.norm1\."),
        "num_heads": heads,
        "head_dim": None if qkv_rows == 3 * width else qkv_rows // (3 * heads),
        "attention_inner_norm": "blocks.0.attn.norm.weight" in header.shapes,
        "mlp_dim": hidden,
        "mlp": "swiglu" if gated else "mlp",
        "mlp_inner_norm": "blocks.0.mlp.norm.weight" in header.shapes,
        "norm_epsilon": 1e-5 if "norm_pre.weight" in header.shapes else 1e-6,  # CLIP's
        "gelu": "exact",
        "norm": "rms" if rms else "layer",
        "dense_bias": "blocks.0.attn.proj.bias" in header.shapes,
        "qkv_bias": header.has(r"blocks\.0\.attn\.(qkv\.bias|q_bias)$"),
        "key_bias": "blocks.0.attn.q_bias" not in header.shapes,
        "qk_norm": "blocks.0.attn.q_norm.weight" in header.shapes,
        "layer_scale": 1e-5 if f"blocks.0.{names['scales'][0]}" in header.shapes else None,
        "class_token": token,
        "patch_norm": "after" if "patch_embed.norm.weight" in header.shapes else False,
        "patch_bias": "patch_embed.proj.bias" in header.shapes,
        "embedding_norm": "norm_pre.weight" in header.shapes,
        "num_registers": registers,
        "position_embedding": "learned" if rows else "none",
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
    style = {"names": names, "fold": fold}
    for name in ("pixel_mean", "pixel_std"):
        if isinstance(stated.get(name), tuple) and len(stated[name]) != channels:
            del stated[name]
    if averaged:
        assumed -= {"pooling"}
    return Reading(fields | stated, style, pooled or distilled, tuple(sorted(assumed)))


def _mlp_names(header: Header) -> tuple[str, ...]:
    has = (m for m in MLPS if all(f"blocks.0.mlp.{name}.weight" in header.shapes for name in m))
    return next(has, MLPS[0])


def _mlp(header: Header, names: tuple[str, ...]) -> tuple[int, bool]:
    """The hidden size of the MLP, and whether it is gated."""
    first, last = (f"blocks.0.mlp.{name}.weight" for name in (names[0], names[-1]))
    rows, columns = header.shape(first, 2)[0], header.shape(last, 2)[1]
    packed = len(names) == 2 and rows == 2 * columns
    if rows != columns and not packed:
        raise ValueError(
            "source must have an MLP whose hidden values are all read, or a gated one of twice as "
            f"many. Received: {first} with {rows} rows for {last} with {columns} columns"
        )
    return columns, packed or len(names) == 3


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


def _check_block_norm(header: Header) -> None:
    """Refuses a model that may have its LayerNorms after each branch, under the same names."""
    plain = ("attn.qkv.bias", "attn.q_norm.weight", "ls1.gamma", "gamma_1")
    known = "architecture" in header.config or "block_norm" in header.given
    if not known and not any(f"blocks.0.{name}" in header.shapes for name in plain):
        raise ValueError(
            "source must state where its LayerNorms are: most of timm's models without query, key "
            "and value biases, q/k norm and LayerScale have them after each branch. Pass "
            "block_norm='res_post' for these, and block_norm='pre' if they are before each branch. "
            "Received: no array 'blocks.0.attn.qkv.bias'"
        )


def _final_norm(header: Header) -> str:
    if header.has(r"fc_norm\."):
        return "after_pooling"
    return "before_pooling" if header.has(r"norm\.") else "none"


def timm_rows(config: ViTConfig, names: Mapping[str, Any] = NAMES, fold: int = 0) -> Iterator[Row]:
    """The table of names. `fold` rows of the position table are the registers'."""
    yield from linear("patch_embed.proj", "patches/projection", CONV, bias=config.patch_bias)
    if config.patch_norm:
        yield from norm("patch_embed.norm", "patches/norm_after", config.norm)
    if config.class_token:
        yield Pair("cls_token", ("class_token/tokens",))
    if fold:
        yield from folded_registers(config, names["registers"], "pos_embed", fold)
    else:
        if config.num_registers:
            yield Pair(names["registers"], ("registers/tokens",))
        if config.position_embedding == "learned":
            yield Pair("pos_embed", ("position_embedding/table",), TABLE)
    if config.embedding_norm:
        yield from norm("norm_pre", "embedding_norm", config.norm)
    for i in range(config.depth):
        yield from _block(config, f"blocks.{i}", f"encoder_block_{i}", names)
    if config.final_norm != "none":
        after = config.final_norm == "after_pooling"
        yield from norm("fc_norm" if after else "norm", "encoder_norm", config.norm)
    if config.representation_size is not None:
        yield from linear("pre_logits.fc", "pre_logits")
    if config.num_classes:
        yield from linear("head", "head")


def _block(config, theirs, ours, names) -> Iterator[Pair]:
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm", config.norm)
    bias = f"{theirs}.attn.qkv.bias" if config.qkv_bias and config.key_bias else None
    if config.qkv_bias and not config.key_bias:
        yield Pair(f"{theirs}.attn.q_bias", (f"{ours}/attention/query/bias",), HEADS_BIAS)
        yield Pair(f"{theirs}.attn.v_bias", (f"{ours}/attention/value/bias",), HEADS_BIAS)
    yield from qkv(f"{theirs}.attn.qkv.weight", bias, f"{ours}/attention")
    if config.qk_norm:
        yield from norm(f"{theirs}.attn.q_norm", f"{ours}/attention/query_norm", config.norm)
        yield from norm(f"{theirs}.attn.k_norm", f"{ours}/attention/key_norm", config.norm)
    if config.attention_inner_norm:
        yield from norm(f"{theirs}.attn.norm", f"{ours}/attention/inner_norm", config.norm)
    output = f"{ours}/attention/attention_output"
    yield from linear(f"{theirs}.attn.proj", output, FROM_HEADS, bias=config.dense_bias)
    yield from norm(f"{theirs}.norm2", f"{ours}/mlp_norm", config.norm)
    gated = config.mlp == "swiglu"
    yield from mlp(f"{theirs}.mlp", f"{ours}/mlp", names["mlp"], gated, bias=config.dense_bias)
    if config.mlp_inner_norm:
        yield from norm(f"{theirs}.mlp.norm", f"{ours}/mlp/inner_norm", config.norm)
    if config.layer_scale is not None:
        for theirs_scale, branch in zip(names["scales"], ("attention", "mlp"), strict=True):
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
        "norm_epsilon": (1e-6, 1e-5),
        "block_norm": ("pre", "res_post"),
        "norm": ("layer",),
        "key_bias": (True,),
        "patch_norm": (False,),
        "position_embedding": ("learned", "none"),
        "representation_size": (None,),
        "classifier_activation": (None,),
    },
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: c.patch_bias != c.embedding_norm,
            "patch_bias must be the opposite of embedding_norm={0.embedding_norm}: timm's models "
            "have one of the two",
        ),
        Limit(
            lambda c: (c.mlp, c.block_norm) == ("mlp", "pre") or c.norm_epsilon == 1e-6,
            "norm_epsilon must be 1e-06 for mlp={0.mlp!r} and block_norm={0.block_norm!r}",
        ),
        Limit(
            lambda c: c.mlp == "mlp" or c.block_norm == "pre",
            "block_norm must be 'pre' for mlp={0.mlp!r}, it is {0.block_norm!r}",
        ),
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

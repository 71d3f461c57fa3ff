"""State dicts of timm's `VisionTransformer` and `Eva`.

LayerNorm's epsilon is 1e-6 and GELU is exact unless the architecture
says otherwise. `config.json` states the pixel range.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import resnet_names, timm_config
from keras_vit.weights.formats.relative_positions import (
    INDEX,
    INDEX_REASON,
    held,
    relative_fields,
    relative_rows,
    with_table,
)
from keras_vit.weights.formats.table import (
    POOLING_SIZES,
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
    INTO_HEADS,
    QKV,
    TABLE,
    linear,
    mlp,
    norm,
    qkv,
)

# Names of an MLP's Linears: timm's, raw DINOv2's, and with a gate apart timm's and raw EVA's.
MLPS = (("fc1", "fc2"), ("w12", "w3"), ("fc1_g", "fc1_x", "fc2"), ("w1", "w2", "w3"))
NAMES = {
    "registers": "reg_token",
    "scales": ("ls1.gamma", "ls2.gamma"),
    "mlp": MLPS[0],
    "head": "head",
    "relative": ("blocks.{}.attn.rel_pos.", "shared_rel_pos."),
}
RAW_SCALES = ("gamma_1", "gamma_2")

DROPPED = {
    r"mask_token$": "the mask token of pretraining",
    r"decoder_": "the decoder of pretraining",
    r"lm_head\.": "the head of pretraining",
    INDEX: INDEX_REASON,
}
REFUSED = {
    r"blocks\.0\.0\.": "blocks in chunks (save it without block chunks)",
    r"patch_embed\.(backbone\.(?!(stem\.)?(conv|norm)\.|stages\.)|conv1)": "a stem of several "
    "convolutions that is not ViT's ResNet",
    r"rope\.freqs_|blocks\.0\.attn\.rope\.": "tables of rotary positions (raw EVA-02)",
}


# What no array shows of rotary positions.
ROPE = ("rope_base", "rope_coordinates", "rope_order", "rope_pairs", "rope_offset", "rope_grid")
FREQUENCIES = "rope.freqs"


def read_timm(header: Header, names: Mapping[str, Any] = NAMES) -> Reading:
    """The config: from shapes, then from `config.json`, then timm's own defaults."""
    width, channels, *patch = header.shape("patch_embed.proj.weight", 4)
    stem = resnet_names.timm_fields(header)
    channels = stem.get("in_channels", channels)
    ph, pw = resnet_names.pixels(tuple(patch), stem)
    stated = timm_config.stated_fields(header.config)
    # Also the positions: beside a table there may be rotary ones, which have no arrays.
    unstated = ("num_heads", "gelu", "norm_epsilon", "pooling", "position_embedding")
    assumed = set() if "architecture" in header.config else header.unstated(unstated, stated)
    names = {**names, "mlp": _mlp_names(header)}
    if "blocks.0.gamma_1" in header.shapes:  # timm's Eva
        names["scales"] = RAW_SCALES
    distilled = "dist_token" in header.shapes
    if distilled and stated.get("pooling", "token") == "token":
        stated["pooling"] = "token_pair"
        assumed -= {"pooling"}
    registers = header.size(names["registers"], 1, 0)
    token = ("cls_token" in header.shapes) * (1 + distilled)
    rows = header.size("pos_embed", 1, 0)
    places = (names["relative"][0].format(0), names["relative"][1])
    relative = relative_fields(header, *places, (ph, pw), stated)
    positions = with_table(relative, bool(rows))
    if relative:
        assumed -= {"position_embedding"}
        stated.pop("position_embedding", None)
        _check_size_is_known(header, stated, rows or "image_size" in relative)
    elif FREQUENCIES in header.shapes:
        positions = "learned+rope_mixed" if rows else "rope_mixed"
        stated.setdefault("rope_coordinates", "index")
        stated.setdefault("rope_order", "columns_first")
        stated.setdefault("rope_pairs", "neighbors")
        assumed -= {"position_embedding"}
    elif not rows:
        _check_no_positions(header, stated)
    if "rope" in (header.given.get("position_embedding") or positions):
        assumed |= {name for name in ROPE if assumed and name not in header.given}
    shown = relative.pop("image_size", None)  # by a table of offsets
    stated["image_size"] = shown or stated.get("image_size")
    size, row, fold = _table(header, rows, (ph, pw), int(token), registers, stated)
    size = shown or size
    separate = "blocks.0.attn.q_proj.weight" in header.shapes
    names["separate"] = separate
    first = "blocks.0.attn.q_proj.weight" if separate else "blocks.0.attn.qkv.weight"
    inner = header.shape(first, 2)[0] // (1 if separate else 3)
    hidden, gated = _mlp(header, names["mlp"])
    if gated and rows:
        _check_rotary(header)
    if gated:
        stated.pop("gelu", None)
        assumed -= {"gelu"}
        if "architecture" not in header.config and names["mlp"] == ("fc1", "fc2"):
            assumed |= {"mlp"}  # these names say nothing of what the gate computes
    if per_head := header.shapes.get("blocks.0.attn.q_norm.weight"):
        stated["num_heads"] = inner // max(per_head[0], 1)
        assumed -= {"num_heads"}
    heads = header.heads(width, stated.pop("num_heads", None))
    _check_block_norm(header)
    if "architecture" not in header.config and not _shows_block_norm(header):
        assumed |= header.unstated(("block_norm",), stated)
    pooling = _pooling_fields(header, hidden)
    rms = "blocks.0.norm1.bias" not in header.shapes
    if rms and "architecture" not in header.config:
        assumed |= {"norm"}  # a LayerNorm without an offset has the same arrays
    averaged = not token or header.has(r"fc_norm\.")
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        **stem,
        "width": width,
        "depth": header.count(r"blocks\.(\d+)\.norm1\."),
        "num_heads": heads,
        "head_dim": None if inner == width else inner // heads,
        "attention_inner_norm": "blocks.0.attn.norm.weight" in header.shapes,
        "mlp_dim": hidden,
        "mlp": "swiglu" if gated else "mlp",
        "mlp_inner_norm": "blocks.0.mlp.norm.weight" in header.shapes,
        "norm_epsilon": 1e-5 if "norm_pre.weight" in header.shapes else 1e-6,  # CLIP's
        "gelu": "exact",
        "norm": "rms" if rms else "layer",
        "dense_bias": "blocks.0.attn.proj.bias" in header.shapes,
        "qkv_bias": header.has(r"blocks\.0\.attn\.(qkv\.bias|q_bias|q_proj\.bias)$"),
        "key_bias": _key_bias(header),
        "qk_norm": "blocks.0.attn.q_norm.weight" in header.shapes,
        "layer_scale": 1e-5 if f"blocks.0.{names['scales'][0]}" in header.shapes else None,
        "class_token": bool(token),
        "distillation_token": distilled,
        "patch_norm": "after" if "patch_embed.norm.weight" in header.shapes else False,
        "patch_bias": "patch_embed.proj.bias" in header.shapes,
        "embedding_norm": "norm_pre.weight" in header.shapes,
        "num_registers": registers,
        **{name: value for name, value in relative.items() if name != "position_embedding"},
        "position_embedding": positions,
        "position_class_row": bool(row),
        "pooling": "mean" if averaged else "token",
        **pooling,
        "final_norm": _final_norm(header),
        "representation_size": header.size("pre_logits.fc.weight", 0, None),
        "num_classes": header.size(f"{names['head']}.weight", 0, 0),
        "interpolation": "timm",
    }
    stated.pop("image_size", None)
    if fields["layer_scale"] is None:
        stated.pop("layer_scale", None)
    style = {"names": names, "fold": fold, "relative": held(header, *places)}
    for name in ("pixel_mean", "pixel_std"):
        if isinstance(stated.get(name), tuple) and len(stated[name]) != channels:
            del stated[name]
    # Tokens before the patches may be pooled, or left out, or be what is read: no array shows it.
    if not token and not registers:
        assumed -= {"pooling"}
    return Reading(fields | stated, style, assumed=tuple(sorted(assumed)))


def _key_bias(header: Header) -> bool:
    """False where there is a bias of the queries, and none of the keys: in EVA and BEiT."""
    queries = header.has(r"blocks\.0\.attn\.(q_bias|q_proj\.bias)$")
    return not queries or "blocks.0.attn.k_proj.bias" in header.shapes


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


def _pooling_fields(header: Header, hidden: int) -> dict[str, Any]:
    """The fields of attention pooling; none if there is no such head."""
    if not header.has(r"attn_pool\."):
        return {}
    rows = header.shape("attn_pool.mlp.fc1.weight", 2)[0]
    return {"pooling": "map", "pooling_mlp_dim": None if rows == hidden else rows}


def _table(header, rows, patch, token, registers, stated):
    """The image size, whether the class token has a row, and how many rows the registers have."""
    if not rows:
        if size := stated.get("image_size"):
            return size, 0, 0
        size = header.given.get("image_size") or 224
        sides = (size, size) if isinstance(size, int) else size
        return tuple(side // p * p for side, p in zip(sides, patch, strict=True)), 0, 0
    prefixes = [0, token] + ([token + registers] if registers else [])
    size, before = header.table_size(rows, prefixes, patch, stated.get("image_size"))
    fold = registers if registers and before == token + registers else 0
    return size, before - fold, fold


def _check_no_positions(header: Header, stated: Mapping[str, Any]) -> None:
    """Refuses a model without a table that may have rotary positions, which have no arrays."""
    if "position_embedding" not in stated and "position_embedding" not in header.given:
        raise ValueError(
            "source must hold a position table, or position_embedding='none' must be passed: a "
            "model without one may have rotary positions, which have no arrays. If it has, pass "
            f"position_embedding='rope' and {', '.join(ROPE)}. Received: no array 'pos_embed'"
        )


def _check_rotary(header: Header) -> None:
    """Refuses an EVA-02 without a word on its positions: beside the table they are rotary."""
    known = "architecture" in header.config or "position_embedding" in header.given
    if not known and header.has(r"blocks\.0\.attn\.(q_bias|q_proj\.)"):
        raise ValueError(
            "position_embedding must be passed: EVA-02, whose arrays these may be, has rotary "
            f"positions, 'learned+rope', beside its table. Pass {', '.join(ROPE)} too. "
            "Received: position_embedding=None"
        )


def _check_size_is_known(header: Header, stated: Mapping[str, Any], shown: Any) -> None:
    if not (shown or stated.get("image_size") or header.given.get("image_size")):
        raise ValueError(
            "image_size must be passed: an MLP of relative positions fits any size. "
            "Received: no table of positions, and no image_size"
        )


def _shows_block_norm(header: Header) -> bool:
    """Whether there are parts that no model has whose LayerNorms follow each branch."""
    parts = ("ls1.gamma", "gamma_1", "attn.relative_position_bias_table")
    return any(f"blocks.0.{name}" in header.shapes for name in parts)


def _check_block_norm(header: Header) -> None:
    """Refuses a model that may have its LayerNorms after each branch, under the same names."""
    plain = ("attn.q_norm.weight",)
    # With timm's own relative positions there are biases in either case.
    if not header.has(r"(blocks\.0\.attn\.|shared_)rel_pos\."):
        plain += ("attn.qkv.bias",)
    known = "architecture" in header.config or "block_norm" in header.given
    shown = _shows_block_norm(header) or any(f"blocks.0.{n}" in header.shapes for n in plain)
    if not known and not shown:
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


def timm_rows(
    config: ViTConfig, names: Mapping[str, Any] = NAMES, fold: int = 0, relative: str = "own"
) -> Iterator[Row]:
    """The table of names. `fold` rows of the position table are the registers'."""
    if config.stem:
        yield from resnet_names.timm_rows(config)
    yield from linear("patch_embed.proj", "patches/projection", CONV, bias=config.patch_bias)
    if config.patch_norm:
        yield from norm("patch_embed.norm", "patches/norm_after", config.norm)
    if config.class_token:
        yield Pair("cls_token", ("class_token/tokens",))
    if config.distillation_token:
        yield Pair("dist_token", ("distillation_token/tokens",))
    if fold:
        yield from folded_registers(config, names["registers"], "pos_embed", fold)
    else:
        if config.num_registers:
            yield Pair(names["registers"], ("registers/tokens",))
        if config.position_table == "learned":
            yield Pair("pos_embed", ("position_embedding/table",), TABLE)
    if config.embedding_norm:
        yield from norm("norm_pre", "embedding_norm", config.norm)
    for i in range(config.depth):
        yield from _block(config, f"blocks.{i}", f"encoder_block_{i}", names)
        own, shared = names["relative"]
        yield from relative_rows(config, i, own.format(i), shared, relative)
        if config.attention_positions == "rope_mixed":
            yield Derived(
                f"encoder_block_{i}/attention/rotary/frequencies",
                {FREQUENCIES: (2, config.depth, config.num_heads, config.key_dim // 2)},
                lambda frequencies, i=i: frequencies[:, i],
            )
    if config.final_norm != "none":
        after = config.final_norm == "after_pooling"
        yield from norm("fc_norm" if after else "norm", "encoder_norm", config.norm)
    if config.attention_pooling:
        yield from _attention_pooling()
    if config.representation_size is not None:
        yield from linear("pre_logits.fc", "pre_logits")
    if config.num_classes and config.pooling == "token_pair":
        yield from linear("head", "head/class")
        yield from linear("head_dist", "head/distillation")
    elif config.num_classes:
        yield from linear(names["head"], "head")


def _block(config, theirs, ours, names) -> Iterator[Row]:
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm", config.norm)
    yield from _projections(config, f"{theirs}.attn", f"{ours}/attention", names)
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


def _projections(config, theirs, ours, names) -> Iterator[Row]:
    """Query, key and value: in one matrix, or in timm's Eva one each, with or without biases."""
    biased = [name for name in QKV if config.qkv_bias and (config.key_bias or name != "key")]
    if names.get("separate"):
        for name in QKV:
            yield Pair(f"{theirs}.{name[0]}_proj.weight", (f"{ours}/{name}/kernel",), INTO_HEADS)
        for name in biased:
            yield Pair(f"{theirs}.{name[0]}_proj.bias", (f"{ours}/{name}/bias",), HEADS_BIAS)
        return
    together = f"{theirs}.qkv.bias" if len(biased) == len(QKV) else None
    yield from qkv(f"{theirs}.qkv.weight", together, ours)
    for name in () if together else biased:
        place = f"{ours}/{name}/bias"
        if names.get("masked"):  # DINOv3's own code multiplies the keys' third of the bias by 0
            size, start = config.num_heads * config.key_dim, QKV.index(name)
            third = slice(start * size, (start + 1) * size)
            yield Derived(place, {f"{theirs}.qkv.bias": (3 * size,)}, lambda b, part=third: b[part])
        else:
            yield Pair(f"{theirs}.{name[0]}_bias", (place,), HEADS_BIAS)


def _attention_pooling() -> Iterator[Pair]:
    yield Pair("attn_pool.latent", ("pooling/probe",))
    ours = "pooling/attention"
    yield from linear("attn_pool.q", f"{ours}/query", INTO_HEADS, HEADS_BIAS)
    yield from qkv("attn_pool.kv.weight", "attn_pool.kv.bias", ours, ("key", "value"))
    yield from linear("attn_pool.proj", f"{ours}/attention_output", FROM_HEADS)
    yield from norm("attn_pool.norm", "pooling/norm")
    for i in (1, 2):
        yield from linear(f"attn_pool.mlp.fc{i}", f"pooling/mlp/dense_{i}")


def folded_registers(
    config: ViTConfig, registers: str, positions: str, rows: int
) -> Iterator[Derived]:
    """Registers with rows in the position table: the rows are added to them once."""
    token, width = config.num_prefix_rows, config.width
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


TIMM = Format(
    name="timm",
    mark=r"(?P<prefix>.*)patch_embed\.proj\.weight",
    read_config=read_timm,
    rows=timm_rows,
    needs=(
        r"blocks\.0\.attn\.qkv\.weight$",
        r"blocks\.0\.attn\.q_proj\.weight$",
        r"norm_pre\.",
    ),
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
        POOLING_SIZES,
        Limit(
            lambda c: c.pooling != "token_mean",
            "pooling must be another than 'token_mean', which timm does not have",
        ),
        Limit(
            lambda c: (
                not c.distillation_token
                or (c.pooling == "token_pair" and c.class_row and not c.num_registers)
            ),
            "distillation_token must be False, or pooling 'token_pair', with rows in the table for "
            "both tokens and without registers",
        ),
        Limit(
            lambda c: (
                not (c.distillation_token or c.stem)
                or (c.mlp, c.block_norm, c.norm_epsilon) == ("mlp", "pre", 1e-6)
            ),
            "mlp must be 'mlp', block_norm 'pre' and norm_epsilon 1e-06 with a distillation token "
            "or a stem",
        ),
        Limit(
            lambda c: not (c.distillation_token and c.stem),
            "stem must be None with a distillation token",
        ),
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
            lambda c: c.mlp == "mlp" or not c.attention_pooling,
            "mlp must be 'mlp' for pooling={0.pooling!r}, whose own MLP would be twice as large",
        ),
        Limit(
            lambda c: not c.distillation_token or c.num_classes > 0,
            "num_classes must be greater than 0 with a distillation token: timm averages features",
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
        Limit(
            lambda c: not c.stem or resnet_names.TIMM.items() <= c.to_dict().items(),
            "stem_standardization must be 'variance' and stem_epsilon 1e-05",
        ),
        Limit(
            lambda c: not c.stem or (c.stem_depths in timm_config.HYBRIDS and c.stem_width == 64),
            "stem_width must be 64 and stem_depths one of "
            + ", ".join(map(str, timm_config.HYBRIDS)),
        ),
    ),
    json_files={"config.json": timm_config.config_json},
)

"""The config of a timm `VisionTransformer` or `Eva`, from its arrays and from `config.json`.

What neither tells is timm's default, and is said to be assumed; where the default may be another
model, the checkpoint is refused until the caller says what it is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_vit.weights.formats import resnet_names, timm_config
from keras_vit.weights.formats.relative_positions import held, relative_fields, with_table
from keras_vit.weights.formats.table import Header, Reading

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

# What no array shows of rotary positions.
ROPE = ("rope_base", "rope_coordinates", "rope_order", "rope_pairs", "rope_offset", "rope_grid")
FREQUENCIES = "rope.freqs"
# Fields that config.json or the caller states. Positions too: rotary ones have no arrays.
UNSEEN = (
    *("num_heads", "gelu", "norm_epsilon", "pooling", "position_embedding"),
    "interpolation",  # files of DINO's and MAE's own code have timm's names
)


@dataclasses.dataclass
class _Checkpoint:
    """A checkpoint while it is read."""

    header: Header
    names: dict[str, Any]
    stated: dict[str, Any]  # fields of config.json, which overrule those of the arrays
    assumed: set[str]  # fields that nothing shows or states

    def has(self, name: str) -> bool:
        return name in self.header.shapes

    @property
    def is_named(self) -> bool:
        """Whether config.json names the architecture, which decides what no array shows."""
        return "architecture" in self.header.config

    def is_given(self, field: str) -> bool:
        return field in self.header.given


def read_timm(header: Header, names: Mapping[str, Any] = NAMES) -> Reading:
    """The config: from shapes, then from `config.json`, then timm's own defaults."""
    stated = timm_config.stated_fields(header.config)
    read = _Checkpoint(header, dict(names), stated, set())
    if not read.is_named:
        read.assumed |= header.unstated(UNSEEN, stated)
    patches = _patches(read)
    tokens = _tokens(read)
    positions, fold = _positions(read, patches["patch_size"], tokens)
    fields = patches | tokens | positions | _attention(read, patches["width"]) | _mlp(read)
    if fields["mlp"] == "swiglu" and read.has("pos_embed"):
        _check_rotary(read)
    fields |= _norms(read) | _pooling(read, tokens, fields["mlp_dim"])
    if fields["layer_scale"] is None:
        stated.pop("layer_scale", None)
    for name in ("pixel_mean", "pixel_std"):
        if isinstance(stated.get(name), tuple) and len(stated[name]) != fields["in_channels"]:
            del stated[name]
    fields["interpolation"] = "timm"
    _check_padding(header, fields["image_size"], fields["patch_size"])
    style = {"names": read.names, "fold": fold, "relative": held(header, *_places(read))}
    return Reading(fields | stated, style, assumed=tuple(sorted(read.assumed)))


def _patches(read: _Checkpoint) -> dict[str, Any]:
    width, channels, *patch = read.header.shape("patch_embed.proj.weight", 4)
    stem = resnet_names.timm_fields(read.header)
    return {
        "in_channels": channels,
        **stem,
        "patch_size": resnet_names.patch_in_pixels(tuple(patch), stem),
        "width": width,
        "patch_norm": "after" if read.has("patch_embed.norm.weight") else False,
        "patch_bias": read.has("patch_embed.proj.bias"),
        "embedding_norm": read.has("norm_pre.weight"),
    }


def _tokens(read: _Checkpoint) -> dict[str, Any]:
    """The tokens before the patches."""
    return {
        "class_token": read.has("cls_token"),
        "distillation_token": read.has("dist_token"),
        "num_registers": read.header.size(read.names["registers"], 1, 0),
    }


def _places(read: _Checkpoint) -> tuple[str, str]:
    """The prefixes of a block's own relative positions, and of those that all blocks share."""
    own, shared = read.names["relative"]
    return own.format(0), shared


def _positions(read, patch, tokens) -> tuple[dict[str, Any], int]:
    """The fields of the positions and the image size; how many rows of the table are registers'."""
    header, stated = read.header, read.stated
    rows = header.size("pos_embed", 1, 0)
    relative = relative_fields(header, *_places(read), patch, stated)
    kind = with_table(relative, bool(rows))
    if relative:
        read.assumed.discard("position_embedding")
        stated.pop("position_embedding", None)
        _check_size_is_known(read, rows or "image_size" in relative)
    elif read.has(FREQUENCIES):
        kind = "learned+rope_mixed" if rows else "rope_mixed"
        stated.setdefault("rope_coordinates", "index")
        stated.setdefault("rope_order", "columns_first")
        stated.setdefault("rope_pairs", "neighbors")
        read.assumed.discard("position_embedding")
    elif not rows:
        _check_no_positions(read)
    if not (rows or relative):
        read.assumed.discard("interpolation")
    if not read.is_named and "rope" in (header.given.get("position_embedding") or kind):
        read.assumed |= {name for name in ROPE if not read.is_given(name)}
    shown = relative.pop("image_size", None)  # by a table of offsets
    size = stated.pop("image_size", None)
    size, row, fold = _table(read, rows, patch, tokens, shown or size)
    return relative | {
        "image_size": shown or size,
        "position_embedding": kind,
        "position_class_row": bool(row),
    }, fold


def _table(read, rows, patch, tokens, size) -> tuple[Any, int, int]:
    """The image size, whether the class token has a row, and how many rows the registers have."""
    if not rows:
        if size:
            return size, 0, 0
        size = read.header.given.get("image_size") or 224
        sides = (size, size) if isinstance(size, int) else size
        return tuple(side // p * p for side, p in zip(sides, patch, strict=True)), 0, 0
    registers = tokens["num_registers"]
    token = tokens["class_token"] * (1 + tokens["distillation_token"])
    prefixes = [0, token] + ([token + registers] if registers else [])
    size, before = read.header.table_size(rows, prefixes, patch, size)
    fold = registers if registers and before == token + registers else 0
    return size, before - fold, fold


def _attention(read: _Checkpoint, width: int) -> dict[str, Any]:
    separate = read.names["separate"] = read.has("blocks.0.attn.q_proj.weight")
    first = "blocks.0.attn.q_proj.weight" if separate else "blocks.0.attn.qkv.weight"
    inner = read.header.shape(first, 2)[0] // (1 if separate else 3)
    per_head = read.header.shapes.get("blocks.0.attn.q_norm.weight")
    if per_head:
        read.stated["num_heads"] = inner // max(per_head[0], 1)
        read.assumed.discard("num_heads")
    heads = read.header.heads(width, read.stated.pop("num_heads", None))
    # EVA and BEiT have a bias of the queries, and none of the keys.
    queries = read.header.has(r"blocks\.0\.attn\.(q_bias|q_proj\.bias)$")
    return {
        "depth": read.header.count(r"blocks\.(\d+)\.norm1\."),
        "num_heads": heads,
        "head_dim": None if inner == width else inner // heads,
        "attention_inner_norm": read.has("blocks.0.attn.norm.weight"),
        "dense_bias": read.has("blocks.0.attn.proj.bias"),
        "qkv_bias": queries or read.has("blocks.0.attn.qkv.bias"),
        "key_bias": not queries or read.has("blocks.0.attn.k_proj.bias"),
        "qk_norm": per_head is not None,
    }


def _mlp(read: _Checkpoint) -> dict[str, Any]:
    """The fields of the MLP, which may be gated."""
    names = next((m for m in MLPS if all(read.has(_weight(name)) for name in m)), MLPS[0])
    read.names["mlp"] = names
    first, last = _weight(names[0]), _weight(names[-1])
    rows, hidden = read.header.shape(first, 2)[0], read.header.shape(last, 2)[1]
    packed = len(names) == 2 and rows == 2 * hidden
    if rows != hidden and not packed:
        raise ValueError(
            "source must have an MLP whose hidden values are all read, or a gated one of twice as "
            f"many. Received: {first} with {rows} rows for {last} with {hidden} columns"
        )
    gated = packed or len(names) == 3
    if gated:
        read.stated.pop("gelu", None)
        read.assumed.discard("gelu")
        if not read.is_named and names == ("fc1", "fc2"):
            read.assumed.add("mlp")  # these names say nothing of what the gate computes
    return {
        "mlp_dim": hidden,
        "mlp": "swiglu" if gated else "mlp",
        "mlp_inner_norm": read.has("blocks.0.mlp.norm.weight"),
        "gelu": "exact",
    }


def _weight(name: str) -> str:
    return f"blocks.0.mlp.{name}.weight"


def _norms(read: _Checkpoint) -> dict[str, Any]:
    """The fields of the norms and of LayerScale."""
    _check_block_norm(read)
    rms = not read.has("blocks.0.norm1.bias")
    if not read.is_named:
        if not _shows_block_norm(read):
            read.assumed |= read.header.unstated(("block_norm",), read.stated)
        if rms:
            read.assumed.add("norm")  # a LayerNorm without an offset has the same arrays
    if read.has("blocks.0.gamma_1"):  # timm's Eva
        read.names["scales"] = RAW_SCALES
    return {
        "norm": "rms" if rms else "layer",
        "norm_epsilon": 1e-5 if read.has("norm_pre.weight") else 1e-6,  # CLIP's
        "layer_scale": 1e-5 if read.has(f"blocks.0.{read.names['scales'][0]}") else None,
    }


def _pooling(read: _Checkpoint, tokens: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """The fields of pooling, of the norm beside it and of the head."""
    header, stated = read.header, read.stated
    after = header.has(r"fc_norm\.")
    norm = "before_pooling" if header.has(r"norm\.") else "none"
    fields = {
        "pooling": "mean" if after or not tokens["class_token"] else "token",
        "final_norm": "after_pooling" if after else norm,
        "representation_size": header.size("pre_logits.fc.weight", 0, None),
        "num_classes": header.size(f"{read.names['head']}.weight", 0, 0),
    }
    if tokens["distillation_token"] and stated.get("pooling", "token") == "token":
        stated["pooling"] = "token_pair"
        read.assumed.discard("pooling")
    if header.has(r"attn_pool\."):
        rows = header.shape("attn_pool.mlp.fc1.weight", 2)[0]
        fields |= {"pooling": "map", "pooling_mlp_dim": None if rows == hidden else rows}
    # Tokens before the patches may be pooled, or left out, or be what is read: no array shows it.
    if not (tokens["class_token"] or tokens["num_registers"]):
        read.assumed.discard("pooling")
    return fields


def _check_no_positions(read: _Checkpoint) -> None:
    """Refuses a model without a table that may have rotary positions, which have no arrays."""
    if "position_embedding" not in read.stated and not read.is_given("position_embedding"):
        raise ValueError(
            "source must hold a position table, or position_embedding='none' must be passed: a "
            "model without one may have rotary positions, which have no arrays. If it has, pass "
            f"position_embedding='rope' and {', '.join(ROPE)}. Received: no array 'pos_embed'"
        )


def _check_rotary(read: _Checkpoint) -> None:
    """Refuses an EVA-02 without a word on its positions: beside the table they are rotary."""
    known = read.is_named or read.is_given("position_embedding")
    if not known and read.header.has(r"blocks\.0\.attn\.(q_bias|q_proj\.)"):
        raise ValueError(
            "position_embedding must be passed: EVA-02, whose arrays these may be, has rotary "
            f"positions, 'learned+rope', beside its table. Pass {', '.join(ROPE)} too. "
            "Received: position_embedding=None"
        )


def _check_padding(header: Header, size: Any, patch: tuple[int, int]) -> None:
    """Refuses a model that pads its images, because their patches are more than the table's."""
    sides = (size, size) if isinstance(size, int) else size
    padded = any(side % p for side, p in zip(sides, patch, strict=True))
    if padded and (header.config.get("model_args") or {}).get("dynamic_img_pad"):
        raise ValueError(
            "img_size must be a multiple of patch_size for dynamic_img_pad=True in config.json: "
            "ViT does not pad images. Set another size in timm, by set_input_size, and save again. "
            f"Received: img_size={tuple(sides)}, patch_size={patch}"
        )


def _check_size_is_known(read: _Checkpoint, shown: Any) -> None:
    if not (shown or read.stated.get("image_size") or read.header.given.get("image_size")):
        raise ValueError(
            "image_size must be passed: an MLP of relative positions fits any size. "
            "Received: no table of positions, and no image_size"
        )


def _shows_block_norm(read: _Checkpoint) -> bool:
    """Whether there are parts that no model has whose LayerNorms follow each branch."""
    parts = ("ls1.gamma", "gamma_1", "attn.relative_position_bias_table")
    return any(read.has(f"blocks.0.{name}") for name in parts)


def _check_block_norm(read: _Checkpoint) -> None:
    """Refuses a model that may have its LayerNorms after each branch, under the same names."""
    plain = ("attn.q_norm.weight",)
    # With timm's own relative positions there are biases in either case.
    if not read.header.has(r"(blocks\.0\.attn\.|shared_)rel_pos\."):
        plain += ("attn.qkv.bias",)
    known = read.is_named or read.is_given("block_norm")
    shown = _shows_block_norm(read) or any(read.has(f"blocks.0.{name}") for name in plain)
    if not known and not shown:
        raise ValueError(
            "source must state where its LayerNorms are: most of timm's models without query, key "
            "and value biases, q/k norm and LayerScale have them after each branch. Pass "
            "block_norm='res_post' for these, and block_norm='pre' if they are before each branch. "
            "Received: no array 'blocks.0.attn.qkv.bias'"
        )

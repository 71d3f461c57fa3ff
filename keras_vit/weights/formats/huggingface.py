"""Checkpoints of transformers' ViT, DeiT, ViT-MAE, DINOv2, BEiT, Data2Vec and I-JEPA.

LayerNorm's epsilon is 1e-12 for all but DINOv2, and GELU is exact; `config.json` states both. Files
have the names of transformers 4, which version 5 still writes. Its names in memory are read too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface_config
from keras_vit.weights.formats.relative_positions import (
    INDEX,
    INDEX_REASON,
    held,
    relative_fields,
    relative_rows,
    with_table,
)
from keras_vit.weights.formats.table import (
    PLAIN,
    STANDARD_HEADS,
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
)

# Names of a block's parts: in files, in the memory of transformers 5, and the same for DINOv2.
OLD = {
    "layers": "encoder.layer",
    "qkv": "attention.attention.{}",
    "out": "attention.output.dense",
    "mlp": ("intermediate.dense", "output.dense"),
    "norms": ("layernorm_before", "layernorm_after"),
    "scales": ("layer_scale1.lambda1", "layer_scale2.lambda1"),
    "relative": (
        "encoder.layer.{}.attention.attention.relative_position_bias.",
        "encoder.relative_position_bias.",
    ),
}
NEW = {
    **OLD,
    "layers": "layers",
    "qkv": "attention.{}_proj",
    "out": "attention.o_proj",
    "mlp": ("mlp.fc1", "mlp.fc2"),
    "relative": ("layers.{}.relative_position_bias.", "shared_position_bias."),
}
DINO = {**OLD, "mlp": ("mlp.fc1", "mlp.fc2"), "norms": ("norm1", "norm2")}
NEW_DINO = {**NEW, "layers": "encoder.layer", "norms": ("norm1", "norm2")}
GATED_DINO = {**DINO, "mlp": ("mlp.weights_in", "mlp.weights_out")}  # gate and gated in one
NEW_GATED_DINO = {**NEW_DINO, "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
SPELLINGS = (OLD, NEW, DINO, NEW_DINO, GATED_DINO, NEW_GATED_DINO)
BEIT_SCALES = ("lambda_1", "lambda_2")


def read_huggingface(header: Header) -> Reading:
    """The config: from shapes, then from `config.json`."""
    width, channels, ph, pw = header.shape("embeddings.patch_embeddings.projection.weight", 4)
    stated = huggingface_config.stated_fields(header.config, header.pixels, channels)
    names = next((n for n in SPELLINGS if _has_names(header, n)), OLD)
    gated = names in (GATED_DINO, NEW_GATED_DINO)
    unstated = ("num_heads", "norm_epsilon", *(() if gated else ("gelu",)))
    assumed = header.unstated(unstated, stated)
    if gated:
        stated.pop("gelu", None)
    distilled = header.has(r"embeddings\.distillation_token$")
    teacher = distilled and header.has(r"(cls|distillation)_classifier\.")
    head = header.shapes.get("cls_classifier.weight" if teacher else "classifier.weight")
    # DINOv2's classifier reads the class token and the mean of the patches.
    wide = not distilled and header.size("classifier.weight", 1, width) == 2 * width
    count = header.size("embeddings.register_tokens", 1, 0)
    block = f"{names['layers']}.0"
    query, key = _qkv(names, "query"), _qkv(names, "key")
    qkv_bias = f"{block}.{query}.bias" in header.shapes
    beit = qkv_bias and f"{block}.{key}.bias" not in header.shapes  # or Data2Vec
    if beit:
        names = {**names, "scales": BEIT_SCALES}
    places = (names["relative"][0].format(0), names["relative"][1])
    relative = relative_fields(header, *places, (ph, pw), stated)
    size = relative.pop("image_size", stated.pop("image_size", None))
    rows = header.size("embeddings.position_embeddings", 1, 0)
    token = "embeddings.cls_token" in header.shapes
    if rows or not beit:
        rows = header.shape("embeddings.position_embeddings", 3)[1]
        prefix = 2 if distilled else int(token)
        size, _ = header.table_size(rows, [prefix], (ph, pw), size)
    if relative and size[0] // ph != size[1] // pw:
        raise ValueError(
            "source must have a square grid of patches: transformers reads the relative positions "
            f"of another with rows and columns swapped. Received: image_size={size}"
        )
    heads = header.heads(width, stated.pop("num_heads", None))
    inner = header.shape(f"{block}.{query}.weight", 2)[0]
    scaled = f"{block}.{names['scales'][0]}" in header.shapes
    pooler = header.size("pooler.dense.weight", 0, None)
    used = not head and not header.given.get("num_classes")
    if pooler and used:
        _check_pooler(header)
    fields = {
        "image_size": size or header.given.get("image_size") or 224,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(rf"{names['layers']}\.(\d+)\."),
        "num_heads": heads,
        "head_dim": None if inner == width else inner // heads,
        "mlp_dim": header.shape(f"{block}.{names['mlp'][-1]}.weight", 2)[1],
        "mlp": "swiglu" if gated else "mlp",
        "norm_epsilon": 1e-6 if scaled and not beit else 1e-12,
        "gelu": "exact",
        "qkv_bias": qkv_bias,
        "key_bias": not beit,
        **relative,
        "position_embedding": with_table(relative, bool(rows)),
        "layer_scale": stated.pop("layer_scale", 1.0) if scaled else None,
        "distillation_token": distilled,
        "num_registers": count,
        "class_token": token,
        "pooling": _pooling(token, teacher, wide),
        # ViTModel ends in its pooler. A classifier reads the class token before it.
        "representation_size": pooler if used else None,
        "num_classes": head[0] if head else 0,
        "interpolation": "huggingface",
        **huggingface_config.family_pixels(
            header.config.get("model_type") or _shown_type(distilled, scaled and not beit), channels
        ),
    }
    if scaled and count:
        fields["interpolation"] = "huggingface_dinov2_registers"
    if not head:
        stated.pop("labels", None)
    if "pooler.layernorm.weight" in header.shapes:
        fields |= {"final_norm": "after_pooling", "pooling": "mean"}
    elif beit and "layernorm.weight" not in header.shapes:
        fields["final_norm"] = "none"
    style = {"names": names, "relative": held(header, *places)}
    return Reading(fields | stated, style, assumed=tuple(sorted(assumed)))


def _shown_type(distilled: bool, dinov2: bool) -> str | None:
    """The model type that arrays show; None if it may be one of several."""
    return "deit" if distilled else "dinov2" if dinov2 else None


def _pooling(token: bool, teacher: bool, wide: bool) -> str:
    if not token:
        return "mean"
    return "token_pair" if teacher else "token_mean" if wide else "token"


def _check_pooler(header: Header) -> None:
    """Refuses a pooler with another activation than tanh."""
    act = header.config.get("pooler_act", "tanh")
    if act != "tanh" and header.given.get("representation_size", 0) is not None:
        raise ValueError(
            "pooler_act in config.json must be 'tanh'. Leave the pooler out with "
            f"representation_size=None, or pass num_classes. Received: pooler_act={act!r}"
        )


def _has_names(header: Header, names: Mapping[str, Any]) -> bool:
    block = f"{names['layers']}.0"
    parts = (_qkv(names, "query"), names["mlp"][0], names["norms"][0])
    return all(f"{block}.{part}.weight" in header.shapes for part in parts)


def _qkv(names: Mapping[str, Any], name: str) -> str:
    return names["qkv"].format(name if "attention.attention" in names["qkv"] else name[0])


def huggingface_rows(
    config: ViTConfig, names: Mapping[str, Any] = OLD, prefix: str = "", relative: str = "own"
) -> Iterator[Row]:
    """The table of names. `prefix` precedes all names but the classifier's."""
    embeddings = f"{prefix}embeddings"
    table = f"{embeddings}.position_embeddings"
    yield from linear(f"{embeddings}.patch_embeddings.projection", "patches/projection", CONV)
    if config.class_token:
        yield Pair(f"{embeddings}.cls_token", ("class_token/tokens",))
    if config.position_table:
        yield Pair(table, ("position_embedding/table",), TABLE)
    if config.distillation_token:
        yield Pair(f"{embeddings}.distillation_token", ("distillation_token/tokens",))
    if config.num_registers:
        yield Pair(f"{embeddings}.register_tokens", ("registers/tokens",))
    for i in range(config.depth):
        block = f"{prefix}{names['layers']}.{i}"
        yield from block_rows(config, names, block, f"encoder_block_{i}")
        own, shared = names["relative"]
        yield from relative_rows(config, i, own.format(i), shared, relative)
    if config.final_norm != "none":
        place = "pooler." if config.final_norm == "after_pooling" else ""
        yield from norm(f"{prefix}{place}layernorm", "encoder_norm")
    if config.representation_size is not None:
        yield from linear(f"{prefix}pooler.dense", "pre_logits")
    if config.num_classes and config.pooling == "token_pair":
        yield from linear("cls_classifier", "head/class")
        yield from linear("distillation_classifier", "head/distillation")
    elif config.num_classes:
        yield from linear("classifier", "head")


def block_rows(config, names, theirs, ours) -> Iterator[Pair]:
    """The rows of a block."""
    yield from norm(f"{theirs}.{names['norms'][0]}", f"{ours}/attention_norm")
    for name in QKV:
        source = f"{theirs}.{_qkv(names, name)}"
        yield Pair(f"{source}.weight", (f"{ours}/attention/{name}/kernel",), INTO_HEADS)
        if config.qkv_bias and (config.key_bias or name != "key"):
            yield Pair(f"{source}.bias", (f"{ours}/attention/{name}/bias",), HEADS_BIAS)
    yield from linear(f"{theirs}.{names['out']}", f"{ours}/attention/attention_output", FROM_HEADS)
    yield from norm(f"{theirs}.{names['norms'][1]}", f"{ours}/mlp_norm")
    yield from mlp(theirs, f"{ours}/mlp", names["mlp"], config.mlp == "swiglu")
    if config.layer_scale is not None:
        for scale, branch in zip(names["scales"], ("attention", "mlp"), strict=True):
            yield Pair(f"{theirs}.{scale}", (f"{ours}/{branch}_scale/gamma",))


def _rows_to_write(config: ViTConfig) -> Iterator[Row]:
    """The table of names of a classifier, or without a head of its encoder alone."""
    prefix = "deit." if config.distillation_token else "vit."
    return huggingface_rows(config, prefix=prefix if config.num_classes else "")


HUGGINGFACE = Format(
    name="huggingface",
    mark=r"(?P<prefix>.*)embeddings\.patch_embeddings\.projection\.weight",
    read_config=read_huggingface,
    rows=huggingface_rows,
    rows_to_write=_rows_to_write,
    dropped={
        r"embeddings\.mask_token$": "the mask token of pretraining",
        r"decoder\.": "the decoder of pretraining",
        r"lm_head\.": "the head of pretraining",
        INDEX: INDEX_REASON,
        r"pooler\.dense\.": "a pooler that the classifier does not use",
    },
    refused={
        r"embeddings\.(text|token)_embed": "a text model",
    },
    writable={k: v for k, v in PLAIN.items() if k not in ("qkv_bias", "ignore_remainder")}
    | {"class_token": (True,), "position_class_row": (True,), "pooling": ("token", "token_pair")}
    | {"distillation_token": (False, True)},
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: c.pooling != "token_pair" or c.num_classes > 0,
            "pooling must be 'token' without a head, it is {0.pooling!r}",
        ),
        Limit(
            lambda c: not c.num_classes or c.representation_size is None,
            "representation_size must be None if there is a head, which does not use the pooler",
        ),
    ),
    json_files={
        "config.json": huggingface_config.config_json,
        "preprocessor_config.json": huggingface_config.preprocessor_json,
    },
)

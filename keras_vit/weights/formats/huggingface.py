"""Checkpoints of transformers' ViT, DeiT, ViT-MAE and DINOv2.

LayerNorm's epsilon is 1e-12 for all but DINOv2, and GELU is exact; `config.json` states both. Files
have the names of transformers 4, which version 5 still writes. Its names in memory are read too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface_config
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
    norm,
)

# Names of a block's parts: in files, in the memory of transformers 5, and the same for DINOv2.
OLD = {
    "layers": "encoder.layer",
    "qkv": "attention.attention.{}",
    "out": "attention.output.dense",
    "mlp": ("intermediate.dense", "output.dense"),
    "norms": ("layernorm_before", "layernorm_after"),
}
NEW = {
    **OLD,
    "layers": "layers",
    "qkv": "attention.{}_proj",
    "out": "attention.o_proj",
    "mlp": ("mlp.fc1", "mlp.fc2"),
}
DINO = {**OLD, "mlp": ("mlp.fc1", "mlp.fc2"), "norms": ("norm1", "norm2")}
NEW_DINO = {**NEW, "layers": "encoder.layer", "norms": ("norm1", "norm2")}
SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")


def read_huggingface(header: Header) -> Reading:
    """The config: from shapes, then from `config.json`."""
    width, channels, ph, pw = header.shape("embeddings.patch_embeddings.projection.weight", 4)
    stated = huggingface_config.stated_fields(header.config, header.pixels, channels)
    assumed = tuple(sorted(header.unstated(("num_heads", "gelu", "norm_epsilon"), stated)))
    names = next((n for n in (OLD, NEW, DINO, NEW_DINO) if _has_names(header, n)), OLD)
    distilled = header.has(r"embeddings\.distillation_token$")
    teacher = distilled and header.has(r"(cls|distillation)_classifier\.")
    head = header.shapes.get("cls_classifier.weight" if teacher else "classifier.weight")
    # DINOv2's classifier reads the class token and the mean of the patches.
    wide = not distilled and header.size("classifier.weight", 1, width) == 2 * width
    count = header.size("embeddings.register_tokens", 1, 0)
    rows = header.shape("embeddings.position_embeddings", 3)[1]
    prefix = 2 if distilled else 1
    size, _ = header.table_size(rows, [prefix], (ph, pw), stated.pop("image_size", None))
    block = f"{names['layers']}.0"
    query = _qkv(names, "query")
    heads = header.heads(width, stated.pop("num_heads", None))
    inner = header.shape(f"{block}.{query}.weight", 2)[0]
    scaled = f"{block}.{SCALES[0]}" in header.shapes
    pooler = header.size("pooler.dense.weight", 0, None)
    used = not head and not header.given.get("num_classes")
    if pooler and used:
        _check_pooler(header)
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(rf"{names['layers']}\.(\d+)\."),
        "num_heads": heads,
        "head_dim": None if inner == width else inner // heads,
        "mlp_dim": header.shape(f"{block}.{names['mlp'][0]}.weight", 2)[0],
        "norm_epsilon": 1e-6 if scaled else 1e-12,
        "gelu": "exact",
        "qkv_bias": f"{block}.{query}.bias" in header.shapes,
        "layer_scale": stated.pop("layer_scale", 1.0) if scaled else None,
        "distillation_token": distilled,
        "num_registers": count,
        "pooling": "token_pair" if teacher else "token_mean" if wide else "token",
        # ViTModel ends in its pooler. A classifier reads the class token before it.
        "representation_size": pooler if used else None,
        "num_classes": head[0] if head else 0,
        "interpolation": "huggingface",
    }
    if scaled and count:
        fields["interpolation"] = "huggingface_dinov2_registers"
    if not head:
        stated.pop("labels", None)
    return Reading(fields | stated, {"names": names}, assumed=assumed)


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
    config: ViTConfig, names: Mapping[str, Any] = OLD, prefix: str = ""
) -> Iterator[Row]:
    """The table of names. `prefix` precedes all names but the classifier's."""
    embeddings = f"{prefix}embeddings"
    table = f"{embeddings}.position_embeddings"
    yield from linear(f"{embeddings}.patch_embeddings.projection", "patches/projection", CONV)
    yield Pair(f"{embeddings}.cls_token", ("class_token/tokens",))
    yield Pair(table, ("position_embedding/table",), TABLE)
    if config.distillation_token:
        yield Pair(f"{embeddings}.distillation_token", ("distillation_token/tokens",))
    if config.num_registers:
        yield Pair(f"{embeddings}.register_tokens", ("registers/tokens",))
    for i in range(config.depth):
        block = f"{prefix}{names['layers']}.{i}"
        yield from _block(config, names, block, f"encoder_block_{i}")
    yield from norm(f"{prefix}layernorm", "encoder_norm")
    if config.representation_size is not None:
        yield from linear(f"{prefix}pooler.dense", "pre_logits")
    if config.num_classes and config.pooling == "token_pair":
        yield from linear("cls_classifier", "head/class")
        yield from linear("distillation_classifier", "head/distillation")
    elif config.num_classes:
        yield from linear("classifier", "head")


def _block(config, names, theirs, ours) -> Iterator[Pair]:
    yield from norm(f"{theirs}.{names['norms'][0]}", f"{ours}/attention_norm")
    for name in QKV:
        source = f"{theirs}.{_qkv(names, name)}"
        yield Pair(f"{source}.weight", (f"{ours}/attention/{name}/kernel",), INTO_HEADS)
        if config.qkv_bias:
            yield Pair(f"{source}.bias", (f"{ours}/attention/{name}/bias",), HEADS_BIAS)
    yield from linear(f"{theirs}.{names['out']}", f"{ours}/attention/attention_output", FROM_HEADS)
    yield from norm(f"{theirs}.{names['norms'][1]}", f"{ours}/mlp_norm")
    for number, name in enumerate(names["mlp"], 1):
        yield from linear(f"{theirs}.{name}", f"{ours}/mlp/dense_{number}")
    if config.layer_scale is not None:
        for scale, branch in zip(SCALES, ("attention", "mlp"), strict=True):
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
        r"pooler\.dense\.": "a pooler that the classifier does not use",
    },
    refused={
        r"(encoder\.layer|layers)\.0\.mlp\.(weights_in|gate_proj)": "a gated MLP (SwiGLU)",
        r"encoder\.layer\.0\.attention\.attention\.relative_position": "relative positions (BEiT)",
        r"embeddings\.(text|token)_embed": "a text model",
    },
    writable={name: values for name, values in PLAIN.items() if name != "qkv_bias"}
    | {"class_token": (True,), "position_class_row": (True,), "pooling": ("token", "token_pair")}
    | {"distillation_token": (False, True)},
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: c.pooling != "token_pair" or c.num_classes,
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

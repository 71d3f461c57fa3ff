"""Checkpoints of transformers' ViT, DeiT, ViT-MAE and DINOv2.

LayerNorm's epsilon is 1e-12 for all but DINOv2, GELU exact; `config.json` states both. Files hold
the names of transformers 4, which 5 still writes; its names in memory are read too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface_config
from keras_vit.weights.formats.table import Format, Header, Pair, Reading, Row, table_grid
from keras_vit.weights.formats.timm import folded
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

# Parts of a block, as files have them, as transformers 5 has them in memory, and DINOv2's.
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


def read(header: Header) -> Reading:
    """The config: shapes first, `config.json` for what they do not show."""
    width, channels, ph, pw = header.shape("embeddings.patch_embeddings.projection.weight", 4)
    stated = huggingface_config.read(header.config, header.pixels, channels)
    assumed = tuple(sorted(header.unstated(("num_heads", "gelu", "norm_epsilon"), stated)))
    names = next((n for n in (OLD, NEW, DINO, NEW_DINO) if _spelt(header, n)), OLD)
    teacher = header.has(r"(cls|distillation)_classifier\.")
    if teacher and "num_classes" not in header.given:
        raise ValueError(
            "source must not have two class tokens with a head each (DeiT distilled), which ViT "
            "has not; load its trunk with num_classes=0, or a number for a new head. "
            "Received: a checkpoint with cls_classifier and distillation_classifier"
        )
    head = header.shapes.get("classifier.weight")
    if head and head[1] != width and "num_classes" not in header.given:
        raise ValueError(
            "source must have a head on its class token alone; load its trunk with num_classes=0, "
            f"or a number for a new head. Received: classifier.weight of shape {head}"
        )
    distilled = header.has(r"embeddings\.distillation_token$")
    registers = "distillation_token" if distilled else "register_tokens"
    count = (header.shapes.get(f"embeddings.{registers}") or (0, 0))[1]
    grid, _ = table_grid(
        header.shape("embeddings.position_embeddings", 3)[1],
        [2 if distilled else 1],
        (ph, pw),
        stated.pop("image_size", None),
        header.given.get("image_size"),
    )
    block = f"{names['layers']}.0"
    query = _qkv(names, "query")
    heads = header.heads(width, stated.pop("num_heads", None))
    inner = header.shape(f"{block}.{query}.weight", 2)[0]
    scaled = f"{block}.{SCALES[0]}" in header.shapes
    pooler = header.shapes.get("pooler.dense.weight")
    used = not head and not teacher and not header.given.get("num_classes")
    if pooler and used:
        _check_pooler(header)
    fields = {
        "image_size": (grid[0] * ph, grid[1] * pw),
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
        "num_registers": count,
        # ViTModel ends in its pooler; a classifier reads the class token past it.
        "representation_size": pooler[0] if pooler and used else None,
        "num_classes": head[0] if head else 0,
        "interpolation": "huggingface",
    }
    if scaled and count:
        fields["interpolation"] = "huggingface_dinov2_registers"
    if not head:
        stated.pop("labels", None)
    style = {"names": names, "registers": registers}
    new_head = teacher or bool(head and head[1] != width)
    return Reading(fields | stated, style, new_head, assumed)


def _check_pooler(header: Header) -> None:
    """The Dense after the class token has a tanh here; its config may name another activation."""
    act = header.config.get("pooler_act", "tanh")
    if act != "tanh" and header.given.get("representation_size", 0) is not None:
        raise ValueError(
            "pooler_act in config.json must be 'tanh'. Leave the pooler out with "
            f"representation_size=None, or pass num_classes. Received: pooler_act={act!r}"
        )


def _spelt(header: Header, names: Mapping[str, Any]) -> bool:
    block = f"{names['layers']}.0"
    parts = (_qkv(names, "query"), names["mlp"][0], names["norms"][0])
    return all(f"{block}.{part}.weight" in header.shapes for part in parts)


def _qkv(names: Mapping[str, Any], name: str) -> str:
    return names["qkv"].format(name if "attention.attention" in names["qkv"] else name[0])


def pairs(
    config: ViTConfig,
    names: Mapping[str, Any] = OLD,
    registers: str = "register_tokens",
    prefix: str = "",
) -> Iterator[Row]:
    """The table of names; `prefix` stands before all but the classifier."""
    embeddings = f"{prefix}embeddings"
    table = f"{embeddings}.position_embeddings"
    yield from linear(f"{embeddings}.patch_embeddings.projection", "patches/projection", CONV)
    yield Pair(f"{embeddings}.cls_token", ("class_token/tokens",))
    if registers == "distillation_token" and config.num_registers:
        yield from folded(config, f"{embeddings}.{registers}", table, config.num_registers)
    else:
        yield Pair(table, ("position_embedding/table",), TABLE)
        if config.num_registers:
            yield Pair(f"{embeddings}.{registers}", ("registers/tokens",))
    for i in range(config.depth):
        block = f"{prefix}{names['layers']}.{i}"
        yield from _block(config, names, block, f"encoder_block_{i}")
    yield from norm(f"{prefix}layernorm", "encoder_norm")
    if config.representation_size is not None:
        yield from linear(f"{prefix}pooler.dense", "pre_logits")
    if config.num_classes:
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


def written(config: ViTConfig) -> Iterator[Row]:
    """The table of the file we write: a model with a classifier prefixes the names of the rest."""
    return pairs(config, prefix="vit." if config.num_classes else "")


HUGGINGFACE = Format(
    name="huggingface",
    mark=r"(?P<prefix>.*)embeddings\.patch_embeddings\.projection\.weight",
    read=read,
    pairs=pairs,
    written=written,
    dropped={
        r"embeddings\.mask_token$": "a token of masked training",
        r"decoder\.": "the decoder of masked training",
        r"pooler\.dense\.": "a pooler that the classifier does not read",
        r"(cls_|distillation_)classifier\.": "heads of distillation, replaced as asked for",
    },
    refused={
        r"(encoder\.layer|layers)\.0\.mlp\.(weights_in|gate_proj)": "a gated MLP (SwiGLU)",
        r"encoder\.layer\.0\.attention\.attention\.relative_position": "relative positions (BEiT)",
        r"embeddings\.(text|token)_embed": "a text model",
    },
    writes=huggingface_config.WRITES,
    complaints=huggingface_config.complaints,
    config_json=huggingface_config.write,
    extra_json={"preprocessor_config.json": huggingface_config.write_pixels},
)

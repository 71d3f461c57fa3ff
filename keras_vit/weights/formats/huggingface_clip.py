"""Image towers of transformers' CLIP, SigLIP and SigLIP 2.

A checkpoint holds the tower alone, or a whole model of images and text, of which only the tower is
loaded. CLIP's reads its class token after the last LayerNorm, and projects it if the checkpoint has
the projection, which becomes the head. SigLIP's last LayerNorm is followed by attention pooling. A
classifier of either kind averages the patch tokens instead; that of CLIP does so without the last
LayerNorm. `config.json` states GELU and epsilon; on the Hub it often omits defaults.

SigLIP 2 at a fixed resolution is a SigLIP. The other, `siglip2`, takes images of any size in one
batch (NaFlex): it projects flat patches by a matrix, and resamples its table for each image. A
`ViT` has one size, the square of the table's patches if none is passed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface_config
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.open_clip import TOKEN
from keras_vit.weights.formats.table import (
    PLAIN,
    POOLING_SIZES,
    STANDARD_HEADS,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
)
from keras_vit.weights.formats.torch_names import (
    CLIP_PIXELS,
    CONV,
    FROM_HEADS,
    HEADS_BIAS,
    INTO_HEADS,
    QKV,
    linear,
    norm,
    qkv,
)

# transformers' defaults by the tower's model type. A whole model's is that without the ending.
CLIP = {
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "image_size": 224,
}
DEFAULTS = {
    "clip_vision_model": CLIP,
    "metaclip_2_vision_model": CLIP,
    "chinese_clip_vision_model": CLIP,
    "altclip_vision_model": CLIP,
    "siglip_vision_model": {
        "num_attention_heads": 12,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "image_size": 224,
    },
    "siglip2_vision_model": {
        "num_attention_heads": 12,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "patch_size": 16,
        "num_channels": 3,
    },
}
WHOLE = {kind.removesuffix("_vision_model"): kind for kind in DEFAULTS}
BLOCK = "encoder.layers.0"
KERNEL = "embeddings.patch_embedding.weight"
FLAT = Layout("h w c d -> d (h w c)")
TOWER_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "layer_norm_eps", "image_size", "patch_size", "num_channels"),
)


def read_clip(header: Header) -> Reading:
    """The config: from shapes, then from `config.json`."""
    tower = _tower(header.config)
    flat = len(header.shapes.get(KERNEL, ())) == 2
    if "model_type" in tower:
        flat = tower["model_type"] == "siglip2_vision_model"
    width, channels, ph, pw = _flat_kernel(header, tower) if flat else header.shape(KERNEL, 4)
    known = {name: value for name, value in tower.items() if name != "model_type"}
    stated = huggingface_config.stated_fields(known, header.pixels, channels)
    if flat:
        stated.pop("image_size", None)  # it has none: the table is a square
    assumed = header.unstated(("num_heads", "gelu", "norm_epsilon"), stated)
    clip = "embeddings.class_embedding" in header.shapes
    rows = header.shape("embeddings.position_embedding.weight", 2)[0]
    size, _ = header.table_size(rows, [int(clip)], (ph, pw), stated.pop("image_size", None))
    hidden = header.shape(f"{BLOCK}.mlp.fc1.weight", 2)[0]
    pooled_hidden = header.size("head.mlp.fc1.weight", 0, hidden)
    classes = header.size("classifier.weight", 0, 0)
    if not classes:
        stated.pop("labels", None)
    projected = header.size("visual_projection.weight", 0, 0) if clip and not classes else 0
    if clip:
        pooling = "mean" if classes else "token"
    else:
        pooling = "map" if header.has(r"head\.probe$") and not classes else "mean"
        if "model_type" not in tower and pooling == "mean" and not classes:
            # PaddleOCR's tower has the arrays of SigLIP's without a head, and rotary positions.
            assumed |= header.unstated(("position_embedding",), {})
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"encoder\.layers\.(\d+)\."),
        "num_heads": header.heads(width, stated.pop("num_heads", None)),
        "mlp_dim": hidden,
        "norm_epsilon": 1e-5 if clip else 1e-6,
        "gelu": "quick" if clip else "tanh",
        "class_token": clip,
        "patch_bias": not clip,
        "embedding_norm": clip,
        "pooling": pooling,
        "final_norm": "none" if clip and classes else "before_pooling",
        "pooling_mlp_dim": None if pooled_hidden == hidden else pooled_hidden,
        "num_classes": classes or projected,
        "head_bias": None if projected else 0.0,
        "interpolation": "flexivit" if flat else "huggingface",
        **_pixels(clip, channels),
    }
    style = {"head": "visual_projection" if projected else "classifier", "flat": flat}
    return Reading(fields | stated, style, assumed=tuple(sorted(assumed)))


def _pixels(clip: bool, channels: int) -> dict[str, Any]:
    """The pixels of the published checkpoints. SigLIP's were resized in two ways."""
    if not clip:
        return {"pixel_mean": 0.5, "pixel_std": 0.5}
    statistics = CLIP_PIXELS if channels == 3 else {}
    return {"resize_method": "bicubic", "crop_fraction": 1.0, **statistics}


def _flat_kernel(header: Header, tower: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """The shape `(D, C, P, P)` of a projection of flat patches."""
    width, pixels = header.shape(KERNEL, 2)
    channels = tower.get("num_channels", 3)
    side = math.isqrt(pixels // channels) if type(channels) is int and channels > 0 else 0
    patch = tower.get("patch_size", side)
    if side == 0 or pixels != side * side * channels or patch != side:
        raise ValueError(
            f"patch_size and num_channels in config.json must be those of {KERNEL!r}, which "
            f"projects {pixels} pixels. Received: patch_size={patch!r}, num_channels={channels!r}"
        )
    return width, channels, side, side


def _tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` states of the image tower, with transformers' defaults."""
    if "model_type" not in config:
        return dict(config)
    kind = config["model_type"]
    tower = config
    if isinstance(kind, str) and kind in WHOLE:
        tower = {"model_type": WHOLE[kind], **(config.get("vision_config") or {})}
        kind = tower["model_type"]
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(
            f"model_type in config.json must be one of {', '.join((*WHOLE, *DEFAULTS))}. "
            f"Received: model_type={kind!r}"
        )
    return {**DEFAULTS[kind], **tower, "id2label": config.get("id2label")}


def clip_rows(config: ViTConfig, head: str = "classifier", flat: bool = False) -> Iterator[Pair]:
    """The table of names.

    Args:
        config: The config.
        head: The name of the last Linear.
        flat: Whether a matrix projects flat patches, as in NaFlex.
    """
    patches = ("embeddings.patch_embedding", "patches/projection", FLAT if flat else CONV)
    yield from linear(*patches, bias=config.patch_bias)
    if config.class_token:
        yield Pair("embeddings.class_embedding", ("class_token/tokens",), TOKEN)
    yield Pair("embeddings.position_embedding.weight", ("position_embedding/table",))
    if config.embedding_norm:
        yield from norm("pre_layrnorm", "embedding_norm")  # transformers' spelling
    for i in range(config.depth):
        yield from _block(f"encoder.layers.{i}", f"encoder_block_{i}")
    if config.final_norm != "none":
        yield from norm("post_layernorm", "encoder_norm")
    if config.attention_pooling:
        yield from _attention_pooling()
    if config.num_classes:
        yield from linear(head, "head", bias=config.head_bias is not None)


def _block(theirs: str, ours: str) -> Iterator[Pair]:
    yield from norm(f"{theirs}.layer_norm1", f"{ours}/attention_norm")
    for name in QKV:
        source, path = f"{theirs}.self_attn.{name[0]}_proj", f"{ours}/attention/{name}"
        yield Pair(f"{source}.weight", (f"{path}/kernel",), INTO_HEADS)
        yield Pair(f"{source}.bias", (f"{path}/bias",), HEADS_BIAS)
    output = f"{ours}/attention/attention_output"
    yield from linear(f"{theirs}.self_attn.out_proj", output, FROM_HEADS)
    yield from norm(f"{theirs}.layer_norm2", f"{ours}/mlp_norm")
    for i in (1, 2):
        yield from linear(f"{theirs}.mlp.fc{i}", f"{ours}/mlp/dense_{i}")


def _attention_pooling() -> Iterator[Pair]:
    yield Pair("head.probe", ("pooling/probe",))
    yield from qkv(
        "head.attention.in_proj_weight", "head.attention.in_proj_bias", "pooling/attention"
    )
    output = "pooling/attention/attention_output"
    yield from linear("head.attention.out_proj", output, FROM_HEADS)
    yield from norm("head.layernorm", "pooling/norm")
    for i in (1, 2):
        yield from linear(f"head.mlp.fc{i}", f"pooling/mlp/dense_{i}")


def _rows_to_write(config: ViTConfig) -> Iterator[Pair]:
    """The table with the tower's prefix, which version 4 of transformers needs."""
    for row in clip_rows(config):
        head = row.source.startswith("classifier.")
        yield row if head else dataclasses.replace(row, source=f"vision_model.{row.source}")


def config_json(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` of a SiglipForImageClassification, or of a SiglipVisionModel."""
    fields = huggingface_config.config_json(config)
    tower = {
        "model_type": "siglip_vision_model",
        "vision_use_head": config.attention_pooling,
        **{name: fields[name] for name in TOWER_FIELDS},
    }
    if not config.num_classes:
        return {"architectures": ["SiglipVisionModel"], **tower}
    labels = {name: fields[name] for name in ("id2label", "label2id")}
    names = {"architectures": ["SiglipForImageClassification"], "model_type": "siglip"}
    return {**names, "vision_config": tower, **labels}


HUGGINGFACE_CLIP = Format(
    name="huggingface_clip",
    mark=r"(?P<prefix>(.*\.)?)embeddings\.patch_embedding\.weight",
    read_config=read_clip,
    rows=clip_rows,
    rows_to_write=_rows_to_write,
    dropped={
        r"text_(model|projection)\.": "the text tower of an image-text model",
        r"post_layernorm\.": "a LayerNorm that the classifier does not use",
        r"logit_(scale|bias)$": "the loss of an image-text model",
        r"(embeddings|.*\.embeddings)\.position_ids$": "the numbers of the positions",
        r"head\.": "attention pooling that the classifier does not use",
    },
    writable=PLAIN
    | {"class_token": (False,), "pooling": ("map", "mean"), "representation_size": (None,)},
    limits=(
        STANDARD_HEADS,
        POOLING_SIZES,
        Limit(
            lambda c: not c.num_classes or c.pooling == "mean",
            "pooling must be 'mean' if there is a head: transformers' classifier averages tokens",
        ),
        Limit(
            lambda c: not c.num_classes or c.head_bias is not None,
            "head_bias must be a number: transformers' classifier has a bias",
        ),
        Limit(
            lambda c: c.image_size[0] == c.image_size[1] and c.patch_size[0] == c.patch_size[1],
            "image_size and patch_size must be squares, they are {0.image_size} and {0.patch_size}",
        ),
    ),
    json_files={
        "config.json": config_json,
        "preprocessor_config.json": huggingface_config.preprocessor_json,
    },
)

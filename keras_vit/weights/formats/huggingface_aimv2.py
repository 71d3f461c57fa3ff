"""Image towers of transformers' AIMv2, alone or of a whole model of images and text.

The position table is learned, or with `is_native` computed for each image: sines and cosines of
MAE's frequencies, first those of the column. A `ViT` has one size, so that table is computed once,
when the checkpoint is loaded.

The head of AIMv2 pools by attention without a query projection and without an MLP, which `ViT` does
not have. A checkpoint with it loads if the caller chooses another pooling.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.config_rules import MAX_FIXED_TABLE
from keras_vit.weights.formats import huggingface_config
from keras_vit.weights.formats.table import Derived, Format, Header, Pair, Reading, Row
from keras_vit.weights.formats.torch_names import (
    CLIP_PIXELS,
    CONV,
    FROM_HEADS,
    HEADS_BIAS,
    INTO_HEADS,
    QKV,
    linear,
    mlp,
    norm,
)

# transformers' defaults.
TOWER, WHOLE = "aimv2_vision_model", "aimv2"
DEFAULTS = {
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "image_size": 224,
    "is_native": False,
}
BLOCK = "encoder.layers.0"
TABLE = "embeddings.position_embedding.weight"


def read_aimv2(header: Header) -> Reading:
    """The config: from shapes, then from `config.json`."""
    width, channels, ph, pw = header.shape("embeddings.patch_embed.weight", 4)
    tower = _tower(header.config)
    stated = huggingface_config.stated_fields(tower, header.pixels, channels)
    assumed = header.unstated(("num_heads", "norm_epsilon"), stated)
    size = stated.pop("image_size", None)
    native = TABLE not in header.shapes
    if native != tower.get("is_native", native):
        raise ValueError(
            f"is_native in config.json must be {native} for a checkpoint "
            f"{'without' if native else 'with'} {TABLE!r}. "
            f"Received: is_native={tower['is_native']!r}"
        )
    if native:
        size = header.given.get("image_size") or size or 224
    else:
        size, _ = header.table_size(header.shape(TABLE, 2)[0], [0], (ph, pw), size)
    outputs = ("attention.out_proj", "ffn.down_proj")
    out, fc = (f"{BLOCK}.{name}.bias" in header.shapes for name in outputs)
    if out != fc:
        raise ValueError(
            "qkv_bias and mlp_bias must be equal: a block of ViT has biases on both of its outputs "
            f"or on none. Received: qkv_bias={out}, mlp_bias={fc}"
        )
    if header.has(r"head\.cls_token$") and not _pools_otherwise(header.given):
        raise ValueError(
            "pooling must be 'mean', 'mean_all' or None for an AIMv2 with a head (head.cls_token), "
            "whose attention pooling ViT does not have; the head is then left out. "
            f"Received: pooling={header.given.get('pooling')!r}"
            + ("" if "pooling" in header.given else ", the default")
        )
    heads = stated.pop("num_heads", None) or (width // 128 if width % 128 == 0 else None)
    stated.pop("labels", None)
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"encoder\.layers\.(\d+)\."),
        "num_heads": header.heads(width, heads),
        "mlp": "swiglu",
        "mlp_dim": header.shape(f"{BLOCK}.ffn.up_proj.weight", 2)[0],
        "norm": "rms",
        "norm_epsilon": 1e-5,
        "qkv_bias": f"{BLOCK}.attention.q_proj.bias" in header.shapes,
        "dense_bias": fc,
        "patch_norm": "after",
        "class_token": False,
        "pooling": "mean",
        "num_classes": 0,
        "interpolation": "timm",
        **(CLIP_PIXELS if channels == 3 else {}),
    }
    return Reading(fields | stated, {"native": native}, assumed=tuple(sorted(assumed)))


def _pools_otherwise(given: Mapping[str, Any]) -> bool:
    return "pooling" in given and given["pooling"] in ("mean", "mean_all", None)


def _tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` states of the image tower, in the words of transformers' ViT."""
    kind = config.get("model_type")
    tower = dict(config)
    if kind == WHOLE:
        tower = {"model_type": TOWER, **(config.get("vision_config") or {})}
        kind = tower["model_type"]
    if "model_type" in tower and kind != TOWER:
        raise ValueError(
            f"model_type in config.json must be {WHOLE!r} or {TOWER!r}. "
            f"Received: model_type={kind!r}"
        )
    if tower.pop("model_type", None):
        tower = {**DEFAULTS, **tower}
    act = tower.pop("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act in config.json must be 'silu'. Received: hidden_act={act!r}")
    if "rms_norm_eps" in tower:
        tower["layer_norm_eps"] = tower.pop("rms_norm_eps")
    return tower


def aimv2_rows(config: ViTConfig, native: bool = False) -> Iterator[Row]:
    """The table of names. `native` is whether positions are computed."""
    yield from linear("embeddings.patch_embed", "patches/projection", CONV)
    yield from norm("embeddings.rms_norm", "patches/norm_after", "rms")
    if native:
        yield Derived("position_embedding/table", {}, lambda: _table(config))
    else:
        yield Pair(TABLE, ("position_embedding/table",))
    for i in range(config.depth):
        yield from _block(config, f"encoder.layers.{i}", f"encoder_block_{i}")
    yield from norm("rms_norm", "encoder_norm", "rms")


def _block(config: ViTConfig, theirs: str, ours: str) -> Iterator[Pair]:
    yield from norm(f"{theirs}.rms_norm1", f"{ours}/attention_norm", "rms")
    for name in QKV:
        source, path = f"{theirs}.attention.{name[0]}_proj", f"{ours}/attention/{name}"
        yield Pair(f"{source}.weight", (f"{path}/kernel",), INTO_HEADS)
        if config.qkv_bias:
            yield Pair(f"{source}.bias", (f"{path}/bias",), HEADS_BIAS)
    output = f"{ours}/attention/attention_output"
    yield from linear(f"{theirs}.attention.out_proj", output, FROM_HEADS, bias=config.dense_bias)
    yield from norm(f"{theirs}.rms_norm2", f"{ours}/mlp_norm", "rms")
    names = ("gate_proj", "up_proj", "down_proj")
    yield from mlp(f"{theirs}.ffn", f"{ours}/mlp", names, True, bias=config.dense_bias)


def _table(config: ViTConfig) -> np.ndarray:
    """[sin x, cos x, sin y, cos y], each of width / 4 frequencies 10000^(-4 i / width)."""
    (rows, columns), quarter = config.grid, config.width // 4
    if config.width % 4 or rows * columns * config.width > MAX_FIXED_TABLE:
        raise ValueError(
            f"image_size must have at most {MAX_FIXED_TABLE} / width patches, and width must be a "
            "multiple of 4, for positions that are computed (is_native). "
            f"Received: image_size={config.image_size}, width={config.width}"
        )
    omega = 10_000.0 ** -(np.arange(quarter) / quarter)
    y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")  # (rows, columns)
    angles = [place.reshape(-1, 1) * omega for place in (x, y)]  # (N, D / 4)
    parts = [f(angle) for angle in angles for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=-1).astype(np.float32)  # (N, D)


HUGGINGFACE_AIMV2 = Format(
    name="huggingface_aimv2",
    mark=r"(?P<prefix>(.*\.)?)embeddings\.patch_embed\.weight",
    needs=(r"encoder\.layers\.0\.rms_norm1\.weight$",),
    read_config=read_aimv2,
    rows=aimv2_rows,
    dropped={
        r"text_(model|projection)\.": "the text tower of an image-text model",
        r"head\.": "attention pooling, which ViT has in another form",
        r"visual_projection\.": "the projection of what the attention pools",
        r"logit_scale$": "the loss of an image-text model",
        r"(embeddings|.*\.embeddings)\.position_ids$": "the numbers of the positions",
    },
)

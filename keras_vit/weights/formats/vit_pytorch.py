"""State dicts of vit-pytorch's `ViT`, old and new.

LayerNorm's epsilon is 1e-5, GELU is exact, and query, key and value have no bias. Newer models
normalize patches before and after the projection. Patches are flattened as (row, column, channel).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import (
    CLASS_ROW,
    HAS_HEAD,
    PLAIN,
    POOLS_ITS_TOKEN,
    Derived,
    Empty,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
    Row,
)
from keras_vit.weights.formats.torch_names import FROM_HEADS, TABLE, linear, norm, qkv

PATCH = Layout("h w c d -> d (h w c)")
EMBEDDING = "to_patch_embedding"
LAYERS = "transformer.layers"


def read_vit_pytorch(header: Header) -> Reading:
    """The config. The file states neither heads nor pooling, and of patches only their area."""
    given = header.given
    patch_norm = f"{EMBEDDING}.3.weight" in header.shapes
    projection = f"{EMBEDDING}.{2 if patch_norm else 1}"
    width, pixels = header.shape(f"{projection}.weight", 2)
    patch = patch_of(pixels, given)
    channels = pixels // math.prod(patch)
    table = header.shapes.get("pos_embedding", ())
    token = bool(header.size("cls_token", -2, 0))
    style: dict[str, Any] = {
        "flat": len(table) == 2,
        "wrapped": f"{LAYERS}.0.0.fn.to_qkv.weight" in header.shapes,
        "norm_name": "transformer.norm" if header.has(r"transformer\.norm\.") else "mlp_head.0",
        "head": "mlp_head.1" if "mlp_head.1.weight" in header.shapes else "mlp_head",
    }
    attention = f"{LAYERS}.0.0{'.fn' if style['wrapped'] else ''}"
    inner = header.shape(f"{attention}.to_qkv.weight", 2)[0] // 3
    style["project"] = f"{attention}.to_out.0.weight" in header.shapes
    # Without an output projection there is one head as wide as the model.
    heads = (given.get("num_heads") or _heads(inner)) if style["project"] else 1
    rows = header.shape("pos_embedding", 2 if style["flat"] else 3)[-2]
    size, _ = header.table_size(rows, [int(token)], patch)
    fields = {
        "image_size": size,
        "patch_size": patch,
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"transformer\.layers\.(\d+)\."),
        "num_heads": heads,
        "head_dim": None if inner == width else inner // heads,
        "mlp_dim": header.shape(_mlp(style, 0)[1] + ".weight", 2)[0],
        "norm_epsilon": 1e-5,
        "gelu": "exact",
        "qkv_bias": False,
        "class_token": token,
        "patch_norm": patch_norm,
        "pooling": "token" if token else "mean",
        "final_norm": "after_pooling" if style["norm_name"] == "mlp_head.0" else "before_pooling",
        "num_classes": header.size(f"{style['head']}.weight", 0, 0),
    }
    unstated = ["num_heads"] * style["project"] + ["pooling"] * token
    assumed = header.unstated(unstated, {})
    return Reading(fields, style, assumed=tuple(sorted(assumed)))


def _heads(inner: int) -> int:
    if inner % 64:  # dim_head defaults to 64
        raise ValueError(
            "num_heads must be given if the heads are not 64 wide. "
            f"Received: num_heads=None, queries of width {inner}"
        )
    return inner // 64


def patch_of(pixels: int, given: Any) -> tuple[int, int]:
    """Height and width of a patch of so many numbers: as passed, or a square of three channels."""
    patch = given.get("patch_size")
    if patch is not None:
        return (patch, patch) if isinstance(patch, int) else tuple(patch)
    side = math.isqrt(pixels // 3)
    if 3 * side * side != pixels:
        raise ValueError(
            "patch_size must be given if patches are not squares with three channels. "
            f"Received: patch_size=None, {pixels} numbers a patch"
        )
    return (side, side)


def _mlp(style: dict[str, Any], block: int) -> tuple[str, str, str]:
    """Names of an MLP's LayerNorm and its two Linear layers."""
    base = f"{LAYERS}.{block}.1"
    if style["wrapped"]:
        return f"{base}.norm", f"{base}.fn.net.0", f"{base}.fn.net.3"
    return f"{base}.net.0", f"{base}.net.1", f"{base}.net.4"


def vit_pytorch_rows(
    config: ViTConfig,
    flat: bool = True,
    wrapped: bool = False,
    norm_name: str = "transformer.norm",
    head: str = "mlp_head",
    project: bool = True,
) -> Iterator[Row]:
    """The table of names. The defaults are those of new models."""
    if config.patch_norm:
        yield from norm(f"{EMBEDDING}.1", "patches/norm_before")
        yield from norm(f"{EMBEDDING}.3", "patches/norm_after")
    number = 2 if config.patch_norm else 1
    yield from linear(f"{EMBEDDING}.{number}", "patches/projection", PATCH)
    if config.class_token:
        layout = Layout("1 n d -> n d" if flat else "")
        yield Pair("cls_token", ("class_token/tokens",), layout)
    elif flat:
        yield Empty("cls_token", (0, config.width))
    yield Pair("pos_embedding", ("position_embedding/table",), Layout("") if flat else TABLE)
    for i in range(config.depth):
        ours, base = f"encoder_block_{i}", f"{LAYERS}.{i}.0"
        inside = f"{base}.fn" if wrapped else base
        yield from norm(f"{base}.norm", f"{ours}/attention_norm")
        yield from qkv(f"{inside}.to_qkv.weight", None, f"{ours}/attention")
        output = f"{ours}/attention/attention_output"
        if project:
            yield from linear(f"{inside}.to_out.0", output, FROM_HEADS)
        else:
            yield from _identity(config, output)
        mlp_norm, *dense = _mlp({"wrapped": wrapped}, i)
        yield from norm(mlp_norm, f"{ours}/mlp_norm")
        for k, name in enumerate(dense, 1):
            yield from linear(name, f"{ours}/mlp/dense_{k}")
    yield from norm(norm_name, "encoder_norm")
    if config.num_classes:
        yield from linear(head, "head")


def _identity(config: ViTConfig, output: str) -> Iterator[Derived]:
    width = config.width
    eye = np.eye(width, dtype="float32").reshape(1, width, width)
    yield Derived(f"{output}/kernel", {}, lambda: eye)
    yield Derived(f"{output}/bias", {}, lambda: np.zeros(width, "float32"))


VIT_PYTORCH = Format(
    name="vit_pytorch",
    mark=r"(?P<prefix>.*)transformer\.layers\.0\.0\.(fn\.)?to_qkv\.weight",
    read_config=read_vit_pytorch,
    rows=vit_pytorch_rows,
    needs=(r"to_patch_embedding\.",),
    writable=PLAIN
    | {
        "gelu": ("exact",),
        "norm_epsilon": (1e-5,),
        "qkv_bias": (False,),
        "patch_norm": (True,),
        "pooling": ("token", "mean"),
        "representation_size": (None,),
    },
    limits=(
        CLASS_ROW,
        POOLS_ITS_TOKEN,
        Limit(
            lambda c: c.num_heads > 1 or c.key_dim != c.width,
            "num_heads must be greater than 1: the format has no output projection for one head",
        ),
        HAS_HEAD,
    ),
)

"""The .npz files of google-research/big_vision (arXiv 2205.01580, 2106.04560, 2303.15343).

Flax's modules as in `google.py`, with newer names. The class token has no row in the position
table, except in old files: big_vision adds that row to the token when it loads them, which gives
the same sum as concatenating first.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import google
from keras_vit.weights.formats.table import POOLING_SIZES, Format, Header, Limit, Pair, Reading

NAMES = {
    "attention": "MultiHeadDotProductAttention_0",
    "mlp_norm": "LayerNorm_1",
    "mlp": "MlpBlock_0",
}
# Newest first: at the top, in the encoder, in a module of its own.
POSITIONS = (
    "pos_embedding",
    "Transformer/pos_embedding",
    "Transformer/posembed_input/pos_embedding",
)
MAP = "MAPHead_0/"  # in files from before it was a module, its parts have no prefix


def read_big_vision(header: Header) -> Reading:
    """The config, and how the file spells its table and its blocks."""
    stacked = not header.has("Transformer/encoderblock_0/")
    block = "Transformer/encoderblock" + ("" if stacked else "_0")
    fields = google.encoder_fields(header, NAMES, block, stacked)
    fields["interpolation"] = "big_vision"
    positions = next((name for name in POSITIONS if name in header.shapes), None)
    if positions is None:
        size = header.given.get("image_size") or 224
        fields |= {"position_embedding": "sincos_2d", "image_size": size}
    else:
        prefixes = [0, 1] if fields["class_token"] else [0]
        rows = header.shape(positions, 3)[1]
        size, row = header.table_size(rows, prefixes, fields["patch_size"])
        fields |= {"image_size": size, "position_class_row": bool(row)}
    style = {"stacked": stacked, "positions": positions or POSITIONS[0]}
    if header.has(rf"({MAP})?probe$"):
        style["pooling"] = MAP if header.has(MAP) else ""
        fields |= _pooling_fields(header, style["pooling"], fields)
    # big_vision has learned and sin-cos positions. A fork may have others without an array.
    unstated = () if positions else ("position_embedding", "image_size")
    return Reading(fields, style, assumed=tuple(header.unstated(unstated, {})))


def _row_is_told(config: ViTConfig) -> bool:
    """Whether a table without a row for the class token is not read as a square with one."""
    rows, columns = config.grid
    squares = rows == columns or math.isqrt(rows * columns - 1) ** 2 != rows * columns - 1
    return squares or not config.class_token or config.position_table != "learned"


def _pooling_fields(header: Header, prefix: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention pooling. Its heads and its MLP are the encoder's, but in a fork."""
    heads = header.shape(f"{prefix}{NAMES['attention']}/query/kernel", 3)[1]
    hidden = header.shape(f"{prefix}{NAMES['mlp']}/Dense_0/kernel", 2)[1]
    return {
        "pooling": "map_all" if fields["class_token"] else "map",
        "pooling_heads": None if heads == fields["num_heads"] else heads,
        "pooling_mlp_dim": None if hidden == fields["mlp_dim"] else hidden,
    }


def big_vision_rows(
    config: ViTConfig, stacked: bool = False, positions: str = POSITIONS[0], pooling: str = MAP
) -> Iterator[Pair]:
    """The table of names. `pooling` precedes those of attention pooling."""
    yield from google.flax_rows(config, {**NAMES, "positions": positions}, stacked)
    if config.attention_pooling:
        yield Pair(f"{pooling}probe", ("pooling/probe",))
        yield from google.attention_rows(f"{pooling}{NAMES['attention']}", "pooling/attention")
        yield from google.norm_rows(f"{pooling}LayerNorm_0", "pooling/norm")
        yield from google.mlp_rows(f"{pooling}{NAMES['mlp']}", "pooling/mlp")


BIG_VISION = Format(
    name="big_vision",
    mark=r"(?P<prefix>.*)Transformer/encoderblock(_0)?/MultiHeadDotProductAttention_0/query/kernel",
    needs=(r"embedding/kernel$",),
    read_config=read_big_vision,
    rows=big_vision_rows,
    dropped={
        r"(opt|chrono)/": "state of an optimizer",
        r"(params/)?(txt/|[tb]$)": "the text tower of an image-text model",
    },
    refused={r"conv_root/": "a hybrid with a ResNet stem"},
    writable=google.WRITABLE
    | {"position_embedding": ("learned", "sincos_2d"), "pooling": ("token", "mean", "map")},
    limits=(
        Limit(
            lambda c: not c.class_row,
            "position_class_row must be False: the format's table has no row for the class token",
        ),
        POOLING_SIZES,
        *google.FLAX_LIMITS,
        Limit(
            _row_is_told,
            "image_size must not have a grid of {0.grid}: it would be read as a square and a class "
            "token",
        ),
    ),
    suffix=".npz",
)

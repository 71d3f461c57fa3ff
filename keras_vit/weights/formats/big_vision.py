"""The .npz files of google-research/big_vision (arXiv 2205.01580, 2106.04560, 2303.15343).

Flax's modules as in `google.py`, with newer names. The class token has no row in the position
table, except in old files: big_vision adds that row to the token when it loads them, which gives
the same sum as concatenating first.
"""

from collections.abc import Iterator

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import google
from keras_vit.weights.formats.table import Format, Header, Limit, Pair, Reading

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
ATTENTION_POOLING = r"MAPHead_0/|probe$|(MultiHeadDotProductAttention|LayerNorm|MlpBlock)_0/"


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
    pooled = header.has(ATTENTION_POOLING)
    if pooled:
        header.require_new_head("attention pooling (a MAP head)", pooling=True)
    style = {"stacked": stacked, "positions": positions or POSITIONS[0]}
    # big_vision has learned and sin-cos positions. A fork may have others without an array.
    unstated = () if positions else ("position_embedding", "image_size")
    return Reading(fields, style, pooled, tuple(header.unstated(unstated, {})))


def big_vision_rows(
    config: ViTConfig, stacked: bool = False, positions: str = POSITIONS[0]
) -> Iterator[Pair]:
    """The table of names."""
    return google.flax_rows(config, {**NAMES, "positions": positions}, stacked)


BIG_VISION = Format(
    name="big_vision",
    mark=r"(?P<prefix>.*)Transformer/encoderblock(_0)?/MultiHeadDotProductAttention_0/query/kernel",
    needs=(r"embedding/kernel$",),
    read_config=read_big_vision,
    rows=big_vision_rows,
    dropped={
        r"(opt|chrono)/": "state of an optimizer",
        r"(params/)?(txt/|[tb]$)": "the text tower of an image-text model",
        ATTENTION_POOLING: "attention pooling, replaced as requested",
    },
    refused={r"conv_root/": "a hybrid with a ResNet stem"},
    writable=google.WRITABLE | {"position_embedding": ("learned", "sincos_2d")},
    limits=(
        Limit(
            lambda c: not c.class_row,
            "position_class_row must be False: the format's table has no row for the class token",
        ),
        *google.FLAX_LIMITS,
    ),
    suffix=".npz",
)

"""The .npz files of google-research/big_vision (arXiv 2205.01580, 2106.04560, 2303.15343).

Flax' modules as in `google.py` under newer names. The class token has no row in the table, except
in old files, where concatenating first and adding then gives the sum that big_vision makes of the
two when it loads them.
"""

from collections.abc import Iterator

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import google
from keras_vit.weights.formats.table import Format, Header, Pair, Reading, table_grid

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


def read(header: Header) -> Reading:
    """The config, and how the file spells its table and its blocks."""
    stacked = not header.has("Transformer/encoderblock_0/")
    block = "Transformer/encoderblock" + ("" if stacked else "_0")
    fields = google.read_encoder(header, NAMES, block, stacked)
    fields["interpolation"] = "big_vision"
    given = header.given.get("image_size")
    patch = fields["patch_size"]
    positions = next((name for name in POSITIONS if name in header.shapes), None)
    if positions is None:
        fields |= {"position_embedding": "sincos_2d", "image_size": given or 224}
    else:
        prefixes = [0, 1] if fields["class_token"] else [0]
        rows = header.shape(positions, 3)[1]
        grid, row = table_grid(rows, prefixes, patch, given=given)
        fields |= {
            "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
            "position_class_row": bool(row),
        }
    pooled = header.has(ATTENTION_POOLING)
    if pooled and not ({"pooling", "num_classes"} <= header.given.keys()):
        raise ValueError(
            "source must not pool with attention (a MAP head), which ViT has not; load its trunk "
            "with pooling='mean', num_classes=0. Received: a checkpoint with "
            + ", ".join(sorted({n.split("/")[0] for n in header.shapes if _is_map(n)}))
        )
    style = {"stacked": stacked, "positions": positions or POSITIONS[0]}
    # Its code has learned positions and these; a fork may have others without an array.
    unsaid = () if positions else ("position_embedding", "image_size")
    return Reading(fields, style, pooled, tuple(header.unstated(unsaid, {})))


def pairs(
    config: ViTConfig, stacked: bool = False, positions: str = POSITIONS[0]
) -> Iterator[Pair]:
    """The table of names."""
    return google.pairs(config, {**NAMES, "positions": positions}, stacked)


def complaints(config: ViTConfig) -> Iterator[str]:
    """What these files cannot say."""
    if config.position_embedding not in ("learned", "sincos_2d"):
        yield f"position_embedding must be 'learned', it is {config.position_embedding!r}"
    if config.class_row:
        yield "position_class_row must be False: the class token has no row in the table here"
    if (config.pooling == "token") != config.class_token:
        yield "pooling must be 'token' with a class token and 'mean' without one"
    yield from google.flax_complaints(config)


def _is_map(name: str) -> bool:
    return Header({name: ()}).has(ATTENTION_POOLING)


BIG_VISION = Format(
    name="big_vision",
    mark=r"(?P<prefix>.*)Transformer/encoderblock(_0)?/MultiHeadDotProductAttention_0/query/kernel",
    needs=(r"embedding/kernel$",),
    read=read,
    pairs=pairs,
    dropped={
        r"(opt|chrono)/": "state of an optimizer",
        r"(params/)?(txt/|[tb]$)": "the text side of a model of images and texts",
        ATTENTION_POOLING: "attention pooling, replaced as asked for",
    },
    refused={r"conv_root/": "a hybrid whose stem is a ResNet"},
    writes=google.WRITES,
    complaints=complaints,
    suffix=".npz",
)

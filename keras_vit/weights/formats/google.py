"""The .npz files of google-research/vision_transformer (arXiv 2010.11929, 2106.10270).

Its arrays lie as ours do. LayerNorm's epsilon is flax' 1e-6, its GELU the tanh form, pixels are in
[-1, 1], and the table is resampled with scipy's zoom.
"""

from collections.abc import Iterator, Mapping

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Format, Header, Pair, Reading, table_grid

NUMERICS = {"norm_epsilon": 1e-6, "gelu": "tanh", "pixel_mean": 0.5, "pixel_std": 0.5}

# What flax called the parts of a block in this code: numbers count the modules made so far.
NAMES = {
    "attention": "MultiHeadDotProductAttention_1",
    "mlp_norm": "LayerNorm_2",
    "mlp": "MlpBlock_3",
    "positions": "Transformer/posembed_input/pos_embedding",
}

# What flax' modules compute, and so what a config must ask for to be written for them.
WRITES = {
    "gelu": ("tanh",),
    "norm_epsilon": (1e-6,),
    "block_norm": ("pre",),
    "qkv_bias": (True,),
    "qk_norm": (False,),
    "layer_scale": (None,),
    "num_registers": (0,),
    "patch_norm": (False,),
    "pooling": ("token", "mean"),
    "final_norm": ("before_pooling",),
    "classifier_activation": (None,),
}


def read_encoder(header: Header, names: Mapping[str, str], block: str, stacked: bool) -> dict:
    """The fields that flax' names and shapes show, in this code and in big_vision's."""
    lead = 1 if stacked else 0
    ph, pw, channels, width = header.shape("embedding/kernel", 4)
    kernel = header.shape(f"{block}/{names['attention']}/query/kernel", 3 + lead)
    heads, head_dim = kernel[-2:]
    hidden = header.shape(f"{block}/{names['mlp']}/Dense_0/kernel", 2 + lead)[-1]
    head = header.shapes.get("head/kernel")
    token = header.has("cls$")
    return NUMERICS | {
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": kernel[0] if stacked else header.count(r"Transformer/encoderblock_(\d+)/"),
        "num_heads": heads,
        "head_dim": None if heads * head_dim == width else head_dim,
        "mlp_dim": hidden,
        "class_token": token,
        "pooling": "token" if token else "mean",
        "representation_size": (header.shapes.get("pre_logits/kernel") or (None,))[-1],
        "num_classes": head[-1] if head else 0,
    }


def read(header: Header) -> Reading:
    """The config: one row of the table belongs to the class token wherever there is one."""
    fields = read_encoder(header, NAMES, "Transformer/encoderblock_0", stacked=False)
    patch, given = fields["patch_size"], header.given.get("image_size")
    rows = header.shape(NAMES["positions"], 3)[1]
    grid, _ = table_grid(rows, [int(fields["class_token"])], patch, given=given)
    return Reading(
        fields
        | {
            "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
            "interpolation": "google",
        }
    )


def pairs(config: ViTConfig, names: Mapping[str, str] = NAMES, stacked=False) -> Iterator[Pair]:
    """The table of names; big_vision's differs in `names`, and may stack the blocks."""
    yield from _dense("embedding", "patches/projection")
    if config.class_token:
        yield Pair("cls", ("class_token/tokens",))
    if config.position_embedding == "learned":
        yield Pair(names["positions"], ("position_embedding/table",), Layout("t d -> 1 t d"))
    numbers = range(config.depth)
    for blocks in [tuple(numbers)] if stacked else [(i,) for i in numbers]:
        source = "Transformer/encoderblock" + ("" if stacked else f"_{blocks[0]}")
        for theirs, ours in _block(names):
            paths = tuple(f"encoder_block_{i}/{ours}" for i in blocks)
            yield Pair(f"{source}/{theirs}", paths, stack=stacked)
    for theirs, ours in _norm("Transformer/encoder_norm", "encoder_norm"):
        yield Pair(theirs, (ours,))
    if config.representation_size is not None:
        yield from _dense("pre_logits", "pre_logits")
    if config.num_classes:
        yield from _dense("head", "head")


def complaints(config: ViTConfig) -> Iterator[str]:
    """What these files cannot say."""
    if config.position_embedding != "learned":
        yield f"position_embedding must be 'learned', it is {config.position_embedding!r}"
    if config.class_token != config.class_row:
        yield "position_class_row must be True: the class token has a row of the table here"
    if (config.pooling == "token") != config.class_token:
        yield "pooling must be 'token' with a class token and 'mean' without one"
    yield from flax_complaints(config)


def flax_complaints(config: ViTConfig) -> Iterator[str]:
    """What flax' attention and a table without a grid cannot say."""
    if config.num_heads * config.key_dim != config.width:
        yield f"head_dim must be width / num_heads, it is {config.head_dim}"
    rows, columns = config.grid
    if rows != columns and int((rows * columns) ** 0.5) ** 2 == rows * columns:
        yield f"image_size must not have a grid of {rows} x {columns}: it would be read as a square"


def _block(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from _norm("LayerNorm_0", "attention_norm")
    for theirs in ("query", "key", "value", "out"):
        ours = "attention_output" if theirs == "out" else theirs
        for part in ("kernel", "bias"):
            yield f"{names['attention']}/{theirs}/{part}", f"attention/{ours}/{part}"
    yield from _norm(names["mlp_norm"], "mlp_norm")
    for i in (0, 1):
        for part in ("kernel", "bias"):
            yield f"{names['mlp']}/Dense_{i}/{part}", f"mlp/dense_{i + 1}/{part}"


def _norm(theirs: str, ours: str) -> list[tuple[str, str]]:
    return [(f"{theirs}/scale", f"{ours}/gamma"), (f"{theirs}/bias", f"{ours}/beta")]


def _dense(theirs: str, ours: str) -> list[Pair]:
    return [Pair(f"{theirs}/{part}", (f"{ours}/{part}",)) for part in ("kernel", "bias")]


GOOGLE = Format(
    name="google",
    mark=r"(?P<prefix>.*)Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel",
    needs=(r"embedding/kernel$",),
    read=read,
    pairs=pairs,
    dropped={r"opt/(?!target/)": "state of an optimizer"},
    refused={r"conv_root/": "a hybrid whose stem is a ResNet"},
    writes=WRITES,
    complaints=complaints,
    suffix=".npz",
)

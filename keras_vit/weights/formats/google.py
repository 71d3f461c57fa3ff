"""The .npz files of google-research/vision_transformer (arXiv 2010.11929, 2106.10270).

The arrays have our layouts. LayerNorm's epsilon is Flax's 1e-6, GELU is the tanh form, pixels are
in [-1, 1], and the position table is resampled with scipy's zoom.
"""

from collections.abc import Iterator, Mapping

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import resnet_names
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import (
    CLASS_ROW,
    PLAIN,
    POOLS_ITS_TOKEN,
    STANDARD_HEADS,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
)

NUMERICS = {"norm_epsilon": 1e-6, "gelu": "tanh", "pixel_mean": 0.5, "pixel_std": 0.5}

# Flax's names for the parts of a block, which number the modules created so far.
NAMES = {
    "attention": "MultiHeadDotProductAttention_1",
    "mlp_norm": "LayerNorm_2",
    "mlp": "MlpBlock_3",
    "positions": "Transformer/posembed_input/pos_embedding",
}

# What Flax's modules compute.
WRITABLE = PLAIN | {"gelu": ("tanh",), "norm_epsilon": (1e-6,), "pooling": ("token", "mean")}


def _grid_is_kept(config: ViTConfig) -> bool:
    rows, columns = config.grid
    return rows == columns or int((rows * columns) ** 0.5) ** 2 != rows * columns


FLAX_LIMITS = (
    POOLS_ITS_TOKEN,
    STANDARD_HEADS,
    Limit(
        _grid_is_kept,
        "image_size must not have a grid of {0.grid}: it would be read as a square",
    ),
)


def encoder_fields(header: Header, names: Mapping[str, str], block: str, stacked: bool) -> dict:
    """The fields that names and shapes show, in this code and in big_vision's."""
    lead = 1 if stacked else 0
    ph, pw, channels, width = header.shape("embedding/kernel", 4)
    kernel = header.shape(f"{block}/{names['attention']}/query/kernel", 3 + lead)
    heads, head_dim = kernel[-2:]
    token = header.has("cls$")
    return NUMERICS | {
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": kernel[0] if stacked else header.count(r"Transformer/encoderblock_(\d+)/"),
        "num_heads": heads,
        "head_dim": None if heads * head_dim == width else head_dim,
        "mlp_dim": header.shape(f"{block}/{names['mlp']}/Dense_0/kernel", 2 + lead)[-1],
        "class_token": token,
        "pooling": "token" if token else "mean",
        "representation_size": header.size("pre_logits/kernel", -1, None),
        "num_classes": header.size("head/kernel", -1, 0),
    }


def read_google(header: Header) -> Reading:
    """The config. The table has a row for the class token, if there is one."""
    fields = encoder_fields(header, NAMES, "Transformer/encoderblock_0", stacked=False)
    stem = resnet_names.google_fields(header)
    fields |= stem | {"patch_size": resnet_names.patch_in_pixels(fields["patch_size"], stem)}
    rows = header.shape(NAMES["positions"], 3)[1]
    size, _ = header.table_size(rows, [int(fields["class_token"])], fields["patch_size"])
    old_norms = len(header.shapes.get("gn_root/scale", ())) == 4
    return Reading(
        fields | {"image_size": size, "interpolation": "google"}, {"old_norms": old_norms}
    )


def google_rows(config: ViTConfig, old_norms: bool = False) -> Iterator[Pair]:
    """The table of names."""
    if config.stem:
        yield from resnet_names.google_stem_rows(config, old_norms)
    yield from flax_rows(config)


def flax_rows(config: ViTConfig, names: Mapping[str, str] = NAMES, stacked=False) -> Iterator[Pair]:
    """The names of all but a stem. big_vision's differ in `names`, and blocks may be stacked."""
    yield from _dense("embedding", "patches/projection")
    if config.class_token:
        yield Pair("cls", ("class_token/tokens",))
    if config.position_table == "learned":
        yield Pair(names["positions"], ("position_embedding/table",), Layout("t d -> 1 t d"))
    numbers = range(config.depth)
    for blocks in [tuple(numbers)] if stacked else [(i,) for i in numbers]:
        source = "Transformer/encoderblock" + ("" if stacked else f"_{blocks[0]}")
        for row in _block(names):
            paths = tuple(f"encoder_block_{i}/{row.paths[0]}" for i in blocks)
            yield Pair(f"{source}/{row.source}", paths, stack=stacked)
    yield from norm_rows("Transformer/encoder_norm", "encoder_norm")
    if config.representation_size is not None:
        yield from _dense("pre_logits", "pre_logits")
    if config.num_classes:
        yield from _dense("head", "head")


def _block(names: Mapping[str, str]) -> Iterator[Pair]:
    yield from norm_rows("LayerNorm_0", "attention_norm")
    yield from attention_rows(names["attention"], "attention")
    yield from norm_rows(names["mlp_norm"], "mlp_norm")
    yield from mlp_rows(names["mlp"], "mlp")


def norm_rows(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of a LayerNorm."""
    yield Pair(f"{theirs}/scale", (f"{ours}/gamma",))
    yield Pair(f"{theirs}/bias", (f"{ours}/beta",))


def attention_rows(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of a MultiHeadDotProductAttention."""
    for name in ("query", "key", "value"):
        yield from _dense(f"{theirs}/{name}", f"{ours}/{name}")
    yield from _dense(f"{theirs}/out", f"{ours}/attention_output")


def mlp_rows(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of an MlpBlock."""
    for i in (0, 1):
        yield from _dense(f"{theirs}/Dense_{i}", f"{ours}/dense_{i + 1}")


def _dense(theirs: str, ours: str) -> Iterator[Pair]:
    for part in ("kernel", "bias"):
        yield Pair(f"{theirs}/{part}", (f"{ours}/{part}",))


GOOGLE = Format(
    name="google",
    mark=r"(?P<prefix>.*)Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel",
    needs=(r"embedding/kernel$",),
    read_config=read_google,
    rows=google_rows,
    dropped={r"opt/(?!target/)": "state of an optimizer"},
    writable=WRITABLE | {"stem": (None, "resnet")},
    limits=(
        CLASS_ROW,
        *FLAX_LIMITS,
        Limit(
            lambda c: not c.stem or resnet_names.GOOGLE.items() <= c.to_dict().items(),
            "stem_standardization must be 'deviation' and stem_epsilon 1e-06",
        ),
    ),
    suffix=".npz",
)

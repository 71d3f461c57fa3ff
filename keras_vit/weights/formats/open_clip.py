"""Image towers of CLIP under the names of OpenAI's code, which open_clip's models still have.

A file holds the tower alone, or a whole model of images and text, of which only the tower is
loaded. OpenAI's models have QuickGELU and most of open_clip's exact GELU, under the same names:
only a file that OpenAI wrote holds the sizes of its text tower, which says so.
"""

from collections.abc import Iterator

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Format, Header, Pair, Reading
from keras_vit.weights.formats.torch_names import (
    CLIP_PIXELS,
    CONV,
    FROM_HEADS,
    linear,
    mlp,
    norm,
    qkv,
)

TOKEN = Layout("1 1 d -> d")
BLOCK = "transformer.resblocks"


def read_open_clip(header: Header) -> Reading:
    """The config from shapes; the rest is OpenAI's, or assumed."""
    width, channels, ph, pw = header.shape("conv1.weight", 4)
    rows = header.shape("positional_embedding", 2)[0]
    size, _ = header.table_size(rows, [1], (ph, pw))
    openai = header.has(r"/?input_resolution$")
    unstated = ("num_heads",) if openai else ("num_heads", "gelu")
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(rf"{BLOCK}\.(\d+)\.ln_1\."),
        "num_heads": header.heads(width),
        "mlp_dim": header.shape(f"{BLOCK}.0.mlp.c_fc.weight", 2)[0],
        "norm_epsilon": 1e-5,
        "gelu": "quick" if openai else "exact",
        "layer_scale": 1.0 if header.has(rf"{BLOCK}\.0\.ls_1\.gamma") else None,
        "patch_bias": False,
        "embedding_norm": True,
        "num_classes": header.size("proj", 1, 0),
        "head_bias": None,
        "interpolation": "timm",  # open_clip resizes tables by the same rule
        "resize_method": "bicubic",
        "crop_fraction": 1.0,
        **(CLIP_PIXELS if channels == 3 else {}),
    }
    return Reading(fields, assumed=tuple(sorted(header.unstated(unstated, {}))))


def open_clip_rows(config: ViTConfig) -> Iterator[Pair]:
    """The table of names."""
    yield from linear("conv1", "patches/projection", CONV, bias=False)
    yield Pair("class_embedding", ("class_token/tokens",), TOKEN)
    yield Pair("positional_embedding", ("position_embedding/table",))
    yield from norm("ln_pre", "embedding_norm")
    for i in range(config.depth):
        yield from _block(config, f"{BLOCK}.{i}", f"encoder_block_{i}")
    yield from norm("ln_post", "encoder_norm")
    if config.num_classes:
        yield Pair("proj", ("head/kernel",))  # a matrix of (in, out)


def _block(config: ViTConfig, theirs: str, ours: str) -> Iterator[Pair]:
    yield from norm(f"{theirs}.ln_1", f"{ours}/attention_norm")
    attention = f"{ours}/attention"
    yield from qkv(f"{theirs}.attn.in_proj_weight", f"{theirs}.attn.in_proj_bias", attention)
    yield from linear(f"{theirs}.attn.out_proj", f"{attention}/attention_output", FROM_HEADS)
    yield from norm(f"{theirs}.ln_2", f"{ours}/mlp_norm")
    yield from mlp(f"{theirs}.mlp", f"{ours}/mlp", ("c_fc", "c_proj"), gated=False)
    if config.layer_scale is not None:
        for scale, branch in (("ls_1", "attention"), ("ls_2", "mlp")):
            yield Pair(f"{theirs}.{scale}.gamma", (f"{ours}/{branch}_scale/gamma",))


OPEN_CLIP = Format(
    name="open_clip",
    mark=r"(?P<prefix>(.*\.)?)class_embedding",
    read_config=read_open_clip,
    rows=open_clip_rows,
    needs=(r"transformer\.resblocks\.0\.ln_1\.weight$",),
    dropped={
        # A name that the image tower has too is preceded by a slash.
        r"/?(positional_embedding$|transformer\.|text\.)": "the text tower of an image-text model",
        r"(token_embedding|ln_final)\.|text_projection": "the text tower of an image-text model",
        r"logit_(scale|bias)$": "the loss of an image-text model",
        r"(input_resolution|context_length|vocab_size)$": "the sizes of an image-text model",
    },
    refused={
        r"attn_pool\.": "attention pooling (CoCa)",
    },
)

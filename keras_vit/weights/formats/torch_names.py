"""Layouts and names that all PyTorch models share: (out, in) matrices and OIHW kernels."""

from collections.abc import Iterator

from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Pair

CONV = Layout("h w c d -> d c h w")
SAME = Layout("")
MATRIX = Layout("i o -> o i")
INTO_HEADS = Layout("i h d -> (h d) i")
HEADS_BIAS = Layout("h d -> (h d)")
FROM_HEADS = Layout("h d o -> o (h d)")
TABLE = Layout("t d -> 1 t d")

QKV = ("query", "key", "value")
IMAGENET_PIXELS = {"pixel_mean": (0.485, 0.456, 0.406), "pixel_std": (0.229, 0.224, 0.225)}


def norm(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of a LayerNorm."""
    yield Pair(f"{theirs}.weight", (f"{ours}/gamma",))
    yield Pair(f"{theirs}.bias", (f"{ours}/beta",))


def linear(theirs: str, ours: str, layout: Layout = MATRIX, bias: Layout = SAME) -> Iterator[Pair]:
    """The rows of a Linear or a convolution with bias."""
    yield Pair(f"{theirs}.weight", (f"{ours}/kernel",), layout)
    yield Pair(f"{theirs}.bias", (f"{ours}/bias",), bias)


def qkv(weight: str, bias: str | None, ours: str, names: tuple[str, ...] = QKV) -> Iterator[Pair]:
    """The rows of one matrix for query, key and value: timm, torchvision, vit-pytorch."""
    yield Pair(weight, tuple(f"{ours}/{name}/kernel" for name in names), INTO_HEADS)
    if bias is not None:
        yield Pair(bias, tuple(f"{ours}/{name}/bias" for name in names), HEADS_BIAS)

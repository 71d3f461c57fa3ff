"""How PyTorch lays out the layers all its models share: (out, in) matrices and OIHW kernels."""

from collections.abc import Iterator

from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Pair

CONV = Layout("h w c d -> d c h w")
MATRIX = Layout("i o -> o i")
INTO_HEADS = Layout("i h d -> (h d) i")
HEADS_BIAS = Layout("h d -> (h d)")
FROM_HEADS = Layout("h d o -> o (h d)")
TABLE = Layout("t d -> 1 t d")

QKV = ("query", "key", "value")


def norm(theirs: str, ours: str) -> Iterator[Pair]:
    """A LayerNorm."""
    yield Pair(f"{theirs}.weight", (f"{ours}/gamma",))
    yield Pair(f"{theirs}.bias", (f"{ours}/beta",))


def linear(theirs: str, ours: str, layout: Layout = MATRIX) -> Iterator[Pair]:
    """A Linear or a convolution, with its bias."""
    yield Pair(f"{theirs}.weight", (f"{ours}/kernel",), layout)
    yield Pair(f"{theirs}.bias", (f"{ours}/bias",))


def qkv(weight: str, bias: str | None, ours: str) -> Iterator[Pair]:
    """Query, key and value in one matrix, as timm, torchvision and vit-pytorch have them."""
    yield Pair(weight, tuple(f"{ours}/{name}/kernel" for name in QKV), INTO_HEADS)
    if bias is not None:
        yield Pair(bias, tuple(f"{ours}/{name}/bias" for name in QKV), HEADS_BIAS)

"""Layouts and names that all PyTorch models share: (out, in) matrices and OIHW kernels."""

from collections.abc import Iterator, Sequence

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
CLIP_PIXELS = {
    "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
    "pixel_std": (0.26862954, 0.26130258, 0.27577711),
}
IMAGENET_PIXELS = {"pixel_mean": (0.485, 0.456, 0.406), "pixel_std": (0.229, 0.224, 0.225)}


def norm(theirs: str, ours: str, kind: str = "layer") -> Iterator[Pair]:
    """The rows of a LayerNorm, or of an RMSNorm, which has no offset."""
    yield Pair(f"{theirs}.weight", (f"{ours}/gamma",))
    if kind == "layer":
        yield Pair(f"{theirs}.bias", (f"{ours}/beta",))


def linear(
    theirs: str,
    ours: str,
    layout: Layout = MATRIX,
    bias_layout: Layout = SAME,
    *,
    bias: bool = True,
) -> Iterator[Pair]:
    """The rows of a Linear or a convolution."""
    yield Pair(f"{theirs}.weight", (f"{ours}/kernel",), layout)
    if bias:
        yield Pair(f"{theirs}.bias", (f"{ours}/bias",), bias_layout)


def mlp(
    theirs: str, ours: str, names: Sequence[str], gated: bool, *, bias: bool = True
) -> Iterator[Pair]:
    """The rows of an MLP's Linears, whose last name is that of the second.

    A gated one has two before it, of the gate and of what it gates, or one that holds both in this
    order.
    """
    *first, last = names
    parts = ("gate", "dense_1") if gated else ("dense_1",)
    if len(first) == len(parts):
        for name, part in zip(first, parts, strict=True):
            yield from linear(f"{theirs}.{name}", f"{ours}/{part}", bias=bias)
    else:
        (name,) = first
        kernels, biases = (tuple(f"{ours}/{p}/{w}" for p in parts) for w in ("kernel", "bias"))
        yield Pair(f"{theirs}.{name}.weight", kernels, MATRIX)
        if bias:
            yield Pair(f"{theirs}.{name}.bias", biases)
    yield from linear(f"{theirs}.{last}", f"{ours}/dense_2", bias=bias)


def qkv(weight: str, bias: str | None, ours: str, names: tuple[str, ...] = QKV) -> Iterator[Pair]:
    """The rows of one matrix for query, key and value: timm, torchvision, vit-pytorch."""
    yield Pair(weight, tuple(f"{ours}/{name}/kernel" for name in names), INTO_HEADS)
    if bias is not None:
        yield Pair(bias, tuple(f"{ours}/{name}/bias" for name in names), HEADS_BIAS)

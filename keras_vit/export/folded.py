"""What a folded model is: the weights of a `ViT` for inference, as arrays and numbers.

`fold.py` makes it of a model, and `program.py` says what is computed with it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.fold_stem import Stem


@dataclasses.dataclass(frozen=True)
class Product:
    """`x kernel + bias`."""

    name: str
    """The path of the model's layer, such as "encoder_block_3/mlp/dense_1"."""
    kernel: np.ndarray
    bias: np.ndarray


@dataclasses.dataclass(frozen=True)
class Norm:
    """`(x - mean) / sqrt(variance + epsilon)` over the last axis, then `* scale + offset`.

    With `rms`, `x / sqrt(mean square + epsilon)`.
    """

    name: str
    """The path of the model's layer."""
    epsilon: float
    scale: np.ndarray | None = None
    """None, like `offset`, if both were folded away."""
    offset: np.ndarray | None = None
    centered: bool = False
    """Whether the mean of `x` is already 0, so that subtracting it changes nothing."""
    rms: bool = False
    """Whether it divides by the root mean square instead: no mean may be subtracted."""


@dataclasses.dataclass(frozen=True)
class Gain:
    """`x * scale + offset`."""

    name: str
    scale: np.ndarray
    offset: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rotation:
    """`x * cos + swap(x) * sin`; `swap` exchanges the two halves of the last axis.

    This rotates each pair (i, i + d/2). Tokens before the patches have cos 1 and sin 0.
    """

    name: str
    """Equal for blocks with the same arrays."""
    cos: np.ndarray
    """(T, d), or of a head each (h, T, d)."""
    sin: np.ndarray
    """Like `cos`; negative in the first half."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The weights of an encoder block. Shapes: D width, h heads, d head size, M the MLP's width."""

    name: str
    """The path of the model's layer."""
    attention_norm: Norm
    query: Product
    """(D, h * d), like `key` and `value`. The scale of the scores is in the query."""
    key: Product
    value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    query_gain: Gain | None
    """(h, 1, d), after the query's norm, or None."""
    rotation: Rotation | None
    """Of queries and keys, after their norms."""
    score_bias: np.ndarray | None
    """(h, T, T), added to the scores, or None."""
    offset_keys: np.ndarray | None
    """(h, 2 T, d), for scores that depend on the offset of two tokens, or None."""
    attention_inner_norm: Norm | None
    """Between the concatenated heads and `output`."""
    output: Product
    """(h * d, D)."""
    mlp_norm: Norm
    mlp_gate: Product | None
    """(D, M), or None if the MLP is not gated."""
    mlp_1: Product
    """(D, M)."""
    mlp_inner_norm: Norm | None
    """Between `mlp_1` and `mlp_2`."""
    mlp_2: Product
    """(M, D)."""


@dataclasses.dataclass(frozen=True)
class AttentionPool:
    """The weights of attention pooling. Shapes: D width, h heads, M the MLP's width."""

    name: str
    """The path of the model's layer."""
    scores: Product
    """(D, h): the scaled product of a token's keys with the queries, up to a constant."""
    value: Product
    """(D, D)."""
    output: Product
    """(D, D)."""
    norm: Norm
    mlp_1: Product
    """(D, M)."""
    mlp_2: Product
    """(M, D)."""


@dataclasses.dataclass(frozen=True)
class Folded:
    """The weights of a model for inference, in float32; `Program` says what to compute with them.

    Shapes: P x P pixels and C channels a patch, N patches, k tokens in front of them, D width.
    """

    config: ViTConfig
    stem: Stem | None
    """Gives the feature map whose cells are then the pixels of a patch."""
    patch_norm: Norm | None
    """Before the patch projection."""
    patches: Product
    """(P * P * C, D): a patch is read row by row, column by column, channel by channel."""
    token_norm: Norm | None
    """After the patch projection."""
    positions: np.ndarray | None
    """(N, D), added to the patch tokens, or None."""
    prefix: np.ndarray
    """(k, D): class token and registers, with their positions."""
    embedding_norm: Norm | None
    """Of all tokens, before the first block."""
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    attention_pool: AttentionPool | None
    pre_logits: Product | None
    head: Product | None
    feature_gain: Gain | None
    """What moved from `final_norm` into `head`: the features still have it. None if nothing did."""

    @property
    def num_weights(self) -> int:
        """How many numbers the arrays hold."""
        return _count(self)


def joined(products: Sequence[Product]) -> Product:
    """Products of the same `x` as one, side by side: of query, key and value, "qkv"."""
    if len(products) == 1:
        return products[0]
    places, leaves = zip(*(product.name.rsplit("/", 1) for product in products), strict=True)
    return Product(
        name=f"{places[0]}/{''.join(leaf[0] for leaf in leaves)}",
        kernel=np.concatenate([product.kernel for product in products], axis=1),
        bias=np.concatenate([product.bias for product in products]),
    )


def pixel_gain(config: ViTConfig) -> Gain:
    """`(pixel / 255 - mean) / std`, what the model takes for a pixel, channel by channel."""
    mean, std = (
        np.broadcast_to(np.asarray(value, "float64"), config.in_channels)
        for value in (config.pixel_mean, config.pixel_std)
    )
    return to_float32(Gain("pixels", 1 / (255 * std), -mean / std))


def to_float32(part: Any) -> Any:
    """The arrays in a part of a folded model, or in all of it, as contiguous float32."""
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part, "float32")
    if isinstance(part, tuple):
        return tuple(to_float32(item) for item in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, ViTConfig):
        fields = {f.name: to_float32(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return type(part)(**fields)
    return part


def _count(part: Any) -> int:
    if isinstance(part, np.ndarray):
        return part.size
    if isinstance(part, tuple):
        return sum(map(_count, part))
    if dataclasses.is_dataclass(part):
        return sum(_count(getattr(part, field.name)) for field in dataclasses.fields(part))
    return 0

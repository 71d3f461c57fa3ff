"""Moves large channels of activations into the kernels that read them, before both become int8.

A product's input has one scale, and in a trained ViT a few channels are far larger than the others,
which then get few of the 256 steps. For any `s > 0` a channel, `x W = (x / s) (diag(s) W)`. The
division costs nothing where it is folded into what makes `x`: the gain of the LayerNorm before a
product, the columns of the values before the output projection, and those of a gated MLP's `mlp_1`
before `mlp_2`. Behind GELU there is nothing to fold it into.

Reference: SmoothQuant (arXiv 2211.10438), Eq. 4 with an exponent of 1/2.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from keras_vit.export.folded import Block, Folded, Norm, Product
from keras_vit.export.quantization import Ranges

Channels = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""The smallest and the largest value of each channel that a product reads, by the product's name.
"""


def smoothed(folded: Folded, seen: Channels) -> tuple[Folded, Channels]:
    """The same model with smaller outliers, and what its products read then.

    Args:
        folded: What `fold` returns.
        seen: What its products read, by the names of `product_names`.
    """
    found = dict(seen)
    blocks = tuple(_block(block, found) for block in folded.blocks)
    return dataclasses.replace(folded, blocks=blocks), found


def whole_ranges(seen: Channels) -> Ranges:
    """The range over all channels."""
    return {name: (float(low.min()), float(high.max())) for name, (low, high) in seen.items()}


def _block(block: Block, seen: dict) -> Block:
    attention = block.output.name.rpartition("/")[0]
    qkv = [
        name for name in seen if name.rpartition("/")[0] == attention and name != block.output.name
    ]
    if block.attention_inner_norm is None:
        scale = _scale(seen, [block.output.name], [block.output])
        block = dataclasses.replace(
            block, value=_divided(block.value, scale), output=_multiplied(block.output, scale)
        )
    if block.mlp_gate and block.mlp_inner_norm is None:
        scale = _scale(seen, [block.mlp_2.name], [block.mlp_2])
        block = dataclasses.replace(
            block, mlp_1=_divided(block.mlp_1, scale), mlp_2=_multiplied(block.mlp_2, scale)
        )
    if block.attention_norm.scale is None and block.attention_norm.offset is None:
        parts = {"query": block.query, "key": block.key, "value": block.value}
        scale = _scale(seen, qkv, list(parts.values()))
        parts = {name: _multiplied(part, scale) for name, part in parts.items()}
        block = dataclasses.replace(
            block, attention_norm=_with_gain(block.attention_norm, scale), **parts
        )
    if block.mlp_norm.scale is None and block.mlp_norm.offset is None:
        parts = {"mlp_1": block.mlp_1} | ({"mlp_gate": block.mlp_gate} if block.mlp_gate else {})
        scale = _scale(seen, [part.name for part in parts.values()], list(parts.values()))
        parts = {name: _multiplied(part, scale) for name, part in parts.items()}
        block = dataclasses.replace(block, mlp_norm=_with_gain(block.mlp_norm, scale), **parts)
    return block


def _scale(seen: dict, names: Sequence[str], readers: Sequence[Product]) -> np.ndarray:
    """`s` of each channel; divides what is `seen` by it."""
    largest = np.max([np.abs(ends).max(0) for ends in (seen[name] for name in names)], axis=0)
    weights = np.max([np.abs(reader.kernel).max(1) for reader in readers], axis=0)
    alive = (largest > 0) & (weights > 0)
    ratio = np.where(alive, largest, 1) / np.where(alive, weights, 1)
    scale = np.sqrt(ratio).astype("float32")
    # A channel that is next to nothing must not blow up.
    scale = np.maximum(scale, scale.max() * 1e-3)
    for name in names:
        low, high = seen[name]
        seen[name] = (low / scale, high / scale)
    return scale


def _multiplied(product: Product, scale: np.ndarray) -> Product:
    """The rows of the kernel times the scale."""
    return dataclasses.replace(product, kernel=product.kernel * scale[:, None])


def _divided(product: Product, scale: np.ndarray) -> Product:
    """What the product gives, divided by the scale."""
    return Product(product.name, product.kernel / scale, product.bias / scale)


def _with_gain(norm: Norm, scale: np.ndarray) -> Norm:
    return dataclasses.replace(norm, scale=1 / scale, offset=np.zeros_like(scale))

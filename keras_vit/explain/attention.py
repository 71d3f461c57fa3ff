"""What attends to what: attention weights as the model computes them, and what follows from them.

Shapes: L layers asked for, B batch, h heads, T tokens, k of them in front of the patches,
N = T - k patches, rows x columns their grid.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.explain import tokens
from keras_vit.model import ViT

FUSIONS = {"mean": np.mean, "max": np.max, "min": np.min}


def attention_maps(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """The attention weights A of Eq. 6.

    The model runs block by block and gives its own weights, whatever kernel, precision, adapter or
    quantizer it runs with. Blocks that are not asked for cost what they cost in a forward pass, and
    those behind the last one asked for nothing.

    Args:
        model: A `ViT`; it does not change.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        layers: Blocks, counted from 0 or from the end with negatives; None means all.

    Returns:
        float32 array `(L, B, h, T, T)`: rows are queries and sum to 1, columns are keys.

    Reference:
        arXiv 2010.11929, Eq. 6.

    Example:

    >>> last = keras_vit.explain.attention_maps(model, images, layers=-1)[0]
    """
    wanted, images = _checked(model, images, layers)
    config = model.config
    shape = (len(wanted), len(images), config.num_heads, config.num_tokens, config.num_tokens)
    maps = np.empty(shape, "float32")
    for part, layer, weights in _weights(model, images, wanted):
        for place in np.flatnonzero(np.equal(wanted, layer)):
            maps[place, part] = weights
    return maps


def class_token_maps(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """What the class token draws from each patch, a head and layer.

    Without a class token, the mean over the queries that are pooled stands in for it.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        layers: Blocks, counted from 0 or from the end with negatives; None means all.

    Returns:
        float32 array `(L, B, h, rows, columns)`. What goes to the tokens in front of the patches is
        missing: a map sums to 1 less that.
    """
    wanted, images = _checked(model, images, layers)
    config = model.config
    queries = slice(0, 1) if config.class_token else tokens.read_tokens(config)
    maps = np.empty((len(wanted), len(images), config.num_heads, *config.grid), "float32")
    for part, layer, weights in _weights(model, images, wanted):
        drawn = weights[:, :, queries, config.num_prefix_tokens :].mean(2)  # (B, h, N)
        for place in np.flatnonzero(np.equal(wanted, layer)):
            maps[place, part] = drawn.reshape(maps[place, part].shape)
    return maps


def attention_rollout(
    model: ViT, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """Attention followed through all layers, residual connections included.

    A'_l = rows of (fuse(A_l) + I), each divided by its sum
    R = A'_L ... A'_2 A'_1

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        head_fusion: How the heads become one: "mean", "max" or "min".
        discard_ratio: Share of the fused weights, in [0, 1), that is set to 0 before the identity
            is added: the smallest of all `T * T` of an image and layer, none excepted. The identity
            keeps what a token has of itself.

    Returns:
        float32 array `(B, T, T)` whose rows sum to 1: row i is what the last state of token i draws
        from each token at the input.

    Reference:
        arXiv 2005.00928, Section 3.
    """
    if head_fusion not in FUSIONS:
        raise ValueError(
            f"head_fusion must be one of {', '.join(FUSIONS)}. "
            f"Received: head_fusion={head_fusion!r}"
        )
    is_number = isinstance(discard_ratio, int | float) and not isinstance(discard_ratio, bool)
    if not is_number or not 0 <= discard_ratio < 1:
        raise ValueError(
            f"discard_ratio must be in [0, 1). Received: discard_ratio={discard_ratio!r}"
        )
    wanted, images = _checked(model, images, None)
    length = model.config.num_tokens
    rollout = np.tile(np.eye(length, dtype="float32"), (len(images), 1, 1))
    for part, _, weights in _weights(model, images, wanted):
        fused = FUSIONS[head_fusion](weights, axis=1)  # (B, T, T)
        mixed = _without_smallest(fused, discard_ratio) + np.eye(length, dtype="float32")
        mixed /= mixed.sum(-1, keepdims=True)
        rollout[part] = mixed @ rollout[part]
    return rollout


def rollout_map(
    model: ViT, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """What the tokens that the head reads draw from each patch, by `attention_rollout`.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        head_fusion: As in `attention_rollout`.
        discard_ratio: As in `attention_rollout`.

    Returns:
        float32 array `(B, rows, columns)`: shares of 1, the rest of which is the other tokens'. It
        is the class token's row with `pooling="token"`, else the mean over the pooled tokens.
    """
    rollout = attention_rollout(model, images, head_fusion=head_fusion, discard_ratio=discard_ratio)
    return drawn_from_patches(rollout, model)


def attention_distance(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """How far heads look: the mean distance between a query patch and what it attends to.

    For each query patch, the mean over key patches of the distance between the centers of both,
    weighted by attention. Tokens that are no patches have no place: they are left out and the
    weights of the others scaled to sum to 1.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        layers: Blocks, counted from 0 or from the end with negatives; None means all.

    Returns:
        float32 array `(L, h)` in pixels, the mean over images and query patches.

    Reference:
        arXiv 2010.11929, Fig. 7 (right) and Appendix D.7.
    """
    wanted, images = _checked(model, images, layers)
    config = model.config
    distances = patch_distances(config.grid, config.patch_size)
    total = np.zeros((len(wanted), config.num_heads))
    count = np.zeros((len(wanted), config.num_heads))
    k = config.num_prefix_tokens
    for _, layer, weights in _weights(model, images, wanted):
        patches = weights[:, :, k:, k:]  # (B, h, N, N)
        share = patches.sum(-1)  # (B, h, N)
        # A query that draws nothing at all from patches looks nowhere, and does not count.
        far = np.einsum("bhqk,qk->bhq", patches, distances) / np.where(share > 0, share, 1)
        for place in np.flatnonzero(np.equal(wanted, layer)):
            total[place] += far.sum((0, 2))
            count[place] += (share > 0).sum((0, 2))
    return (total / np.maximum(count, 1)).astype("float32")


def attention_entropy(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """How widely heads look: the entropy of their attention, `-sum_k A_qk ln A_qk`.

    0 is one token only, ln T all tokens alike.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)` as the model takes them, or uint8 pixels of its size.
        layers: Blocks, counted from 0 or from the end with negatives; None means all.

    Returns:
        float32 array `(L, h)` in nats, the mean over images and queries.
    """
    wanted, images = _checked(model, images, layers)
    total = np.zeros((len(wanted), model.config.num_heads))
    for _, layer, weights in _weights(model, images, wanted):
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)  # 0 ln 0 = 0
        entropy = -np.einsum("bhqk,bhqk->h", weights, logs) / weights.shape[2]
        for place in np.flatnonzero(np.equal(wanted, layer)):
            total[place] += entropy
    return (total / len(images)).astype("float32")


def patch_distances(grid: tuple[int, int], patch_size: tuple[int, int]) -> np.ndarray:
    """Distances in pixels between the centers of all patches, `(N, N)`."""
    places = np.mgrid[: grid[0], : grid[1]].reshape(2, -1).T * np.asarray(patch_size)  # (N, 2)
    steps = (places[:, None] - places[None]).astype("float64")
    return np.sqrt((steps**2).sum(-1)).astype("float32")


def drawn_from_patches(relevance: np.ndarray, model: ViT) -> np.ndarray:
    """Rows of the tokens that the head reads, columns of the patches: (B, T, T) to a grid."""
    config = model.config
    rows = relevance[:, tokens.read_tokens(config), config.num_prefix_tokens :]
    return rows.mean(1).reshape(len(relevance), *config.grid)  # (B, rows, columns)


def _checked(model, images, layers):
    tokens.check_model(model)
    wanted = tokens.checked_layers(layers, model.config.depth)
    return wanted, tokens.checked_images(images, model.config)


def _weights(
    model: ViT, images: np.ndarray, wanted: Sequence[int]
) -> Iterator[tuple[slice, int, np.ndarray]]:
    """Part of the batch, layer and its weights (B, h, T, T), one layer in memory at a time."""
    for part in tokens.batches(images, model.config):
        z = tokens.embedded(model, images[part])
        for layer, block in enumerate(model.blocks[: max(wanted) + 1]):
            if layer not in wanted:
                z = tokens.after(block, z)
                continue
            z, scores = tokens.after_with_scores(block, z)
            # Weights that were rounded to half precision sum to 1 in their own precision only.
            half = keras.backend.standardize_dtype(block.compute_dtype) != "float32"
            yield part, layer, _rows_to_one(scores) if half else scores


def _rows_to_one(weights):
    return weights / weights.sum(-1, keepdims=True)


def _without_smallest(fused, ratio):
    """A copy whose smallest weights, this share of each image's, are 0."""
    flat = fused.reshape(len(fused), -1).copy()
    count = int(ratio * flat.shape[1])
    smallest = np.argpartition(flat, count, axis=1)[:, :count]
    np.put_along_axis(flat, smallest, 0.0, axis=1)
    return flat.reshape(fused.shape)

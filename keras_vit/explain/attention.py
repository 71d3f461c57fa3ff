"""Attention weights as the model computes them, and maps and statistics of them.

Shapes: L requested layers, B batch, h heads, T tokens, k prefix tokens, N = T - k patches,
rows x columns the patch grid.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.explain import tokens
from keras_vit.model import ViT

FUSIONS = {"mean": np.mean, "max": np.max, "min": np.min}


@takes_classifier
def attention_maps(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """The attention weights A of Eq. 6.

    The model runs block by block and returns its own weights, with LoRA, int8 or half precision
    too. Blocks after the last requested one do not run.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)`, preprocessed floats or uint8 pixels of the model's size.
        layers: One or more block indices; negative ones count from the end. None means all.

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
    for part, rows, weights in _weights(model, images, wanted):
        maps[rows, part] = weights
    return maps


@takes_classifier
def class_token_maps(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """The class token's attention to each patch, per layer and head.

    Without a class token, it is the mean over the pooled tokens.

    Args:
        model: A `ViT`.
        images: As in `attention_maps`.
        layers: As in `attention_maps`.

    Returns:
        float32 array `(L, B, h, rows, columns)`. Attention to prefix tokens is left out, so that
        the sum of a map may be less than 1.
    """
    wanted, images = _checked(model, images, layers)
    config = model.config
    queries = slice(0, 1) if config.class_token else tokens.read_tokens(config)
    maps = np.empty((len(wanted), len(images), config.num_heads, *config.grid), "float32")
    for part, rows, weights in _weights(model, images, wanted):
        patches = weights[:, :, queries, config.num_prefix_tokens :].mean(2)  # (B, h, N)
        maps[rows, part] = patches.reshape(*patches.shape[:2], *config.grid)
    return maps


@takes_classifier
def attention_rollout(
    model: ViT, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """Attention through all layers, including residual connections.

    A'_l = rows of (fuse(A_l) + I), each divided by its sum
    R = A'_L ... A'_2 A'_1

    Args:
        model: A `ViT`.
        images: As in `attention_maps`.
        head_fusion: How to combine the heads: "mean", "max" or "min".
        discard_ratio: Fraction, in [0, 1), of the smallest of the `T * T` fused weights per image
            and layer that are set to 0 before the identity is added.

    Returns:
        float32 array `(B, T, T)` whose rows sum to 1: row i holds how much each input token
        contributes to the last state of token i.

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


@takes_classifier
def rollout_map(
    model: ViT, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """How much each patch contributes to the head's input, by `attention_rollout`.

    Args:
        model: A `ViT`.
        images: As in `attention_maps`.
        head_fusion: As in `attention_rollout`.
        discard_ratio: As in `attention_rollout`.

    Returns:
        float32 array `(B, rows, columns)`: the class token's row with `pooling="token"`, otherwise
        the mean over the pooled tokens, with attention pooling weighted by its attention.
        Contributions of prefix tokens are left out.
    """
    rollout = attention_rollout(model, images, head_fusion=head_fusion, discard_ratio=discard_ratio)
    images = tokens.checked_images(images, model.config)
    return patches_to_head(rollout, model, images, FUSIONS[head_fusion])


@takes_classifier
def pooling_map(model: ViT, images: Any) -> np.ndarray:
    """The attention of attention pooling to each patch, per head.

    Args:
        model: A `ViT` with `pooling="map"` or `"map_all"`.
        images: As in `attention_maps`.

    Returns:
        float32 array `(B, h, rows, columns)`, h the heads of the pooling. Attention to prefix
        tokens is left out, so that with "map_all" the sum of a map may be less than 1.

    Reference:
        arXiv 1810.00825, Eq. 11.
    """
    tokens.check_vit(model)
    config = model.config
    if not config.attention_pooling:
        raise ValueError(
            "model must pool by attention, with pooling='map' or 'map_all'. "
            f"Received: pooling={config.pooling!r}"
        )
    images = tokens.checked_images(images, config)
    patches = _pooling_weights(model, images)[:, :, -config.num_patches :]  # (B, h, N)
    return patches.reshape(*patches.shape[:2], *config.grid)


@takes_classifier
def attention_distance(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """The mean distance between a query patch and what it attends to.

    The distance between the centers of query and key patch, weighted by attention. Prefix tokens
    are left out, and the other weights scaled to sum to 1.

    Args:
        model: A `ViT`.
        images: As in `attention_maps`.
        layers: As in `attention_maps`.

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
    for _, rows, weights in _weights(model, images, wanted):
        patches = weights[:, :, k:, k:]  # (B, h, N, N)
        share = patches.sum(-1)  # (B, h, N)
        # Queries that do not attend to any patch are not counted.
        far = np.einsum("bhqk,qk->bhq", patches, distances) / np.where(share > 0, share, 1)
        total[rows] += far.sum((0, 2))
        count[rows] += (share > 0).sum((0, 2))
    return (total / np.maximum(count, 1)).astype("float32")


@takes_classifier
def attention_entropy(
    model: ViT, images: Any, layers: int | Sequence[int] | None = None
) -> np.ndarray:
    """The entropy of attention, `-sum_k A_qk ln A_qk`: 0 for one token, ln T for all equally.

    Args:
        model: A `ViT`.
        images: As in `attention_maps`.
        layers: As in `attention_maps`.

    Returns:
        float32 array `(L, h)` in nats, the mean over images and queries.
    """
    wanted, images = _checked(model, images, layers)
    total = np.zeros((len(wanted), model.config.num_heads))
    for _, rows, weights in _weights(model, images, wanted):
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)  # 0 ln 0 = 0
        total[rows] -= np.einsum("bhqk,bhqk->h", weights, logs) / weights.shape[2]
    return (total / len(images)).astype("float32")


def patch_distances(grid: tuple[int, int], patch_size: tuple[int, int]) -> np.ndarray:
    """Distances in pixels between the centers of patches, `(N, N)`."""
    places = np.mgrid[: grid[0], : grid[1]].reshape(2, -1).T * np.asarray(patch_size)  # (N, 2)
    steps = (places[:, None] - places[None]).astype("float64")
    return np.sqrt((steps**2).sum(-1)).astype("float32")


def patches_to_head(
    relevance: np.ndarray, model: ViT, images: np.ndarray, fusion: Any = np.mean
) -> np.ndarray:
    """The patches' columns in the rows of the tokens that the head reads: (B, T, T) to a grid.

    The rows are averaged. Attention pooling weighs them by its attention to these images, whose
    heads `fusion` combines.
    """
    config = model.config
    rows = relevance[:, tokens.read_tokens(config), config.num_prefix_tokens :]  # (B, t, N)
    if config.attention_pooling:
        weights = fusion(_pooling_weights(model, images), axis=1)  # (B, t)
        weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo("float32").tiny)
        found = np.einsum("bt,btn->bn", weights, rows)
    elif config.pooling == "token_mean":
        found = (rows[:, 0] + rows[:, config.num_prefix_tokens :].mean(1)) / 2
    else:
        found = rows.mean(1)
    return found.reshape(len(relevance), *config.grid)  # (B, rows, columns)


def _checked(model, images, layers):
    tokens.check_vit(model)
    wanted = tokens.checked_layers(layers, model.config.depth)
    return wanted, tokens.checked_images(images, model.config)


def _weights(
    model: ViT, images: np.ndarray, wanted: Sequence[int]
) -> Iterator[tuple[slice, list[int], np.ndarray]]:
    """Part of the batch, rows of the result, and their weights (B, h, T, T), layer by layer."""
    for part in tokens.batch_slices(images, model.config):
        z = tokens.embedded(model, images[part])
        for layer, block in enumerate(model.blocks[: max(wanted) + 1]):
            if layer not in wanted:
                z = tokens.after(block, z)
                continue
            z, scores = tokens.after_with_scores(block, z)
            if keras.backend.standardize_dtype(block.compute_dtype) != "float32":
                scores = scores / scores.sum(-1, keepdims=True)  # half precision rounds it
            yield part, [row for row, other in enumerate(wanted) if other == layer], scores


def _pooling_weights(model: ViT, images: np.ndarray) -> np.ndarray:
    """The weights of attention pooling, `(B, h, t)` for the t tokens that it reads."""
    config, pooling = model.config, model.get_layer("pooling")
    before = config.final_norm == "before_pooling"
    found = []
    for part in tokens.batch_slices(images, config):
        z = tokens.embedded(model, images[part])
        for layer in [*model.blocks, *([model.get_layer("encoder_norm")] if before else [])]:
            z = tokens.after(layer, z)
        _, scores = pooling(z, training=False, return_attention_scores=True)
        scores = tokens.as_numpy(scores)
        found.append(scores / scores.sum(-1, keepdims=True))  # half precision rounds the sum
    return np.concatenate(found)


def _without_smallest(fused, ratio):
    """A copy in which this fraction of each image's weights, the smallest, is 0."""
    flat = fused.reshape(len(fused), -1).copy()
    count = int(ratio * flat.shape[1])
    smallest = np.argpartition(flat, count, axis=1)[:, :count]
    np.put_along_axis(flat, smallest, 0.0, axis=1)
    return flat.reshape(fused.shape)

"""Patch filters, and the similarity of position embeddings and of patch tokens.

Shapes: B batch, rows x columns the patch grid, N patches, P x P patch, C channels, D width.
"""

from typing import Any

import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.explain import tokens
from keras_vit.model import ViT


@takes_classifier
def position_similarity(model: ViT) -> np.ndarray:
    """Cosine similarity of the patches' position embeddings, learned or fixed.

    Args:
        model: A `ViT` with position embeddings.

    Returns:
        float32 array `(rows, columns, rows, columns)`: `[r, c]` is the map of one patch.

    Reference:
        arXiv 2010.11929, Fig. 7 (center).
    """
    tokens.check_vit(model)
    config = model.config
    if config.position_table is None:
        raise ValueError(
            "model must add position embeddings to its tokens. "
            f"Received: position_embedding={config.position_embedding!r}"
        )
    layer = model.get_layer("position_embedding")
    table = tokens.as_numpy(layer._table())[config.num_prefix_rows :]  # (N, D)
    return _cosines(table).reshape(*config.grid, *config.grid)


@takes_classifier
def patch_filters(model: ViT, count: int = 28) -> np.ndarray:
    """The leading principal components of the D filters of the patch projection.

    With a stem, these are the filters of its first convolution, which reads the pixels. With
    `patch_shift`, a filter is what it is on the image itself: the sum of five, each in its place.

    The sign of a component is arbitrary; it is chosen so that the largest number is positive.

    Args:
        model: A `ViT`.
        count: Number of components; at most min(D - 1, P * P * C) are returned.

    Returns:
        float32 array `(count, P, P, C)`, with a stem `(count, 7, 7, C)` or for "conv"
        `(count, 3, 3, C)`, with `patch_shift` `(count, 2 P, 2 P, C)`, each component scaled to
        [0, 1] separately. Three channels are red, green and blue, one is gray.

    Reference:
        arXiv 2010.11929, Fig. 7 (left).
    """
    tokens.check_vit(model)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a positive int. Received: count={count!r}")
    if model.config.stem:
        kernel = tokens.as_numpy(model.get_layer("stem").root_conv.standardized_kernel())
    else:
        kernel = tokens.as_numpy(model.get_layer("patches").projection.kernel)  # (P, P, C, D)
        kernel = _on_image(kernel, model.config) if model.config.patch_shift else kernel
    filters = kernel.reshape(-1, kernel.shape[-1]).T  # (D, P * P * C)
    most = min(max(len(filters) - 1, 1), filters.shape[1])
    components = _components(filters, min(count, most))  # (count, P * P * C)
    return _unit(components, 1).reshape(-1, *kernel.shape[:-1])


@takes_classifier
def region_similarity(model: ViT, images: Any, block: int = -1) -> np.ndarray:
    """Cosine similarity of an image's patch tokens: which regions look alike to the model.

    Args:
        model: A `ViT`.
        images: `(B, H, W, C)`, preprocessed floats or uint8 pixels of the model's size.
        block: Index of the block whose output to compare; negative ones count from the end. After
            the last block, the model's last LayerNorm is applied if it comes before the pooling.

    Returns:
        float32 array `(B, rows, columns, rows, columns)`: `[i, r, c]` is the map of one patch.
    """
    patches = tokens.patch_tokens(model, images, block)  # (B, N, D)
    grid = model.config.grid
    return _cosines(patches).reshape(-1, *grid, *grid)


@takes_classifier
def patch_pca(model: ViT, images: Any, block: int = -1) -> np.ndarray:
    """The three leading principal components of the patch tokens, as red, green and blue.

    They are computed over the patches of all images, so that colors are comparable.

    Args:
        model: A `ViT`.
        images: As in `region_similarity`.
        block: As in `region_similarity`.

    Returns:
        float32 array `(B, rows, columns, 3)`, each component scaled to [0, 1] over the batch.

    Reference:
        arXiv 2304.07193, Section 7.5.
    """
    patches = tokens.patch_tokens(model, images, block)  # (B, N, D)
    points = patches.reshape(-1, patches.shape[-1])
    if min(points.shape) < 3:
        raise ValueError(
            "images must have three patches in total, and the model a width of at least 3. "
            f"Received: {points.shape[0]} patches of width {points.shape[1]}"
        )
    values = (points - points.mean(0)) @ _components(points, 3).T  # (B * N, 3)
    return _unit(values, 0).reshape(len(patches), *model.config.grid, 3)


def _on_image(kernel, config):
    """A kernel `(P, P, 5 C, D)` of shifted images as one of the image, `(2 P, 2 P, C, D)`."""
    (height, width), (rows, columns) = config.patch_size, config.patch_shifts
    parts = np.split(kernel, config.patch_copies, axis=2)
    shape = (height + 2 * rows, width + 2 * columns, *parts[0].shape[2:])
    total = np.zeros(shape, kernel.dtype)
    places = [(rows, columns), (0, 0), (0, 2 * columns), (2 * rows, 0), (2 * rows, 2 * columns)]
    for part, (top, left) in zip(parts, places, strict=True):
        total[top : top + height, left : left + width] += part
    return total


def _cosines(vectors):
    """(..., N, D) to (..., N, N); a vector of zeros has a cosine of 0 with all others."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = vectors / np.where(length > 0, length, 1)
    return np.clip(unit @ np.swapaxes(unit, -1, -2), -1, 1)


def _components(points, count):
    """The leading principal components of points (M, D), unit vectors (count, D)."""
    if not np.isfinite(points).all():
        raise ValueError("model must give finite numbers. Received: NaN or infinite ones")
    centered = points - points.mean(0, dtype="float64")
    axes = np.linalg.eigh(centered.T @ centered)[1]  # much faster than an SVD of many points
    components = axes.T[::-1][:count]  # the leading ones first
    largest = np.abs(components).argmax(1)[:, None]
    return components * np.sign(np.take_along_axis(components, largest, 1))


def _unit(values, axis):
    """Scales values to [0, 1] along an axis; to 0.5 if all are equal."""
    low, high = values.min(axis, keepdims=True), values.max(axis, keepdims=True)
    span = high - low
    scaled = np.where(span > 0, (values - low) / np.where(span > 0, span, 1), 0.5)
    return scaled.astype("float32")

"""An interactive report on what a model sees in an image, as one HTML file.

This module computes the numbers; the page in `page/` draws them, without other libraries.

Shapes: L layers, h heads, T tokens, k prefix tokens, N = T - k patches.
"""

import base64
import html
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops

from keras_vit.atomic import atomic_path
from keras_vit.classifier import takes_classifier
from keras_vit.explain import attention, embeddings, gradients, tokens
from keras_vit.explain.panels import SourceImage, open_image
from keras_vit.model import ViT
from keras_vit.paths import as_output
from keras_vit.probabilities import probabilities_of, probability_function

PAGE = Path(__file__).parent / "page"
MOST_ATTENTION = 8 << 20
"""Most attention weights in a page, of one byte each; larger models get those of one query."""
MOST_SIMILARITIES = 4 << 20
"""Most cosines of patch pairs in a page, of one byte each."""
MOST_CELLS = 16
"""Most maps of position similarity along each axis; larger grids are subsampled."""
LONGEST = 800
"""Longer side of the image in the page, in pixels."""
SMALL = 200
"""Images up to this size are enlarged without smoothing."""
FILTERS = 28


@takes_classifier
def write_report(
    model: ViT,
    image: Any,
    path: str | os.PathLike,
    *,
    title: str | None = None,
    top_k: int = 5,
) -> Path:
    """Writes an HTML report on what a model sees in an image.

    The file works offline. It shows the prediction, attention by layer, head and query token,
    rollout and gradient maps, attention distance and entropy, position similarity, patch filters
    and patch features. What does not apply to a model is left out. If the attention exceeds 8 MB
    (L * h * T * N weights), only that of the class token is included.

    Args:
        model: A `ViT`.
        image: One image: a path, a PIL image, or an array `(H, W)` or `(H, W, C)` of pixels from 0
            to 255.
        path: The .html or .htm file to write. It is written atomically, and may replace a file.
        title: The title; defaults to the image's file name.
        top_k: Number of top classes to list and to explain by gradients.

    Returns:
        The path.

    Example:

    >>> keras_vit.explain.write_report(model, "cat.jpg", "report.html")
    """
    tokens.check_vit(model)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k must be a positive int. Received: top_k={top_k!r}")
    target = as_output("path", path)
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir():  # no image or model
        raise ValueError(
            "path must be a file, and no folder, whose name ends in .html or .htm. "
            f"Received: path={os.fspath(path)!r}"
        )
    source = open_image(image, model.config)
    if title is None:
        named = isinstance(image, str | os.PathLike)
        title = os.path.basename(os.fspath(image)) if named else "What the model sees"
    content = _filled({"title": title, **report_data(model, source, top_k)})
    with atomic_path(target) as temporary:
        temporary.write_text(content, encoding="utf-8", newline="\n")
    return target


def report_data(model: ViT, source: SourceImage, top_k: int = 5) -> dict[str, Any]:
    """The page's data, to be written as JSON; None for what does not apply to the model."""
    config, images = model.config, source.images
    classes = _best_classes(model, images, top_k)
    has_positions = config.position_table is not None
    return {
        "model": _facts(model),
        "image": encoded_image(source),
        "grid": config.grid,
        "prefix": config.num_prefix_tokens,
        "classToken": config.class_token,
        "distillationToken": config.distillation_token,
        "pooling": config.pooling,
        "prediction": classes,
        "attention": _attention(model, images),
        "rollout": encoded_map("rollout_map", attention.rollout_map(model, images)[0]),
        "poolingMap": _pooling(model, images),
        "gradients": None if classes is None else _gradients(model, images, classes),
        "distance": _table("attention_distance", attention.attention_distance(model, images)),
        "entropy": _table("attention_entropy", attention.attention_entropy(model, images)),
        "mostEntropy": math.log(config.num_tokens),
        "positions": _positions(model) if has_positions else None,
        "filters": _filters(model),
        "features": _features(model, images),
    }


def _facts(model: ViT) -> str:
    config = model.config
    height, width, channels = config.input_shape
    return (
        f"{height} × {width} × {channels} pixels in patches of {config.patch_size[0]} × "
        f"{config.patch_size[1]}, width {config.width}, {config.depth} layers of "
        f"{config.num_heads} heads, {model.count_params() / 1e6:,.3g} M parameters"
    )


def encoded_image(source: SourceImage) -> dict[str, Any]:
    """The image as a data URI, and the part that the model sees, relative to its size."""
    from PIL import Image

    width, height = source.size
    image = Image.fromarray(source.pixels)
    small = max(width, height) <= SMALL
    if not small:
        image.thumbnail((LONGEST, LONGEST))
    left, right, top, bottom = source.seen
    seen = [left / width, top / height, (right - left) / width, (bottom - top) / height]
    return {
        "source": _data_uri(image, "PNG" if small else "JPEG"),
        "size": [width, height],
        "shown": list(image.size),
        "small": small,
        "seen": seen,
    }


def _best_classes(model: ViT, images: np.ndarray, top_k: int) -> list[dict[str, Any]] | None:
    """The top classes and their scores; None for a model without class scores."""
    config = model.config
    if not config.num_classes or config.pooling is None:
        return None
    scores = tokens.as_numpy(ops.cast(model(images, training=False), "float32"))
    scores = _finite("scores", scores)
    if config.classifier_activation in (None, "linear"):
        scores = probabilities_of(scores, probability_function(config))
    row = scores[0]
    labels = config.labels or [str(i) for i in range(config.num_classes)]
    best = np.argsort(-row, kind="stable")[:top_k].tolist()
    return [{"class": i, "label": labels[i], "score": float(row[i])} for i in best]


def _attention(model: ViT, images: np.ndarray) -> dict[str, Any]:
    """Attention to patches: of every token, or of one query if that is too much data."""
    config = model.config
    rows = config.depth * config.num_heads * config.num_patches
    whole = rows * config.num_tokens <= MOST_ATTENTION
    if whole:
        drawn = attention.attention_maps(model, images)[:, 0, ..., config.num_prefix_tokens :]
    else:
        drawn = attention.class_token_maps(model, images)[:, 0]
        drawn = drawn.reshape(*drawn.shape[:2], 1, -1)
    drawn = _finite("attention", drawn)  # (L, h, T or 1, N)
    peaks = drawn.max(-1)
    return {
        "layers": config.depth,
        "heads": config.num_heads,
        "queries": drawn.shape[2],
        "whole": whole,
        "limit": MOST_ATTENTION >> 20,
        "levels": _bytes(_levels(drawn, peaks[..., None])),
        "peaks": _bytes(peaks.astype("<f4")),
        "sums": _bytes(drawn.sum(-1).astype("<f4")),
    }


def _pooling(model: ViT, images: np.ndarray) -> dict[str, Any] | None:
    """The mean over heads of the attention of attention pooling; None without it."""
    if not model.config.attention_pooling:
        return None
    return encoded_map("pooling_map", attention.pooling_map(model, images)[0].mean(0))


def _gradients(
    model: ViT, images: np.ndarray, classes: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """A map per method and class."""
    numbers = [found["class"] for found in classes]
    repeated = np.repeat(images, len(numbers), axis=0)
    return {
        name: [encoded_map(name, one) for one in function(model, repeated, numbers)]
        for name, function in (
            ("gradCam", gradients.grad_cam),
            ("attentionGradient", gradients.attention_gradient),
        )
    }


def _positions(model: ViT) -> dict[str, Any]:
    """Similarities of a subsampled grid of positions with all positions."""
    similarity = embeddings.position_similarity(model)
    rows, columns = (
        np.arange(0, size, -(-size // MOST_CELLS)).tolist() for size in similarity.shape[:2]
    )
    some = _finite("position_similarity", similarity[rows][:, columns])
    low = float(some.min())
    return {
        "rows": rows,
        "columns": columns,
        "low": low,
        "levels": _bytes(_levels(some - low, 1 - low)),
    }


def _filters(model: ViT) -> dict[str, Any] | None:
    """The filters as RGB; None unless they have one or three channels."""
    if model.config.in_channels not in (1, 3):
        return None
    filters = _finite("patch_filters", embeddings.patch_filters(model, FILTERS))
    colors = np.broadcast_to(filters, (*filters.shape[:3], 3))
    return {
        "count": len(filters),
        "size": list(filters.shape[1:3]),
        "levels": _bytes(_levels(colors, 1.0)),
    }


def _features(model: ViT, images: np.ndarray) -> dict[str, Any]:
    """The patch tokens as colors, and their similarities unless these are too many."""
    config = model.config
    colors = similarity = None
    if min(config.width, config.num_patches) >= 3:  # as many components
        colors = _bytes(_levels(_finite("patch_pca", embeddings.patch_pca(model, images)), 1.0))
    if config.num_patches**2 <= MOST_SIMILARITIES:
        cosines = _finite("region_similarity", embeddings.region_similarity(model, images))
        similarity = _bytes(_levels(np.maximum(cosines, 0), 1.0))
    return {"colors": colors, "similarity": similarity}


# -- numbers for JSON


def encoded_map(name: str, values: np.ndarray) -> dict[str, Any]:
    """A map for a page: its largest value, and bytes from 0 to 255 in base64."""
    peak = float(_finite(name, values).max())
    return {"peak": peak, "levels": _bytes(_levels(values, peak))}


def _levels(values: np.ndarray, high: Any) -> np.ndarray:
    """Values in [0, high] as 0 to 255."""
    scaled = values * (255 / np.where(np.asarray(high) > 0, high, 1))
    return np.clip(np.round(scaled), 0, 255).astype("uint8")


def _table(name: str, values: np.ndarray) -> list[list[float]]:
    return [[round(float(v), 4) for v in row] for row in _finite(name, values)]


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise ValueError(f"model must give finite {name}. Received: NaN or infinite ones")
    return values


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


def _data_uri(image: Any, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=88)
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/{kind.lower()};base64,{content}"


def page_style(folder: Path) -> str:
    """The style that all pages share, then that of the page in a folder."""
    parts = (PAGE / "theme.css", folder / "style.css")
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def _filled(data: dict[str, Any]) -> str:
    """The page with its style, script and data."""
    title = data["title"].encode("utf-8", "replace").decode("utf-8")
    # HTML does not unescape script elements, and "</script>" or "<!--" would end one.
    text = json.dumps(data, allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    parts = {
        "title": html.escape(title),
        "style": page_style(PAGE),
        "script": (PAGE / "script.js").read_text(encoding="utf-8"),
        "data": text,
    }
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)

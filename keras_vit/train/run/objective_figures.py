"""What a ViT has learned without labels, as pictures of its run's report."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import keras_vit
from keras_vit.config import ViTConfig
from keras_vit.explain.panels import Sheet, SourceImage
from keras_vit.train.data.batching import test_batches
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import Split, subset
from keras_vit.train.few_shot import feature_model
from keras_vit.train.knn import nearest_neighbors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = 8
"""Test pictures that are looked at."""
NEIGHBORS = 7
GALLERY = 2000
"""Training pictures among which neighbors are looked for."""
BATCH = 50


def draw(
    objective: keras.Model, model: keras_vit.ViT, source: Source, folder: str | Path
) -> list[str]:
    """Draws reconstructions, if the objective makes them, and neighbors into a run folder.

    Args:
        objective: The trained objective.
        model: The trained ViT, without a head.
        source: The data.
        folder: Where the pictures go.

    Returns:
        Lines of Markdown that show them.
    """
    test, train = subset(source.test, PICTURES), subset(source.train, GALLERY)
    lines = ["", "## What it learned", ""]
    if hasattr(objective, "reconstruct"):
        figure = draw_reconstructions(objective, np.concatenate([*_images(test, model.config)]))
        text = "Test pictures, the patches that the model saw, and what it made of the others"
        lines += _shown(figure, folder, "reconstructions", text)
    if len(model.output_shape) == 2:
        figure = draw_neighbors(model, test, train, source.labels)
        text = (
            "Test pictures and, beside each one, the training pictures whose features are nearest, "
            "with the cosine of the two"
        )
        lines += _shown(figure, folder, "neighbors", text)
    return lines[:-1]


def draw_reconstructions(objective: Any, images: np.ndarray) -> "Figure":
    """Rows of originals, what the ViT saw of them, and their reconstructions.

    Args:
        objective: A masked objective that predicts pixels.
        images: `(B, H, W, C)`, preprocessed.
    """
    rows = objective.reconstruct(images)
    names = ["picture", "seen", "reconstruction"]
    size = images.shape[2], images.shape[1]
    sheet = Sheet(
        3, len(images), size, "Reconstructions", labeled=False, named=(names, []), bar=False
    )
    for i, row in enumerate(rows):
        for j, pixels in enumerate(row):
            sheet.draw(i, j, _panel(pixels))
    return sheet.figure


def draw_neighbors(
    model: keras_vit.ViT, queries: Split, gallery: Split, labels: Any = None
) -> "Figure":
    """Rows of a picture and the pictures of a gallery whose features are nearest to it."""
    backbone, config = feature_model(model), model.config
    features = [
        np.concatenate([_features(backbone, images) for images in _images(split, config)])
        for split in (gallery, queries)
    ]
    indices, cosines = nearest_neighbors(features[0], features[1], NEIGHBORS)
    rows = [[_panel(_unit(one, config))] for images in _images(queries, config) for one in images]
    found = _pick(gallery, set(indices.ravel().tolist()), config)
    classes = [_labels(split) for split in (queries, gallery)] if labels else None
    size = config.image_size[1], config.image_size[0]
    sheet = Sheet(len(rows), 1 + indices.shape[1], size, "Nearest features", bar=False)
    for i, ((picture,), near) in enumerate(zip(rows, indices.tolist(), strict=True)):
        sheet.draw(i, 0, picture, label=labels[classes[0][i]] if classes else "test")
        for j, number in enumerate(near):
            text = f"{labels[classes[1][number]]} " if classes else ""
            sheet.draw(i, 1 + j, found[number], label=f"{text}{cosines[i, j]:.3f}")
    return sheet.figure


def _shown(figure: "Figure", folder: str | Path, name: str, text: str) -> list[str]:
    figure.savefig(Path(folder, f"{name}.png"), dpi=110)
    return [f"![{text}]({name}.png)", "", f"{text}.", ""]


def _images(split: Split, config: ViTConfig) -> Iterator[np.ndarray]:
    """Batches of a split, preprocessed."""
    for images, _ in test_batches(split, config, BATCH, 1).as_numpy_iterator():
        yield images


def _features(backbone: keras.Model, images: np.ndarray) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(backbone.predict_on_batch(images)), "float32")


def _labels(split: Split) -> list[int]:
    return [int(example["label"]) for example in split.ordered().as_numpy_iterator()]


def _pick(split: Split, numbers: set[int], config: ViTConfig) -> dict[int, SourceImage]:
    """Some pictures of a split by their numbers. Not all fit in memory."""
    found, first = {}, 0
    for images in _images(split, config):
        for number, image in enumerate(images, first):
            if number in numbers:
                found[number] = _panel(_unit(image, config))
        first += len(images)
    return found


def _unit(image: np.ndarray, config: ViTConfig) -> np.ndarray:
    """Preprocessed pixels, back in [0, 1]."""
    return image * np.asarray(config.pixel_std) + np.asarray(config.pixel_mean)


def _panel(pixels: np.ndarray) -> SourceImage:
    """Pixels in [0, 1] `(H, W, C)` as a picture to draw; other than three channels as gray."""
    if pixels.shape[-1] != 3:
        pixels = pixels.mean(-1, keepdims=True).repeat(3, -1)
    drawn = np.clip(np.round(255 * pixels), 0, 255).astype("uint8")
    height, width = drawn.shape[:2]
    return SourceImage(drawn, pixels[None], (0, width, 0, height))

"""A gallery of augmented training images, before a run starts."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import ViTConfig
from keras_vit.atomic import atomic_path
from keras_vit.paths import as_output
from keras_vit.train.build import build_model
from keras_vit.train.data.sources import open_source
from keras_vit.train.recipe import Recipe
from keras_vit.train.recipe_files import resolve_recipe
from keras_vit.train.run_batches import first_batch

COLUMNS = 6
LEAST = 0.005
"""Share of a class below which a title leaves it out."""


def preview(
    recipe: Recipe | str | os.PathLike,
    path: str | os.PathLike,
    *,
    overrides: Iterable[str] = (),
    data: str | os.PathLike | None = None,
    images: int = 24,
) -> Path:
    """Draws the first training images of a run, as the model will see them, with their labels.

    The images are those of the first step, bit for bit. Mixed ones have the shares of their
    classes. Of an objective that is trained on views, each view is a picture.

    Args:
        recipe: A `Recipe`, the name of one of `list_recipes`, or the path of a recipe file.
        path: The picture to write; a .png, or what else Matplotlib writes.
        overrides: Changes to the recipe's fields, such as "augment.flip=true".
        data: Path of the data; the same as an override of data.path.
        images: How many images are drawn, at most those of a batch.

    Returns:
        The path.

    Example:

    >>> keras_vit.train.preview("digits", "digits.png")
    """
    if images < 1:
        raise ValueError(f"images must be at least 1. Received: images={images}")
    path = as_output("path", path)
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".pdf", ".svg"):
        raise ValueError(
            f"path must end in .png, .jpg, .pdf or .svg. Received: path={os.fspath(path)!r}"
        )
    recipe = resolve_recipe(recipe, overrides, data)
    source = open_source(recipe.data, needs_labels=recipe.objective.needs_labels)
    config = build_model(recipe, source).config
    inputs, targets = first_batch(recipe, source, config)
    titles = [_title(target, source.labels) for target in targets]
    pictures, titles = _pictures(inputs, titles)
    figure = _gallery(_pixels(pictures[:images], config), titles[:images])
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=100)
    return path


def _title(target: np.ndarray, labels: Any) -> str:
    """The class of an image, or the shares of several."""
    found = [k for k in np.argsort(-target, kind="stable").tolist() if target[k] > LEAST]
    names = [labels[k] if labels else str(k) for k in found]
    if len(found) < 2:
        return "".join(names)
    return ", ".join(f"{name} ({target[k]:.0%})" for k, name in zip(found, names, strict=True))


def _pictures(inputs: Any, titles: list[str]) -> tuple[np.ndarray, list[str]]:
    """Images of one size and a title for each. Smaller views are enlarged."""
    if not isinstance(inputs, dict):
        return inputs, titles
    height, width = inputs["global"].shape[2:4]
    rows, names = [], []
    for number, title in enumerate(titles):
        for kind, views in inputs.items():
            for view in views[number]:
                down = np.arange(height) * view.shape[0] // height
                right = np.arange(width) * view.shape[1] // width
                rows.append(view[down][:, right])
                names.append(f"{title} ({kind})".strip())
    return np.stack(rows), names


def _pixels(images: np.ndarray, config: ViTConfig) -> np.ndarray:
    """Preprocessed images as pixels from 0 to 255, `(B, H, W, 3)`."""
    pixels = 255 * (images * np.asarray(config.pixel_std) + np.asarray(config.pixel_mean))
    if pixels.shape[-1] != 3:
        pixels = pixels.mean(-1, keepdims=True).repeat(3, -1)
    return np.clip(np.round(pixels), 0, 255).astype("float32")


def _gallery(images: np.ndarray, titles: list[str]) -> Any:
    import matplotlib.pyplot as plt
    from keras_cv.visualization import plot_image_gallery

    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    blank = np.full((rows * columns - len(images), *images.shape[1:]), 255, "float32")
    figure = plot_image_gallery(
        np.concatenate([images, blank]), value_range=(0, 255), rows=rows, cols=columns
    )
    plt.close(figure)  # it is drawn, but not shown
    for axis, title in zip(figure.axes, titles, strict=False):
        axis.set_title(title, fontsize=8)
    return figure

"""A tiny ViT as a SavedModel with the signatures of an export, and pictures to ask it about."""

import io
from pathlib import Path

import keras
import numpy as np
from PIL import Image

import keras_vit
from keras_vit.export.saved_model.export import export_saved_model

LABELS = ("cat", "dog", "élan")
CONFIG = keras_vit.ViTConfig(
    image_size=(24, 16),
    patch_size=8,
    width=20,
    depth=2,
    num_heads=5,
    mlp_dim=28,
    num_classes=3,
    labels=LABELS,
)


def model(seed: int = 0) -> keras.Model:
    """A model with every array random, so that no two pictures give the same."""
    vit = keras_vit.ViT(CONFIG)
    rng = np.random.default_rng(seed)
    for weight in vit.weights:
        if weight.dtype == "float32":
            weight.assign(rng.normal(0, 0.4, weight.shape))
    return vit


def images(count: int, seed: int = 1) -> np.ndarray:
    """Pixels as the model takes them."""
    return np.random.default_rng(seed).normal(size=(count, *CONFIG.input_shape)).astype("float32")


def picture(seed: int, kind: str = "JPEG", size: tuple[int, int] = (31, 45)) -> bytes:
    """An encoded picture (height, width)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BOX).save(file, kind)
    return file.getvalue()


def export(folder: Path) -> None:
    """Writes version 1 of the model into a folder."""
    export_saved_model(model(), folder)

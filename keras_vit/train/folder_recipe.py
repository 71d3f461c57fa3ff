"""What the recipe "folder" chooses for a folder of images, from how many there are.

Fine-tuning needs few steps, and fewer passes over more images: the ViT paper takes 500 steps for a
thousand images and 10,000 for fifty thousand, in batches of 512. The choices below are ours, for
batches of 32. Any of them is changed by `--set`.
"""

import dataclasses
import difflib
import os
from pathlib import Path

from keras_vit.train.recipe import Augment, Data, Model, Optimizer, Recipe, Run, Schedule

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
TRAIN, TEST = ("train", "training"), ("test", "val", "valid", "validation")
"""Names of sub-folders, the first that exists."""
SHARE = 90
"""Percent of the images for training if there is no sub-folder for tests."""
EPOCHS = ((500, 40), (2_000, 20), (10_000, 10), (100_000, 5))
"""Up to how many images -> epochs; 3 for more."""
LARGE = 20_000
"""Images from which B/16 is chosen: S/16 trains three times as fast."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is in a folder of images."""

    data: Data
    images: int
    """Training images."""
    classes: int


def survey(path: str | os.PathLike) -> Survey:
    """Counts the training images of a folder by their names, without opening one.

    The classes are sub-folders of "train" (and of "test", "val", "valid" or "validation"), or of
    the folder itself, which is then split by 90 to 10.

    Args:
        path: The folder.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        beside = [p.name for p in root.parent.iterdir()] if root.parent.is_dir() else []
        near = difflib.get_close_matches(root.name, beside, n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"data.path must be a folder{hint}. Received: data.path={str(path)!r}")
    train, test = (
        next((name for name in names if (root / name).is_dir()), None) for names in (TRAIN, TEST)
    )
    share = 1.0
    if train is None:
        train, test, share = f".[:{SHARE}%]", f".[{SHARE}%:]", SHARE / 100
    elif test is None:
        train, test, share = f"{train}[:{SHARE}%]", f"{train}[{SHARE}%:]", SHARE / 100
    folder = root / train.partition("[")[0]
    classes = [p for p in folder.iterdir() if p.is_dir() and p.name[0] != "."]
    images = sum(
        name.lower().endswith(SUFFIXES) and name[0] != "."
        for label in classes or [folder]  # images without labels
        for _, _, files in os.walk(label)
        for name in files
    )
    return Survey(Data("folder", os.fspath(path), train, test), round(images * share), len(classes))


def recipe_for(found: Survey) -> Recipe:
    """The recipe for a folder: model, epochs and augmentation by its number of images.

    Args:
        found: What `survey` returned.
    """
    images = max(found.images, 1)
    epochs = next((epochs for most, epochs in EPOCHS if images <= most), 3)
    batch = min(32, images)
    augment = Augment(crop="inception", crop_area=(0.3, 1.0), flip=True)
    if images <= 2_000:  # seen often: more augmentation, and less is cut off
        augment = dataclasses.replace(
            augment, crop_area=(0.5, 1.0), rand_augment_layers=2, rand_augment_magnitude=9
        )
    return Recipe(
        name="folder",
        data=found.data,
        model=Model(
            "vit_b16" if images >= LARGE else "vit_s16",
            weights="augreg_in21k",
            config={"drop_path": 0.1},
        ),
        run=Run(batch_size=batch, epochs=epochs),
        optimizer=Optimizer(
            "adamw", learning_rate=1e-4, weight_decay=0.05, global_clipnorm=1.0, layer_decay=0.75
        ),
        schedule=Schedule(warmup_steps=images // batch // 2),  # half an epoch, of any number
        augment=augment,
    )


def choices(recipe: Recipe) -> str:
    """What was chosen, and how to choose otherwise, for a terminal."""
    model, augment, data = recipe.model, recipe.augment, recipe.data
    start = f"from {model.weights}" if model.weights else "from random weights"
    parts = [f"{augment.crop} crop"] * (augment.crop != "none")
    parts += ["mirroring"] * augment.flip
    if augment.rand_augment_layers:
        strength = augment.rand_augment_layers, augment.rand_augment_magnitude
        parts.append(f"RandAugment{strength}")
    run = recipe.run
    length = f"{run.epochs:g} epochs" if run.epochs else f"{run.steps:,} steps"
    return "\n".join(
        [
            f"model         {model.variant or 'of model.config'} {start}  "
            "(--set model.variant=vit_ti16, model.weights=FILE, model.method=linear_probe)",
            f"length        {length} in batches of {run.batch_size}  (--set run.epochs=5)",
            f"augmentation  {', '.join(parts) or 'none'}  (--set augment.flip=false)",
            f"test images   {data.test} of the folder  (--set data.test=...)",
        ]
    )

"""The recipes by name: one file each, with the paper, the command and the number to reach."""

import difflib
import importlib

from training.recipe import Recipe

NAMES = (
    "digits",
    "fashion_mnist",
    "cifar10_scratch",
    "cifar10_scratch_long",
    "cifar10_finetune",
    "cifar100_finetune",
    "flowers_finetune",
    "imagenet1k_vit_s16",
    "imagenet1k_deit_s16",
    "imagenet1k_deit3_b16",
    "augreg_vit_b16",
    "folder",
)


def load(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=3) or NAMES
        raise ValueError(f"recipe must be one of ours; near: {', '.join(near)}. Received: {name!r}")
    return getattr(importlib.import_module(f"training.recipes.{name}"), name)()

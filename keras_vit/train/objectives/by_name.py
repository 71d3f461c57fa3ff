"""The objectives by the names that recipes use, and what a recipe can set of each."""

import importlib
import inspect
import typing
from collections.abc import Mapping
from typing import Any

CLASSES = {
    "masked_patches": "MaskedPatchPrediction",
    "mae": "MAE",
    "simmim": "SimMIM",
    "dino": "DINO",
    "distillation": "Distillation",
}
"""Name of an objective -> its class in `keras_vit.train`."""
NO_OPTIONS = {
    *("self", "vit", "name", "kwargs"),
    *("image", "config"),  # of views
    *("seed", "steps", "teacher", "label_smoothing"),  # they are other fields of the recipe
    *("teacher_preprocessing", "features", "feature_weights"),  # they are Python objects
}


def objective_class(name: str) -> Any:
    """The class of an objective."""
    return getattr(importlib.import_module("keras_vit.train"), CLASSES[name])


def option_types(name: str) -> dict[str, Any]:
    """The arguments of an objective that a recipe can set, and their types."""
    kinds = _arguments(objective_class(name).__init__)
    return kinds | _arguments(_views()) if name == "dino" else kinds


def split_options(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of an objective's class, and those of its views. DINO shares `local_size`."""
    own = _arguments(objective_class(name).__init__)
    views = _arguments(_views()) if name == "dino" else {}
    own, views = ({k: v for k, v in options.items() if k in part} for part in (own, views))
    return own, views


def _views() -> Any:
    from keras_vit.train.augment.multi_crop import multi_crop

    return multi_crop


def _arguments(function: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    return {
        argument: hints.get(argument, Any)
        for argument in inspect.signature(function).parameters
        if argument not in NO_OPTIONS
    }

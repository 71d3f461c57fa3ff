"""Checks of the arguments that the exports share, made before any work is done."""

from collections.abc import Iterable, Sequence
from typing import Any

from keras_vit.config import ViTConfig

IMAGES = ("float32", "uint8")
"""What an export's `images` are: what the model takes, or pixels, which are normalized inside."""


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises `ValueError` for an argument that is not among the allowed values."""
    if value not in allowed:
        known = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}")


def check_count(name: str, value: Any) -> None:
    """Raises `ValueError` for an argument that is not a positive int."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int. Received: {name}={value!r}")


def check_bound(bound: Any) -> None:
    """Raises `ValueError` for a bound that is neither None nor a positive number."""
    number = isinstance(bound, float | int) and not isinstance(bound, bool)
    if bound is not None and not (number and bound > 0):
        raise ValueError(f"bound must be a number greater than 0. Received: bound={bound!r}")


def class_names(config: ViTConfig, labels: Sequence[str] | None) -> list[str] | None:
    """The names of the classes: those given, else the config's, else None."""
    labels = config.labels if labels is None else labels
    if labels is None:
        return None
    if isinstance(labels, str) or not isinstance(
        labels, Iterable
    ):  # a string is an iterable of its letters
        raise ValueError(f"labels must be a sequence of names. Received: labels={labels!r}")
    names = list(labels)
    if len(names) != config.num_classes:
        raise ValueError(
            f"labels must be num_classes={config.num_classes} names. Received: {len(names)} names"
        )
    for label in names:  # each is a line of a file
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise ValueError(f"labels must be printable names. Received: {label!r}")
    return names

"""Paths that a caller passes: what is one, where one can be written, and the errors."""

import os
from pathlib import Path
from typing import Any


def is_path(value: Any) -> bool:
    """Whether `value` is a string or an `os.PathLike` of one, and not empty."""
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    return isinstance(text, str) and text != ""


def as_path(name: str, value: Any) -> Path:
    """`value` as a path, or a `ValueError` that names the argument.

    Args:
        name: The argument.
        value: What was passed for it.
    """
    if not is_path(value):
        raise ValueError(
            f"{name} must be a path: a str or an os.PathLike. Received: {name}={value!r}"
        )
    return Path(value)


def check_above(name: str, path: str | os.PathLike) -> None:
    """Raises `ValueError` where a path to write leads through a file.

    Args:
        name: The argument.
        path: The path.
    """
    above = next(folder for folder in Path(os.path.abspath(path)).parents if folder.exists())
    if not above.is_dir():
        raise ValueError(
            f"{name} must be in a folder, and {above} is a file. "
            f"Received: {name}={os.fspath(path)!r}"
        )

"""Checks of the paths that a caller passes."""

import os
import re
from pathlib import Path
from typing import Any

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")
"""The start of a URL. In a `Path` one of its slashes is gone; a drive has one letter."""


def is_path(value: Any) -> bool:
    """Whether `value` is a non-empty `str`, or an `os.PathLike` of one."""
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    return isinstance(text, str) and text != ""


def as_path(name: str, value: Any) -> Path:
    """Converts the argument `name` to a path; raises `ValueError` if it is not one."""
    if not is_path(value):
        raise ValueError(
            f"{name} must be a path: a str or an os.PathLike. Received: {name}={value!r}"
        )
    return Path(value)


def as_output(name: str, value: Any) -> Path:
    """Converts the argument `name`, which is to be written, to a path; raises if it is a URL.

    Without this check, "gs://bucket/x" would become folders of these names in the current one.
    """
    path = as_path(name, value)
    if URL.match(os.fspath(value)):
        raise ValueError(
            f"{name} must be a path on this machine and not a URL: write to a local folder, then "
            f"copy it. Received: {name}={os.fspath(value)!r}"
        )
    return path


def check_above(name: str, path: str | os.PathLike) -> None:
    """Raises `ValueError` if a parent folder of the argument `name` is a file."""
    above = next(folder for folder in Path(os.path.abspath(path)).parents if folder.exists())
    if not above.is_dir():
        raise ValueError(
            f"{name} must be in a folder, and {above} is a file. "
            f"Received: {name}={os.fspath(path)!r}"
        )

"""Facts about an export, as JSON can hold them."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any


def package_versions(*packages: str) -> dict[str, str]:
    """The versions of keras_vit, of Keras and of the packages that made an export."""
    names = ("keras_vit", "keras", *packages)
    return {name: importlib.import_module(name).__version__ for name in names}


def as_json(value: Any) -> dict[str, Any]:
    """A dataclass as a dict that JSON can hold."""
    return {
        key: str(item) if isinstance(item, Path) else item
        for key, item in dataclasses.asdict(value).items()
    }

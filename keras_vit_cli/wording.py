"""The library's errors in the words of the command: its options instead of Python's arguments."""

import re
from collections.abc import Mapping
from typing import Any


def options_of(command: Any) -> dict[str, str]:
    """The name of each option of a command, by the name of its Python argument."""
    return {
        param.name: next(name for name in param.opts if name.startswith("--"))
        for param in command.params
        if any(name.startswith("--") for name in param.opts)
    }


def in_options(text: str, options: Mapping[str, str]) -> str:
    """An error with `name must ...`, `name=value` and `name be True` as options.

    Args:
        text: The error.
        options: What `options_of` returned.
    """
    for name, option in options.items():
        text = re.sub(rf"^{name} must\b", f"{option} must", text)
        text = re.sub(rf"\bor {name} be True", f"or {option} be given", text)
        text = re.sub(rf"(?<=Received: ){name}=", f"{option} ", text)
    return text

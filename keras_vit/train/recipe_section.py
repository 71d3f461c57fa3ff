"""What every section of a recipe checks when it is made, in Python or from JSON."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal


class Section:
    """A part of a recipe. A name or a number that nothing knows must not train something else."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Least and largest value of a field, by its name."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be greater than 0."""

    def __post_init__(self):
        section = type(self).__name__.lower()
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            kind, value = hints[field.name], getattr(self, field.name)
            if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
                names = ", ".join(map(repr, typing.get_args(kind)))
                raise ValueError(
                    f"{section}.{field.name} must be one of {names}. "
                    f"Received: {section}.{field.name}={value!r}"
                )
        rules = {name: _range_rule(*ends) for name, ends in self.ranges.items()}
        rules |= {name: (lambda v: v > 0, "greater than 0") for name in self.positive}
        for name, (holds, rule) in rules.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(
                    f"{section}.{name} must be {rule}. Received: {section}.{name}={value}"
                )


def _range_rule(least: float, most: float) -> tuple[Callable[[Any], bool], str]:
    text = f"at least {least}" if most == math.inf else f"from {least} to {most}"
    return lambda value: least <= value <= most, text

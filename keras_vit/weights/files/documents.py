"""Reads JSON documents that others may have written, and checks them against a declared shape.

A shape says what each field must be:

    {"epoch": COUNT, "config": OBJECT, "pixels": {"mean": NUMBERS}, "format": stated(INT)}

A shape within a shape is that of an object, or of null. Fields without a rule may hold anything.
Every error names the file and the field.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from keras_vit.weights.files.rules import refusal, refused_as

MAX_JSON = 16 << 20
"""Bytes of a document; 21,843 labels take 2 MiB."""
MAX_COUNT = 1 << 40
"""Above any number of steps, and of seconds since 1970."""


class Rule(NamedTuple):
    """What a field must be, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]
    or_null: bool = True
    """Whether null counts as a field that is not stated."""
    needed: bool = False
    """Whether the field must be there."""
    inside: "Mapping[str, Any]" = MappingProxyType({})
    """The shape of an object's own fields."""


Shape = Mapping[str, "Rule | Shape"]


def is_finite(value: Any) -> bool:
    """Whether a value is a number of a sane size."""
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Whether a value is an int from 0 on, of a sane size."""
    return type(value) is int and 0 <= value < MAX_COUNT


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be written; JSON can hold halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def each(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The test for a list of values that each pass a test."""
    return lambda value: isinstance(value, list) and all(map(holds, value))


TEXT = Rule("a string", is_text)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
OBJECTS = Rule("a list of objects", each(lambda value: isinstance(value, dict)))
NAMES = Rule("a list of strings", each(is_text))
NUMBER = Rule("a finite number", is_finite)
NUMBERS = Rule("a list of finite numbers", each(is_finite))
INT = Rule("an int", lambda value: type(value) is int)
COUNT = Rule("an int of at least 0", is_count)


def stated(rule: Rule, inside: Shape | None = None) -> Rule:
    """The rule for a field that must be there and not null; `inside` is the shape of an object."""
    return rule._replace(or_null=False, needed=True, inside=inside or {})


def not_null(shape: Shape) -> Rule:
    """The rule for an object that may be missing, but not null."""
    return OBJECT._replace(or_null=False, inside=shape)


def one_of(*choices: Any) -> Rule:
    """The rule for a field that takes one of a few values."""
    listed = ", ".join(map(repr, choices))
    return Rule(
        f"one of {listed}",
        lambda value: any(type(value) is type(c) and value == c for c in choices),
        or_null=None in choices,
    )


def read_document(
    path: str | os.PathLike, shape: Shape | None = None, most: int = MAX_JSON
) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes, checked against a shape.

    Raises:
        FileNotFoundError: There is no file.
        Refused: It is too large, no JSON object, or a field breaks its rule.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise refusal(path, "be a regular file")
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise refusal(path, f"be a file of at most {most} bytes", bytes=size)
        return parse_document(path, file.read(), shape)


def parse_document(
    path: str | os.PathLike, data: bytes, shape: Shape | None = None
) -> dict[str, Any]:
    """The JSON object in `data`, which is from a file, checked against a shape.

    Refuses a name that occurs twice (S3).
    """
    rule = "hold one JSON object with each name once"
    with refused_as(path, rule, (ValueError, RecursionError)):
        found = json.loads(data.decode(), object_pairs_hook=_unique)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    check_fields(path, found, shape or {})
    return found


def check_fields(
    path: str | os.PathLike, content: Mapping[str, Any], shape: Shape, above: str = ""
) -> None:
    """Raises `Refused` if a field that a shape names breaks its rule.

    Args:
        path: The file that holds the object.
        content: The object.
        shape: What its fields must be.
        above: The field that holds the object, with a dot.
    """
    for name, rule in shape.items():
        field, value = above + name, content.get(name)
        own = rule if isinstance(rule, Rule) else OBJECT._replace(inside=rule)
        if name not in content:
            if own.needed:
                fields = [f"{above}{key}" for key in content]
                raise refusal(path, f"state {field} as {own.text}", fields=fields)
            continue
        if value is None and own.or_null:
            continue
        if not own.holds(value):
            raise refusal(path, f"state {field} as {own.text}", **{field: value})
        if own.inside:
            check_fields(path, value or {}, own.inside, f"{field}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:200]!r} occurs twice")
        found[name] = value
    return found

"""What the JSON files beside weights may state: types and sizes, checked when a file is read.

Somebody else wrote these files, so a known name may hold anything. Each field that a format reads
is checked here once, so that an error names the file and the field. Which values fit each other is
for the formats and for `ViTConfig`.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit.config import MAX_SIZE, ViTConfig
from keras_vit.weights.files.rules import Refused, refusal


class Rule(NamedTuple):
    """What a field may hold, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]
    or_null: bool = True


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _all(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


TEXT = Rule("a string", lambda value: isinstance(value, str))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
SIZE = Rule(f"an int from 1 to {MAX_SIZE}", _is_size)
PAIR = Rule(
    f"an int from 1 to {MAX_SIZE} or two of them",
    lambda value: _is_size(value) or (_all(_is_size)(value) and len(value) == 2),
)
SIZES = Rule(f"three ints from 1 to {MAX_SIZE}", lambda v: _all(_is_size)(v) and len(v) == 3)
NUMBER = Rule("a finite number", _is_number)
NUMBERS = Rule("a list of finite numbers", _all(_is_number))
CODE = Rule("an int", lambda value: type(value) is int)

PIXELS = {"input_size": SIZES, "mean": NUMBERS, "std": NUMBERS, "crop_pct": NUMBER}
FIELDS = {
    # transformers: config.json and preprocessor_config.json
    "num_attention_heads": SIZE,
    "image_size": PAIR,
    "layer_norm_eps": NUMBER._replace(or_null=False),
    "layerscale_value": NUMBER,
    "hidden_act": TEXT,
    "image_mean": NUMBERS,
    "image_std": NUMBERS,
    "resample": CODE,
    # timm
    "architecture": TEXT,
    "model_args": OBJECT,
    "pretrained_cfg": OBJECT,
    **PIXELS,  # files written before 2023 have them at the top
}
INSIDE = {
    "model_args": {"num_heads": SIZE, "img_size": PAIR, "init_values": NUMBER},
    "pretrained_cfg": PIXELS,
}


def check(path: Path, content: Mapping[str, Any]) -> None:
    """Raises `Refused` where a file states a known field in another type or size.

    Args:
        path: The JSON file.
        content: The object in it.
    """
    _check(path, content, FIELDS)
    for name, fields in INSIDE.items():
        _check(path, content.get(name) or {}, fields, f"{name}.")


def _check(path: Path, content: Mapping[str, Any], rules: Mapping[str, Rule], above="") -> None:
    for name, rule in rules.items():
        if name not in content or (content[name] is None and rule.or_null):
            continue
        if not rule.holds(content[name]):
            field = above + name
            raise refusal(path, f"state {field} as {rule.text}", **{field: content[name]})


def vit_config(path: str | os.PathLike, fields: Any) -> ViTConfig:
    """The `ViTConfig` that a file of ours states, or an error that names the file and the field."""
    if not isinstance(fields, Mapping):
        raise refusal(path, "state its config as an object", config=fields)
    try:
        return ViTConfig.from_dict(fields)
    except ValueError as error:
        raise Refused(f"{error}, as {os.fspath(path)!r} states") from error

"""Reads the JSON in or beside weights, and checks the type and size of each field that is used.

Others wrote these files, so a known name may hold anything. Errors name the file and the field. The
formats and `ViTConfig` check which values fit together.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit.config import ViTConfig
from keras_vit.config_rules import MAX_SIZE
from keras_vit.weights.files.rules import Refused, parse_object, refusal

CONFIG = "config.json"
METADATA = "keras_vit"
"""The name of our config in the metadata of a safetensors file."""
MAX_JSON = 16 << 20
"""Bytes of a JSON file; 21,843 labels take 2 MiB."""


class Rule(NamedTuple):
    """What a field must be, in words and as a test."""

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
ENCODER = {
    "num_attention_heads": SIZE,
    "image_size": PAIR,
    "layer_norm_eps": NUMBER._replace(or_null=False),
    "layerscale_value": NUMBER,
    "rope_theta": NUMBER._replace(or_null=False),
    "hidden_act": TEXT,
}
FIELDS: dict[str, Rule | dict[str, Rule]] = {
    # transformers: config.json and preprocessor_config.json
    **ENCODER,
    "vision_config": ENCODER,  # of a model of images and text
    "image_mean": NUMBERS,
    "image_std": NUMBERS,
    "resample": CODE,
    # timm
    "architecture": TEXT,
    "model_args": {"num_heads": SIZE, "img_size": PAIR, "init_values": NUMBER},
    "pretrained_cfg": PIXELS,
    **PIXELS,  # files written before 2023 have them at the top level
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > MAX_JSON:
        raise refusal(path, f"be a file of at most {MAX_JSON} bytes", bytes=size)
    return parse_object(path, path.read_bytes())


def check_fields(path: Path, content: Mapping[str, Any], rules: Mapping = FIELDS, above="") -> None:
    """Raises `Refused` if a known field has another type or size.

    Args:
        path: The JSON file.
        content: The object in it.
        rules: A `Rule`, or the rules of an object, by field.
        above: The field that holds the object, with a dot.
    """
    for name, rule in rules.items():
        field, value = above + name, content.get(name)
        own, inside = (OBJECT, rule) if isinstance(rule, dict) else (rule, {})
        if name not in content or (value is None and own.or_null):
            continue
        if not own.holds(value):
            raise refusal(path, f"state {field} as {own.text}", **{field: value})
        check_fields(path, value or {}, inside, f"{field}.")


def parse_config(path: str | os.PathLike, fields: Any) -> ViTConfig:
    """The `ViTConfig` that a file of ours states. Errors name the file and the field."""
    if not isinstance(fields, Mapping):
        raise refusal(path, "state its config as an object", config=fields)
    try:
        return ViTConfig.from_dict(fields)
    except ValueError as error:
        raise Refused(f"{error}, as {os.fspath(path)!r} states") from error


def metadata(config: ViTConfig) -> dict[str, str]:
    """The metadata of a safetensors file of ours, which states its config."""
    return {"format": "pt", METADATA: json.dumps(config.to_dict())}

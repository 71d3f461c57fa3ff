"""Our own `.weights.h5` files, whose config stands beside them, and what our files state."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.weights import adapt, arrays
from keras_vit.weights.declared import mismatch
from keras_vit.weights.safetensors_files import parse_object

CONFIG = "config.json"
METADATA = "keras_vit"  # the config, in the metadata of a safetensors file of ours
MAX_JSON = 16 << 20  # 21,843 labels take 2 MiB


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; nothing where there is none."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > MAX_JSON:
        raise ValueError(
            f"path must be a file of at most {MAX_JSON} bytes. Received: path={str(path)!r}, "
            f"{size} bytes"
        )
    return parse_object(path, path.read_bytes())


def weights_h5(path: Path) -> Path | None:
    """The `.weights.h5` that a path is, or that a folder without other weights holds."""
    if not path.is_dir():
        return path if path.name.endswith(".weights.h5") else None
    found = sorted(path.glob("*.weights.h5"))
    other = next(path.glob("*.safetensors"), None) or next(path.glob("*.npz"), None)
    return found[0] if len(found) == 1 and other is None else None


def read(path: Path, given: Mapping[str, Any]) -> tuple[ViTConfig, dict[str, tuple[int, ...]]]:
    """The config that a `.weights.h5` was saved with, and the shapes in it."""
    fields = read_json(path.parent / CONFIG) or dict(given)
    if not fields:
        raise ValueError(
            "source must stand beside a config.json with the fields of its ViTConfig, or they must "
            f"be given: from_pretrained(source, width=...). Received: source={os.fspath(path)!r}"
        )
    return ViTConfig.from_dict(fields), arrays.check_weights_h5(path)


def load(path: Path, given: Mapping[str, Any], model_fields: Mapping[str, Any]) -> ViT:
    """A model with the weights of a `.weights.h5`, changed to what is asked for."""
    source, _ = read(path, given)
    target, new_head = adapt.target_config(source, given)
    model = ViT(source, **model_fields)
    arrays.check_weights_h5(path, [tuple(v.shape) for v in model.variables])
    model.load_weights(path)
    values = {w.path: keras.ops.convert_to_numpy(w.value) for w in model.weights}
    wrong = [arrays.non_finite(name, value) for name, value in values.items()]
    if any(wrong):
        raise mismatch(path, [line for line in wrong if line])
    if target == source:
        return model
    other = ViT(target, **model_fields)
    wrong = []
    for weight in other.weights:
        if weight.path in adapt.HEAD and new_head:
            continue
        value = values.get(weight.path)
        if value is not None:
            value = adapt.adapted(weight.path, value, source, target)
        if value is None or value.shape != tuple(weight.shape):
            wrong.append(f"{'missing' if value is None else 'other shape'}: {weight.path!r}")
        else:
            weight.assign(value)
    if wrong:
        raise mismatch(path, wrong)
    adapt.report(source, target, new_head)
    return other


def metadata(config: ViTConfig) -> dict[str, str]:
    """What a safetensors file of ours says of itself."""
    return {"format": "pt", METADATA: json.dumps(config.to_dict())}

"""Our own `.weights.h5` files, whose config stands beside them, and what our files state."""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.deferred import deferred
from keras_vit.model import ViT, weight_shapes
from keras_vit.weights import adapt
from keras_vit.weights.files import arrays
from keras_vit.weights.files.rules import mismatch
from keras_vit.weights.files.safetensors import parse_object
from keras_vit.weights.stated import vit_config

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
    """The config that a `.weights.h5` was saved with, and the shapes in it, which agree."""
    stated = read_json(path.parent / CONFIG)
    if not stated and not given:
        raise ValueError(
            "source must stand beside a config.json with the fields of its ViTConfig, or they must "
            f"be given: from_pretrained(source, width=...). Received: source={os.fspath(path)!r}"
        )
    config = vit_config(path.parent / CONFIG, stated) if stated else ViTConfig.from_dict(given)
    shapes = arrays.check_weights_h5(path)
    check_demand(path, config, shapes.values())
    return config, shapes


def check_demand(
    path: str | os.PathLike, config: ViTConfig, found: Collection[tuple[int, ...]]
) -> None:
    """Raises one error where a model of `config` has weights that a file has no arrays for.

    It takes no more time and memory than the file's own header: a config that asks for a million
    blocks or for a table of terabytes is refused before a model is built.

    Args:
        path: The file, for the error.
        config: What the file, or the one beside it, states.
        found: The shape of every array in the file. There may be more than the model needs.
    """
    if config.depth > len(found):
        blocks = f"depth={config.depth}: the file has {len(found)} arrays for that many blocks"
        raise mismatch(path, [blocks])
    left = Counter(found)
    missing = []
    for name, shape in weight_shapes(config).items():
        if not left[shape]:
            missing.append(f"missing: {name!r}, expected an array of shape {shape}")
        left[shape] -= 1
    if missing:
        missing += [f"not expected: {n} of shape {shape}" for shape, n in left.items() if n > 0]
        raise mismatch(path, missing)


def load(path: Path, given: Mapping[str, Any], model_fields: Mapping[str, Any]) -> ViT:
    """A model with the weights of a `.weights.h5`, changed to what is asked for."""
    source, _ = read(path, given)
    target, new_head = adapt.target_config(source, given)
    _check_target(path, source, target, new_head)
    with deferred() as weights:
        model = ViT(source, **model_fields)
    arrays.check_weights_h5(path, [tuple(v.shape) for v in model.variables])
    for weight in model.weights:
        weights.fill(weight, np.zeros(weight.shape, "float32"))  # Keras loads into values alone
    weights.initialize_rest()
    model.load_weights(path)
    values = {w.path: keras.ops.convert_to_numpy(w.value) for w in model.weights}
    wrong = [arrays.non_finite(name, value) for name, value in values.items()]
    if any(wrong):
        raise mismatch(path, [line for line in wrong if line])
    if target == source:
        return model
    with deferred() as weights:
        other = ViT(target, **model_fields)
    for weight in other.weights:
        if weight.path not in adapt.HEAD or not new_head:
            value = adapt.adapted(weight.path, values[weight.path], source, target)
            weights.fill(weight, value)
    weights.initialize_rest()
    adapt.report(source, target, new_head)
    return other


def _check_target(path: Path, source: ViTConfig, target: ViTConfig, new_head: bool) -> None:
    """Raises one error where the model asked for has weights that the saved one cannot fill."""
    own, wrong = weight_shapes(source), []
    for name, shape in weight_shapes(target).items():
        if new_head and name in adapt.HEAD:
            continue
        if name not in own:
            wrong.append(f"missing: {name!r}")
        elif adapt.adapted_shape(name, own[name], source, target) != shape:
            wrong.append(f"other shape: {name!r}")
    if wrong:
        raise mismatch(path, wrong)


def metadata(config: ViTConfig) -> dict[str, str]:
    """What a safetensors file of ours says of itself."""
    return {"format": "pt", METADATA: json.dumps(config.to_dict())}

"""`from_pretrained` and `inspect`: any checkpoint as a `ViT` with its own library's logits."""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.config_names import check_names
from keras_vit.config_rules import as_labels
from keras_vit.deferred import deferred
from keras_vit.model import ViT
from keras_vit.model_weights import weight_shapes
from keras_vit.paths import as_path, is_path
from keras_vit.weights import adapt, keras_files
from keras_vit.weights.files.arrays import Arrays, non_finite, open_arrays
from keras_vit.weights.files.documents import check_fields, parse_document
from keras_vit.weights.files.preset import find_preset
from keras_vit.weights.files.rules import Refused, mismatch
from keras_vit.weights.formats import recognize
from keras_vit.weights.json_rules import (
    CONFIG,
    FIELDS,
    METADATA,
    NESTED,
    PROCESSOR,
    parse_config,
    read_json,
    read_preset,
)
from keras_vit.weights.plan import Plan, make_plan

LOG = logging.getLogger("keras_vit")
PIXELS = "preprocessor_config.json"


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A description of a weight file, from its headers alone."""

    format: str
    """The library whose names its arrays have."""
    config: ViTConfig
    """The config of the model that `from_pretrained` returns."""
    num_arrays: int
    nbytes: int
    """Bytes of all arrays."""
    parameters: int
    """Parameters of the model."""
    loaded: tuple[str, ...]
    """Names of the arrays that the model reads."""
    dropped: Mapping[str, str]
    """Names of the arrays that it does not need, and why."""
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Assumed values of fields that the checkpoint does not state."""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshaped: tuple[str, ...] = ()


def from_pretrained(
    source: str | os.PathLike,
    *,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    in_channels: int | None = None,
    interpolation: str | None = None,
    dtype: Any = None,
    name: str | None = None,
    **config_fields: Any,
) -> ViT:
    """A `ViT` with the weights, the numerics and the pixel range of a checkpoint.

    Args:
        source: A file or folder, "hf://org/name[@revision][/file]", "https://..." or a name that
            `keras-vit models` lists. A `.keras` file, or the run folder that it is in, may get
            another head, image size or config fields too.
        num_classes: None keeps the checkpoint's head, 0 removes it, and another number than its own
            creates a new one, initialized with zeros. `labels` alone set it.
        image_size: An int or (height, width). The position table is resampled by the source's own
            rule. None keeps the checkpoint's.
        in_channels: Channels of the images. The patch kernel is summed or repeated.
        interpolation: A name in `keras_vit.resample.PRESETS` instead of the source's own rule.
        dtype: dtype policy of the model.
        name: Name of the model.
        **config_fields: Fields of `ViTConfig`: those that the file does not state (`num_heads`),
            and those that the model should have (`drop_path`, `pooling`, `labels`).
            `help(keras_vit.ViTConfig)` lists them.

    Returns:
        A `ViT`.

    Example:

    >>> model = keras_vit.from_pretrained("ViT-B_16.npz", num_classes=10, image_size=384)
    """
    check_names(config_fields, ViTConfig.__dataclass_fields__)  # before anything is downloaded
    requested = {
        "num_classes": num_classes,
        "image_size": image_size,
        "in_channels": in_channels,
        "interpolation": interpolation,
    }
    given = config_fields | {k: v for k, v in requested.items() if v is not None}
    given = _with_classes(given)
    path = local_path(source)
    model_fields = {"name": name or "vit", "dtype": dtype}
    if (weights := keras_files.find_weights_h5(path)) is not None:
        return keras_files.load_weights_h5(weights, given, model_fields)
    if (saved := keras_files.find_keras(path)) is not None:
        return keras_files.load_adapted(saved, given, model_fields)
    with open_arrays(path) as file:
        plan = _plan(file, path, given)
        differences = plan.differences()
        if differences:
            # The other arrays are checked for NaN, so that one error lists everything.
            raise mismatch(file.path, differences + _non_finite(file, plan, sorted(plan.loaded)))
        model = _filled(file, plan, model_fields)
    _log(path, plan)
    return model


def from_variant(
    variant: str,
    size: Mapping[str, Any],
    weights: str | os.PathLike,
    *,
    defaults: Mapping[str, Any],
    num_classes: int | None = None,
    **fields: Any,
) -> ViT:
    """`from_pretrained` for a factory such as `vit_b16(weights=...)`, which fixes the size.

    Args:
        variant: The factory's name.
        size: Fields that the checkpoint must have.
        defaults: The factory's other fields, for a `.weights.h5` without a config.json.
        weights: A known name, with or without the variant as its prefix, or any source.
        num_classes: As for `from_pretrained`.
        **fields: As for `from_pretrained`.
    """
    from keras_vit.weights.fetch import known

    path = as_path("weights", weights)
    if not path.exists() and known.find(f"{variant}.{weights}"):
        weights = f"{variant}.{weights}"
    elif not path.exists() and re.fullmatch(r"\w+", os.fspath(weights)):  # "imagenet"
        tags = known.of_variant(variant)
        names = f", such as {', '.join(tags)}" if tags else "; there is none for this variant"
        raise FileNotFoundError(
            f"weights must be a name that `keras-vit models {variant}` lists{names}, or a path, "
            f"hf://organization/name or https://... Received: weights={os.fspath(weights)!r}"
        )
    path = local_path(weights)
    own: Mapping[str, Any] = {}
    if (h5 := keras_files.find_weights_h5(path)) is not None:
        own = size if read_json(h5.parent / CONFIG) else {**size, **defaults}
    model = from_pretrained(path, num_classes=num_classes, **{**own, **fields})
    wrong = [
        f"{name}={getattr(model.config, name)}"
        for name, value in size.items()
        if name not in fields and getattr(model.config, name) != _pair(name, value)
    ]
    if wrong:
        raise ValueError(
            f"weights must be those of a {variant}. Received: weights={os.fspath(weights)!r}, "
            f"which has {', '.join(wrong)}"
        )
    return model


def _pair(name: str, value: Any) -> Any:
    return (value, value) if name == "patch_size" else value


def inspect(path: str | os.PathLike, **config_fields: Any) -> CheckpointInfo:
    """Describes a weight file or folder without reading an array.

    Args:
        path: A file or folder.
        **config_fields: As for `from_pretrained`.

    Example:

    >>> inspect("ViT-B_16.npz").config.image_size
    (224, 224)
    """
    config_fields = _with_classes(config_fields)
    path = as_path("path", path)
    if (weights := keras_files.find_weights_h5(path)) is not None:
        config, shapes = keras_files.read_weights_h5(weights, config_fields)
        return CheckpointInfo(
            format="keras",
            config=config,
            num_arrays=len(shapes),
            nbytes=weights.stat().st_size,
            parameters=_parameters(config),
            loaded=tuple(shapes),
            dropped={},
        )
    with open_arrays(path) as file:
        plan = _plan(file, path, config_fields)
        return CheckpointInfo(
            format=plan.format.name,
            config=plan.target,
            num_arrays=len(file),
            nbytes=file.nbytes,
            parameters=_parameters(plan.target),
            loaded=tuple(plan.names[name] for name in plan.loaded),
            dropped=plan.dropped,
            assumed=plan.assumed,
            missing=tuple(plan.missing),
            extra=tuple(plan.extra),
            misshaped=tuple(plan.misshaped),
        )


def _with_classes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a caller passed; `labels` alone set `num_classes`."""
    labels = as_labels(given.get("labels"))
    known = given.get("num_classes") is not None or not isinstance(labels, tuple)
    return {**given} if known else {**given, "num_classes": len(labels)}


def local_path(source: str | os.PathLike) -> Path:
    """The file or folder of a source, which is downloaded if it is not here."""
    if is_path(source) and Path(source).exists():
        return Path(source)
    from keras_vit.weights import fetch  # it imports a network client

    return Path(fetch.fetch_weights(source))


def _plan(file: Arrays, path: Path, given: Mapping[str, Any]) -> Plan:
    fields = {}
    if METADATA in file.metadata:
        fields = parse_document(file.path, file.metadata[METADATA].encode(errors="surrogatepass"))
        parse_config(file.path, fields)
    json_files = read_json_files(file, path)
    config, pixels, processor = (json_files.get(name, {}) for name in (CONFIG, PIXELS, PROCESSOR))
    try:
        format, prefix = recognize(file.shapes, config)  # first: only formats have rules for JSON
        for name, content in json_files.items():
            check_fields(file.path.parent / name, content, NESTED if name == PROCESSOR else FIELDS)
        nested = processor.get("image_processor")
        pixels = pixels if nested is None else nested  # as transformers prefers it
        return make_plan(
            format, prefix, file.shapes, given, config=config, pixels=pixels, stated=fields
        )
    except Refused:
        raise
    except ValueError as error:
        raise Refused(f"{error}, in {str(file.path)!r}") from error


def read_json_files(file: Arrays, path: Path) -> dict[str, dict]:
    """The JSON files of a model's folder. Beside a file of another name they may be another's."""
    if (folder := find_preset(path)) is not None:
        return dict(zip((CONFIG, PIXELS), read_preset(folder), strict=True))
    if not (path.is_dir() or file.path.name.startswith("model.safetensors")):
        return {}
    return {name: read_json(file.path.parent / name) for name in (CONFIG, PIXELS, PROCESSOR)}


def _parameters(config: ViTConfig) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def _values(file: Arrays, plan: Plan) -> Iterator[tuple[list[tuple[str, np.ndarray]], list]]:
    """Our weights in the checkpoint's config, row by row, and a line per array with NaN or Inf."""
    for row in plan.rows:
        parts = {name: _read(file, plan, name) for name in row.source_shapes(plan.shapes)}
        lines = (non_finite(plan.names[name], part) for name, part in parts.items())
        yield list(row.to_ours(parts, plan.shapes)), [line for line in lines if line]


def _read(file: Arrays, plan: Plan, name: str) -> np.ndarray:
    return file[plan.names[name]].astype(np.float32, copy=False)


def _filled(file: Arrays, plan: Plan, model_fields: Mapping[str, Any]) -> ViT:
    """The planned model with the file's values. One error lists all arrays with NaN or Inf."""
    with deferred() as weights:
        model = ViT(plan.target, **model_fields)
    variables = {weight.path: weight for weight in model.weights}
    wrong: list[str] = []
    rows = _values(file, plan)
    if keras.backend.backend() == "tensorflow":  # it copies twice, the others use the array
        rows = _prefetched(rows)
    for values, bad in rows:
        wrong += [line for line in bad if line not in wrong]
        for path, value in values if not wrong else ():
            value = adapt.adapted(path, value, plan.source, plan.target)
            weights.fill(variables[path], value)
    if wrong:
        raise mismatch(file.path, wrong)
    weights.initialize_rest()
    return model


def _prefetched(items: Iterator[Any]) -> Iterator[Any]:
    """The same items. A thread reads the next one while one is in use."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item


def _non_finite(file: Arrays, plan: Plan, names: list[str]) -> list[str]:
    lines = (non_finite(plan.names[name], _read(file, plan, name)) for name in names)
    return [line for line in lines if line]


def _log(path: Path, plan: Plan) -> None:
    LOG.info("Loaded %d arrays of %s weights: %s", len(plan.loaded), plan.format.name, path)
    for name, reason in plan.dropped.items():
        LOG.info("Not loaded: %s (%s)", name, reason)
    if plan.assumed:
        LOG.warning(
            "%s does not state %s. Assumed: %s. If a value is wrong, pass the right one",
            path,
            " and ".join(plan.assumed),
            ", ".join(f"{name}={value!r}" for name, value in plan.assumed.items()),
        )
    adapt.log_changes(plan.source, plan.target, plan.new_head)

"""Keras' own files: `.weights.h5` and `.keras`.

Keras creates a model and its weights from a config first, and reads the arrays afterwards. So the
config is compared with the arrays here, from the headers alone.
"""

import contextlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import keras
import numpy as np

from keras_vit.classifier import Classifier, vit_of
from keras_vit.config import ViTConfig
from keras_vit.deferred import deferred
from keras_vit.model import ViT
from keras_vit.model_weights import weight_shapes
from keras_vit.weights import adapt
from keras_vit.weights.files.arrays import non_finite
from keras_vit.weights.files.documents import MAX_JSON, parse_document
from keras_vit.weights.files.h5 import OPTIMIZER, check_weights_h5, read_shapes
from keras_vit.weights.files.preset import find_preset
from keras_vit.weights.files.rules import Refused, mismatch, refusal, refused_as
from keras_vit.weights.json_rules import CONFIG, parse_config, read_json

WEIGHTS = "model.weights.h5"
MODEL = "model.keras"
PLAIN_POLICIES = ("DTypePolicy", "FloatDTypePolicy")
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OSError, NotImplementedError, RuntimeError),
)
"""What zipfile raises on a corrupt file."""


def find_weights_h5(path: Path) -> Path | None:
    """The `.weights.h5`: `path` itself, or the one in a folder without other weights.

    None for a preset of KerasHub, whose arrays have names of their own.
    """
    if find_preset(path) is not None:
        return None
    if not path.is_dir():
        return path if path.name.endswith(".weights.h5") else None
    found = sorted(path.glob("*.weights.h5"))
    return found[0] if len(found) == 1 and not _has_other_weights(path) else None


def _has_other_weights(folder: Path) -> bool:
    return any(True for name in ("*.safetensors", "*.npz") for _ in folder.glob(name))


def read_weights_h5(
    path: Path, given: Mapping[str, Any]
) -> tuple[ViTConfig, dict[str, tuple[int, ...]]]:
    """The config and the shapes of a `.weights.h5`, checked against each other."""
    stated = read_json(path.parent / CONFIG)
    if not stated and not given:
        raise ValueError(
            "source must be beside a config.json with the fields of its ViTConfig, or they must be "
            f"given: from_pretrained(source, width=...). Received: source={os.fspath(path)!r}"
        )
    config = parse_config(path.parent / CONFIG, stated) if stated else ViTConfig.from_dict(given)
    shapes = check_weights_h5(path)
    _check_arrays(path, config, shapes.values())
    return config, shapes


def _check_arrays(path: Path, config: ViTConfig, found: Collection[tuple[int, ...]]) -> None:
    """Raises one error if a model of `config` has weights without an array of their shape.

    It takes no more time and memory than the file's own header: a config with a million blocks or
    a table of terabytes is refused before a model is built. Extra arrays are allowed.
    """
    _check_depth(path, config, found)
    left = Counter(found)
    missing = []
    for name, shape in weight_shapes(config).items():
        if not left[shape]:
            missing.append(f"missing: {name!r}, expected an array of shape {shape}")
        left[shape] -= 1
    if missing:
        missing += [f"not expected: {n} of shape {shape}" for shape, n in left.items() if n > 0]
        raise mismatch(path, missing)


def load_weights_h5(path: Path, given: Mapping[str, Any], model_fields: Mapping[str, Any]) -> ViT:
    """A model with the weights of a `.weights.h5`, adapted to the fields that the caller passed."""
    source, _ = read_weights_h5(path, given)
    target, new_head = _target_config(path, source, given)
    _check_target(path, source, target, new_head)
    with deferred() as weights:
        model = ViT(source, **model_fields)
    check_weights_h5(path, [tuple(v.shape) for v in model.variables])
    for weight in model.weights:
        weights.fill(
            weight, np.zeros(weight.shape, "float32")
        )  # Keras loads only into existing values
    weights.initialize_rest()
    with _named(path):
        model.load_weights(path)
    values = _values(path, model)
    if target == source:
        return model
    return _adapted(source, target, new_head, values, model_fields)


def find_keras(path: Path) -> Path | None:
    """The `.keras` file: `path` itself, or the model.keras of a folder without other weights."""
    found = path / MODEL if path.is_dir() and not _has_other_weights(path) else path
    return found if found.suffix == ".keras" and found.is_file() else None


def load_adapted(path: Path, given: Mapping[str, Any], model_fields: Mapping[str, Any]) -> ViT:
    """A model with the weights of a `.keras`, adapted to the fields that the caller passed."""
    check_keras_file(path)
    saved = vit_of(load_model(path))
    for layer in saved._flatten_layers():
        if (mode := getattr(layer, "quantization_mode", None)) is not None:
            raise refusal(path, "be a model that is not quantized", quantization_mode=mode)
    source = saved.config
    target, new_head = _target_config(path, source, given)
    _check_target(path, source, target, new_head)
    return _adapted(source, target, new_head, _values(path, saved), model_fields)


def load_model(path: str | os.PathLike) -> keras.Model:
    """The model in a `.keras` file that `check_keras_file` has checked. Errors name the file."""
    with _named(path):
        return keras.saving.load_model(path, compile=False)


@contextlib.contextmanager
def _named(path: str | os.PathLike) -> Iterator[None]:
    """Adds the file's name to errors of Keras, h5py and zipfile."""
    try:
        yield
    except Exception as error:  # they raise anything on a damaged file
        raise Refused(
            f"path must be a file that Keras loads. Received: path={os.fspath(path)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _values(path: Path, model: ViT) -> dict[str, np.ndarray]:
    """The weights of a loaded model, which are finite."""
    values = {w.path: keras.ops.convert_to_numpy(w.value) for w in model.weights}
    wrong = [non_finite(name, value) for name, value in values.items()]
    if any(wrong):
        raise mismatch(path, [line for line in wrong if line])
    return values


def _adapted(
    source: ViTConfig,
    target: ViTConfig,
    new_head: bool,
    values: Mapping[str, np.ndarray],
    model_fields: Mapping[str, Any],
) -> ViT:
    """A model of the config `target` with the weights of one of `source`."""
    with deferred() as weights:
        model = ViT(target, **model_fields)
    for weight in model.weights:
        if not (new_head and adapt.in_head(weight.path)):
            value = adapt.adapted(weight.path, values[weight.path], source, target)
            weights.fill(weight, value)
    weights.initialize_rest()
    adapt.log_changes(source, target, new_head)
    return model


def _target_config(
    path: Path, source: ViTConfig, given: Mapping[str, Any]
) -> tuple[ViTConfig, bool]:
    try:
        return adapt.target_config(source, given)
    except ValueError as error:
        raise Refused(f"{error}, in {str(path)!r}") from error


def _check_target(path: Path, source: ViTConfig, target: ViTConfig, new_head: bool) -> None:
    """Raises one error if the requested model has weights that the saved one cannot fill."""
    saved, wrong = weight_shapes(source), []
    for name, shape in weight_shapes(target).items():
        if new_head and adapt.in_head(name):
            continue
        if name not in saved:
            wrong.append(f"missing: {name!r}")
        elif adapt.adapted_shape(name, saved[name], source, target) != shape:
            wrong.append(f"wrong shape: {name!r}")
    if wrong:
        raise mismatch(path, wrong)


def check_keras_file(path: str | os.PathLike) -> None:
    """Raises `ValueError` unless the file holds a `ViT` and an array for each of its weights."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must be a .keras file. Received: path={str(path)!r}")
    with _opened(path) as (content, file, size):
        content = _without_preprocessing(path, content)
        config = _config_in(path, content)
        shapes = read_shapes(file, path, size)
    if config is None:
        return
    found = [shape for name, shape in shapes.items() if not name.startswith(OPTIMIZER)]
    if _is_plain(content["config"].get("dtype")):
        _check_arrays(path, config, found)
    else:
        _check_quantized(path, config, found)


def _check_depth(path: Path, config: ViTConfig, found: Collection[tuple[int, ...]]) -> None:
    """Raises before a loop over all blocks if there are fewer arrays than blocks."""
    for name, blocks in (("depth", config.depth), ("stem_depths", sum(config.stem_depths))):
        if blocks > len(found):
            stated = getattr(config, name)
            raise mismatch(path, [f"{name}={stated}: the file has only {len(found)} arrays"])


def _check_quantized(path: Path, config: ViTConfig, found: list[tuple[int, ...]]) -> None:
    """`_check_arrays` of a quantized model, whose shapes differ: int4 packs two into a byte."""
    _check_depth(path, config, found)
    have = 2 * sum(map(math.prod, found))
    for name, shape in weight_shapes(config).items():
        have -= math.prod(shape)
        if have < 0:
            raise mismatch(path, [f"missing: {name!r}, expected an array of shape {shape}"])


def _without_preprocessing(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The object of the ViT in a `Classifier`; of other models their own."""
    known = _registered(content)
    if known is not Classifier:
        return content
    config = content.get("config")
    inner = config.get("model") if isinstance(config, dict) else None
    if not isinstance(inner, dict):
        raise refusal(path, "state the Classifier's model as an object", model=inner)
    return inner


def _registered(content: Mapping[str, Any]) -> Any:
    name = content.get("registered_name")
    return keras.saving.get_registered_object(name) if isinstance(name, str) else None


def _config_in(path: Path, content: Mapping[str, Any]) -> ViTConfig | None:
    """The config of the `ViT` in the file; None if a subclass has a config of its own."""
    known = _registered(content)
    if not isinstance(known, type) or not issubclass(known, ViT):
        kind = str(content.get("class_name"))[:100]
        raise ValueError(f"path must hold a ViT. Received: {path}, a {kind} model")
    if not isinstance(content.get("config"), dict):
        raise refusal(path, "state the model's config as an object", config=content.get("config"))
    fields = content["config"].get("config")
    if known is not ViT and not isinstance(fields, dict):
        return None
    return parse_config(path, fields)


def _is_plain(policy: Any) -> bool:
    return policy is None or (
        isinstance(policy, dict) and policy.get("class_name") in PLAIN_POLICIES
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], BinaryIO, int]]:
    """Yields the object in config.json, the weights as a file, and its size."""
    with path.open("rb") as file:
        with refused_as(path, "be a whole .keras file", BROKEN):
            archive = zipfile.ZipFile(file)
        with archive:
            members = {member.filename: member for member in archive.infolist()}
            for name in (CONFIG, WEIGHTS):
                if name not in members:
                    raise refusal(path, f"hold {name}", found=list(members))
            with refused_as(path, "be a whole .keras file", BROKEN):
                content = _read_config(path, archive, members[CONFIG])
                weights = _stored(path, file, members[WEIGHTS])
            yield content, weights, members[WEIGHTS].file_size


def _read_config(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> dict[str, Any]:
    with archive.open(member) as stream:
        data = stream.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise refusal(path, f"have a {CONFIG} of at most {MAX_JSON} bytes")
    return parse_document(path, data)


def _stored(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> BinaryIO:
    """A member of the archive as a seekable file, without a copy."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise refusal(path, f"hold {WEIGHTS} stored, as Keras writes it", member=member.filename)
    file.seek(member.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return _Part(file, member.header_offset + 30 + name + extra, member.file_size)


class _Part(io.RawIOBase, BinaryIO):
    """`length` bytes of an open file from `start`, as a read-only file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

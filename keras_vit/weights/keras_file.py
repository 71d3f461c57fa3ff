"""Checking a `.keras` file before Keras builds the model that is in it.

Keras makes all layers and their weights from config.json first, and reads model.weights.h5 then. So
what config.json asks for is compared with the arrays here, from the headers alone.
"""

import contextlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import keras

from keras_vit.config import ViTConfig
from keras_vit.model import ViT, weight_shapes
from keras_vit.weights.files.h5 import read_shapes
from keras_vit.weights.files.rules import mismatch, refusal, refused_as
from keras_vit.weights.files.safetensors import parse_object
from keras_vit.weights.own import CONFIG, MAX_JSON, check_demand
from keras_vit.weights.stated import vit_config

WEIGHTS = "model.weights.h5"
PLAIN_POLICIES = ("DTypePolicy", "FloatDTypePolicy")
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OSError, NotImplementedError, RuntimeError),
)
"""What zipfile raises on a damaged file."""


def check_keras(path: str | os.PathLike) -> None:
    """Raises `ValueError` unless the file holds a `ViT` and an array for each of its weights."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must be a .keras file. Received: path={str(path)!r}")
    with _opened(path) as (content, file, size):
        config = _vit_config(path, content)
        shapes = read_shapes(file, path, size)
    if config is None:
        return
    found = [shape for name, shape in shapes.items() if not name.startswith("optimizer/")]
    if _is_plain(content["config"].get("dtype")):
        check_demand(path, config, found)
    else:
        _check_total(path, config, found)


def _check_total(path: Path, config: ViTConfig, found: list[tuple[int, ...]]) -> None:
    """The check of a quantized model, whose arrays have other shapes: int4 packs two in a byte."""
    have = 2 * sum(map(math.prod, found))
    if config.depth > len(found):
        raise mismatch(path, [f"depth={config.depth}: the file has {len(found)} arrays"])
    for name, shape in weight_shapes(config).items():
        have -= math.prod(shape)
        if have < 0:
            raise mismatch(path, [f"missing: {name!r}, expected an array of shape {shape}"])


def _vit_config(path: Path, content: Mapping[str, Any]) -> ViTConfig | None:
    """The config of the `ViT` in the file; None where a subclass has a config of its own."""
    registered = content.get("registered_name")
    known = keras.saving.get_registered_object(registered) if isinstance(registered, str) else None
    if not isinstance(known, type) or not issubclass(known, ViT):
        kind = str(content.get("class_name"))[:100]
        raise ValueError(f"path must hold a ViT. Received: {path}, a {kind} model")
    if not isinstance(content.get("config"), dict):
        raise refusal(path, "state the model's config as an object", config=content.get("config"))
    fields = content["config"].get("config")
    if known is not ViT and not isinstance(fields, dict):
        return None
    return vit_config(path, fields)


def _is_plain(policy: Any) -> bool:
    return policy is None or (
        isinstance(policy, dict) and policy.get("class_name") in PLAIN_POLICIES
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], BinaryIO, int]]:
    """The object in config.json; and the weights as a file, with its size."""
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
    return parse_object(path, data)


def _stored(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> BinaryIO:
    """A member of the archive as a file in which one can seek, without a copy of it."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise refusal(path, f"hold {WEIGHTS} stored, as Keras writes it", member=member.filename)
    file.seek(member.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return _Part(file, member.header_offset + 30 + name + extra, member.file_size)


class _Part(io.RawIOBase, BinaryIO):
    """`length` bytes of an open file, from `start` on, as a file to read."""

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

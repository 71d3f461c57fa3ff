"""Reading safetensors files that others wrote: one header, checked whole, then a memory map.

The safetensors library is not used for reading: it keeps the last of two entries with one name, and
has no bfloat16 for NumPy alone. Tests hold what is read and written here against it.
"""

import itertools
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keras_vit.weights.files.rules import DTYPES, Declared, declare, decode, refusal, refused_as

MAX_HEADER = 4 << 20
"""Bytes a header may take: 4 MiB, room for some 30,000 arrays."""

NAMES = {
    **{"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""The format's dtype names, and ours."""


class SafetensorsReader:
    """The arrays of an open safetensors file, for `arrays.open_arrays`.

    Attributes:
        declared: What the header declares of each array.
        metadata: The header's `__metadata__`.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self.path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        header, self._start = self._read_header()
        self.metadata: dict[str, str] = self._check_metadata(header.pop("__metadata__", {}))
        self.declared: dict[str, Declared] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            self._check_entry(name, entry)
        self._check_offsets(header)
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Closes the map and the file."""
        self._map.close()
        self._file.close()

    def read(self, name: str) -> np.ndarray:
        """One array, copied out of the map, whose pages are given back at once.

        A view would be for nothing, and a trap: JAX keeps aligned arrays without copying them, so a
        model's variable could be a piece of a file that another program then overwrites.
        """
        declared, start = self.declared[name], self._start + self._offsets[name]
        dtype = DTYPES[declared.dtype].newbyteorder("<")
        view = np.frombuffer(self._map, dtype, math.prod(declared.shape), start)
        if declared.dtype != "bfloat16":  # decoding that one copies already
            view = view.astype(dtype.newbyteorder("="))
        array = decode(view, declared.dtype)
        if hasattr(self._map, "madvise"):  # Windows has none
            page = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, start - page + declared.nbytes)
        return array.reshape(declared.shape)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header as a dict, and where the data starts.

        Holds off a header that is longer than the file or fills the memory (S2), that is no JSON
        object, and that names an array twice (S3).
        """
        length = int.from_bytes(self._file.read(8), "little")
        if length > MAX_HEADER or 8 + length > self._size:
            rule = f"have a header within the file, of at most {MAX_HEADER} bytes"
            raise refusal(self.path, rule, header=length, bytes=self._size)
        return parse_object(self.path, self._file.read(length)), 8 + length

    def _check_metadata(self, metadata: Any) -> dict[str, str]:
        if isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()):
            return metadata
        raise refusal(self.path, "have metadata of strings", __metadata__=metadata)

    def _check_entry(self, name: str, entry: Any) -> None:
        """Holds off entries of another form, and offsets that do not fit the shape (S2, S3)."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            rule = "declare dtype, shape and data_offsets of every array"
            raise refusal(self.path, rule, member=name, entry=entry)
        code = entry["dtype"]
        dtype = NAMES.get(code, code) if isinstance(code, str) else repr(code)
        declared = declare(self.path, name, entry["shape"], dtype)
        offsets = entry["data_offsets"]
        pair = isinstance(offsets, list) and [type(n) for n in offsets] == [int, int]
        if not pair or not 0 <= offsets[0] <= offsets[1] <= self._size - self._start:
            rule = "declare offsets [begin, end] within the file"
            raise refusal(self.path, rule, member=name, data_offsets=offsets, bytes=self._size)
        if offsets[1] - offsets[0] != declared.nbytes:
            rule = f"hold {declared.nbytes} bytes for shape {declared.shape}, {declared.dtype}"
            raise refusal(self.path, rule, member=name, data_offsets=offsets)
        self.declared[name], self._offsets[name] = declared, offsets[0]

    def _check_offsets(self, header: dict[str, Any]) -> None:
        """Holds off arrays that overlap, gaps, and bytes behind the last array (S3, S4)."""
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        edge = (0, 0, None)
        for (_, end, _), (begin, _, name) in itertools.pairwise([edge, *spans]):
            if begin != end:
                rule = "hold its arrays one behind another, without gap or overlap"
                raise refusal(self.path, rule, member=name, begin=begin, previous_end=end)
        data, last = self._size - self._start, spans[-1][1] if spans else 0
        if last != data:
            rule = f"end with its last array, {last} bytes behind the header"
            raise refusal(self.path, rule, bytes=data)


def parse_object(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, in which no name may stand twice (S3)."""
    rule = "have a JSON object as its header, with each name once"
    with refused_as(path, rule, (ValueError, RecursionError)):
        found = json.loads(data.decode(), object_pairs_hook=_unique)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:200]!r} stands twice")
        found[name] = value
    return found

"""Reads safetensors files that others wrote, one or several shards, through a memory map.

The safetensors library is not used for reading: it keeps the last of two entries with one name, and
returns no bfloat16 without ml_dtypes. The tests compare both.
"""

import itertools
import math
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keras_vit.weights.files.documents import parse_document
from keras_vit.weights.files.rules import DTYPES, Declared, declare, decode, refusal

MAX_HEADER = 4 << 20
"""Bytes of a header or an index: 4 MiB hold about 30,000 arrays."""

NAMES = {
    **{"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Our dtype names by the format's."""


class SafetensorsReader:
    """The arrays of an open safetensors file, for `arrays.open_arrays`."""

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
        """Closes the memory map and the file."""
        self._map.close()
        self._file.close()

    def read_array(self, name: str) -> np.ndarray:
        """One array, copied out of the memory map, whose pages are released at once.

        It is not a view, because JAX uses aligned arrays without a copy: a model's variable would
        be part of a file that another program may overwrite.
        """
        declared, start = self.declared[name], self._start + self._offsets[name]
        dtype = DTYPES[declared.dtype].newbyteorder("<")
        view = np.frombuffer(self._map, dtype, math.prod(declared.shape), start)
        if declared.dtype != "bfloat16":  # decoding bfloat16 copies already
            view = view.astype(dtype.newbyteorder("="))
        array = decode(view, declared.dtype)
        if hasattr(self._map, "madvise"):  # Windows has none
            page = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, start - page + declared.nbytes)
        return array.reshape(declared.shape)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header, and where the data starts.

        Refuses a header that is longer than the file or too long for the memory (S2), that is not
        a JSON object, or that names an array twice (S3).
        """
        length = int.from_bytes(self._file.read(8), "little")
        if length > MAX_HEADER or 8 + length > self._size:
            rule = f"have a header within the file, of at most {MAX_HEADER} bytes"
            raise refusal(self.path, rule, header=length, bytes=self._size)
        return parse_document(self.path, self._file.read(length)), 8 + length

    def _check_metadata(self, metadata: Any) -> dict[str, str]:
        if isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()):
            return metadata
        raise refusal(self.path, "have metadata of strings", __metadata__=metadata)

    def _check_entry(self, name: str, entry: Any) -> None:
        """Refuses malformed entries, and offsets that do not match the shape (S2, S3)."""
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
        """Refuses overlaps, gaps, and bytes after the last array (S3, S4)."""
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        edge = (0, 0, None)
        for (_, end, _), (begin, _, name) in itertools.pairwise([edge, *spans]):
            if begin != end:
                rule = "hold its arrays one after another, without gap or overlap"
                raise refusal(self.path, rule, member=name, begin=begin, previous_end=end)
        data, last = self._size - self._start, spans[-1][1] if spans else 0
        if last != data:
            rule = f"end with its last array, {last} bytes after the header"
            raise refusal(self.path, rule, bytes=data)


class ShardsReader:
    """The arrays of every shard that an index names, for `arrays.open_arrays`.

    The shards' metadata is merged. If two differ, the first one's is used.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, str] = {}
        self._shards: dict[str, SafetensorsReader] = {}  # file name -> its reader
        self._homes: dict[str, str] = {}  # array name -> file name
        weight_map = self._read_index()
        try:
            for file in sorted(set(weight_map.values())):
                self._open(file)
            self._check_homes(weight_map)
        except BaseException:
            self.close()
            raise
        self.declared: dict[str, Declared] = {
            name: self._shards[file].declared[name] for name, file in self._homes.items()
        }

    def close(self) -> None:
        """Closes every shard."""
        for shard in self._shards.values():
            shard.close()

    def read_array(self, name: str) -> np.ndarray:
        """One array, as `SafetensorsReader.read_array` returns it."""
        return self._shards[self._homes[name]].read_array(name)

    def _read_index(self) -> dict[str, str]:
        """Shard names by array name.

        Refuses an index too long for the memory (S2), and names of files that are not beside the
        index (S7).
        """
        if (size := self.path.stat().st_size) > MAX_HEADER:
            raise refusal(self.path, f"be an index of at most {MAX_HEADER} bytes", bytes=size)
        weight_map: Any = parse_document(self.path, self.path.read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise refusal(self.path, "have a weight_map from names to files", weight_map=weight_map)
        for name, file in weight_map.items():
            plain = isinstance(file, str) and not {"/", "\\", ":", "\0"} & set(file)
            if not plain or not file.endswith(".safetensors"):
                rule = "name shards by .safetensors files beside it"
                raise refusal(self.path, rule, member=name, shard=file)
        return weight_map

    def _open(self, file: str) -> None:
        path = self.path.parent / file
        if not path.is_file():
            raise refusal(self.path, "be in one folder with every shard it names", missing=file)
        handle = path.open("rb")
        try:
            shard = SafetensorsReader(handle, path)
        except BaseException:
            handle.close()
            raise
        self._shards[file] = shard
        for name in shard.declared:
            if name in self._homes:
                rule = "hold every array in one shard"
                raise refusal(self.path, rule, member=name, shards=[self._homes[name], file])
            self._homes[name] = file
        self.metadata = {**shard.metadata, **self.metadata}

    def _check_homes(self, weight_map: dict[str, str]) -> None:
        """Refuses an index that contradicts its shards (S3)."""
        wrong = [
            n for n in {**weight_map, **self._homes} if weight_map.get(n) != self._homes.get(n)
        ]
        if wrong:
            rule = "name exactly the arrays of each shard"
            raise refusal(self.path, rule, members=wrong)

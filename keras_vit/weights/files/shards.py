"""Reading safetensors weights that are spread over several files, by the index beside them."""

from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.weights.files.rules import Declared, refusal
from keras_vit.weights.files.safetensors import MAX_HEADER, SafetensorsReader, parse_object


class ShardsReader:
    """The arrays of every shard that an index names, for `arrays.open_arrays`.

    Attributes:
        declared: What the shards' headers declare of each array.
        metadata: The shards' metadata together; where two differ, the first one's.
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

    def read(self, name: str) -> np.ndarray:
        """One array, as `SafetensorsReader.read` gives it."""
        return self._shards[self._homes[name]].read(name)

    def _read_index(self) -> dict[str, str]:
        """Which shard holds which array.

        Holds off an index that fills the memory (S2) and file names that lead elsewhere (S7):
        a shard is a file beside its index.
        """
        if (size := self.path.stat().st_size) > MAX_HEADER:
            raise refusal(self.path, f"be an index of at most {MAX_HEADER} bytes", bytes=size)
        weight_map: Any = parse_object(self.path, self.path.read_bytes()).get("weight_map")
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
            raise refusal(self.path, "stand beside every shard it names", missing=file)
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
        """Holds off an index and shards that do not say the same (S3)."""
        wrong = [
            n for n in {**weight_map, **self._homes} if weight_map.get(n) != self._homes.get(n)
        ]
        if wrong:
            rule = "name exactly the arrays of each shard"
            raise refusal(self.path, rule, members=wrong)

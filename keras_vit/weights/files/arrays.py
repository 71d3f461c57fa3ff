"""Opens any weight file: `open_arrays`, and the lazy mapping `Arrays` that it returns.

Nothing in a file is executed or unpickled. Everything a file declares is checked when it is opened,
from its headers alone. An array is read when it is accessed.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from keras_vit.weights.files import pickles
from keras_vit.weights.files.npz import NpzReader
from keras_vit.weights.files.preset import BACKBONE_WEIGHTS, PresetReader, find_preset
from keras_vit.weights.files.rules import Declared, refusal
from keras_vit.weights.files.safetensors import SafetensorsReader, ShardsReader

INDEX = ".safetensors.index.json"


class Reader(Protocol):
    """What each file type implements."""

    declared: dict[str, Declared]
    metadata: dict[str, str]

    def read_array(self, name: str) -> np.ndarray: ...
    def close(self) -> None: ...


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a weight file by name, each read when it is accessed.

    An array is a copy: the caller may change it and keep it after the file is closed.

    Attributes:
        path: The file.
        shapes: Shapes by name, from the headers.
        dtypes: Stored dtypes by name. "bfloat16" is returned as float32, every other dtype
            unchanged in the machine's byte order.
        nbytes: Uncompressed bytes of all arrays.
        metadata: The file's metadata. An .npz has none.
    """

    def __init__(self, reader: Reader, path: Path):
        self._reader: Reader | None = reader
        self.path = path
        self.shapes = {name: declared.shape for name, declared in reader.declared.items()}
        self.dtypes = {name: declared.dtype for name, declared in reader.declared.items()}
        self.nbytes = sum(declared.nbytes for declared in reader.declared.values())
        self.metadata = dict(reader.metadata)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        if self._reader is None:
            raise ValueError(f"arrays must be open to be read. Received: path={str(self.path)!r}")
        return self._reader.read_array(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # Mapping's default reads the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __enter__(self) -> "Arrays":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def open_arrays(path: str | os.PathLike) -> Arrays:
    """Opens a weight file as a context manager and a lazy mapping from names to arrays.

    The file type is recognized by content: `.npz`, `.safetensors`, or `*.safetensors.index.json`
    with its shards. A folder must hold exactly one of these, or a preset of KerasHub. PyTorch
    pickles are refused with the command that converts them. Corrupt and malicious files are refused
    with an error that names the file, the member and the rule.

    A .safetensors file is memory-mapped: if another program truncates it during a read, the system
    kills this process (SIGBUS). Replacing the file, as every writer here does, is safe.

    Args:
        path: The file or folder.

    Example:

    >>> with open_arrays("ViT-B_16.npz") as arrays:
    ...     arrays.shapes["cls"], arrays["cls"].mean()
    """
    if (folder := find_preset(Path(path))) is not None:
        return Arrays(PresetReader(folder), folder / BACKBONE_WEIGHTS)
    path = _choose(Path(path))
    if path.name.endswith(INDEX):
        return Arrays(ShardsReader(path), path)
    file = path.open("rb")
    try:
        start = file.read(16)
        file.seek(0)
        # A safetensors header may start with the two bytes of a pickle, so its brace comes first.
        if start[8:9] == b"{" and start[6:8] == b"\0\0":
            return Arrays(SafetensorsReader(file, path), path)
        if start[:4] == b"PK\3\4":
            return Arrays(NpzReader(file, path), path)
        pickles.refuse_file(path, start)
        rule = "be an .npz or .safetensors file"
        raise refusal(path, rule, bytes=path.stat().st_size, start=start)
    except BaseException:
        file.close()
        raise


def non_finite(name: str, array: np.ndarray) -> str | None:
    """A line that counts the NaN and Inf values in `array`, or None if there are none."""
    with np.errstate(all="ignore"):
        flat = array.reshape(-1)
        if np.isfinite(np.dot(flat, flat)):  # one pass, no mask: a NaN or Inf spreads to the sum
            return None
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if not nans and not infinities:  # only the sum overflows
        return None
    return f"{name}: {nans} NaN and {infinities} Inf among {array.size} values"


def _choose(path: Path) -> Path:
    """The weight file: `path` itself, or the one in the folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise FileNotFoundError(f"path must be a file or folder. Received: path={str(path)!r}")
    if not path.is_dir():  # reading a pipe or a device may never end
        raise refusal(path, "be a regular file or a folder")
    if (path / "model.safetensors").is_file():
        return path / "model.safetensors"
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    for ending in (INDEX, ".safetensors", ".npz"):
        found = [file for file in files if file.name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            names = [file.name for file in found]
            raise refusal(path, f"hold one *{ending} or be one of the files", found=names)
    for file in files:
        if file.suffix.lower() in pickles.SUFFIXES:
            pickles.refuse_file(file, b"")
    raise refusal(path, "hold an .npz or .safetensors file", found=[file.name for file in files])

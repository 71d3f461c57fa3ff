"""Opening weight files that somebody else wrote: the one door, and the `Arrays` behind it.

Nothing in a file is run or unpickled. Everything a file declares is checked when it is opened,
from its headers alone; an array's bytes are read when the array is asked for.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from keras_vit.weights.files import pickles
from keras_vit.weights.files.atomic import atomic_path
from keras_vit.weights.files.h5 import check_weights_h5
from keras_vit.weights.files.npz import NpzReader
from keras_vit.weights.files.rules import Declared, check_shapes, refusal
from keras_vit.weights.files.safetensors import SafetensorsReader
from keras_vit.weights.files.shards import ShardsReader
from keras_vit.weights.files.writers import write_npz, write_safetensors

__all__ = [
    "Arrays",
    "atomic_path",
    "check_weights_h5",
    "non_finite",
    "open_arrays",
    "write_npz",
    "write_safetensors",
]

INDEX = ".safetensors.index.json"


class Reader(Protocol):
    """What a file format provides: the declarations of its headers, and one array at a time."""

    declared: dict[str, Declared]
    metadata: dict[str, str]

    def read(self, name: str) -> np.ndarray: ...
    def close(self) -> None: ...


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a weight file by name, each read when it is asked for.

    An array belongs to the caller and may be written to; the file stays as it is. It stays valid
    when the file is closed. Keep few of them at a time, and the memory stays small.

    Attributes:
        path: The file.
        shapes: Every array's shape, from the headers.
        dtypes: Every array's dtype as it is stored. "bfloat16" comes out as float32, every other
            one as it is, in the machine's byte order.
        nbytes: Bytes of all arrays together, as they are stored but uncompressed.
        metadata: The file's own notes; an .npz has none.
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
        return self._reader.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # Mapping's own reads the array

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

    def check(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Raises one `ValueError` that lists every missing, extra and mis-shaped array (S3).

        No array is read for it.

        Args:
            expected: The shape of every array there must be, by name.
        """
        check_shapes(self.path, self.shapes, expected)


def open_arrays(path: str | os.PathLike) -> Arrays:
    """Opens a weight file: a context manager and a lazy mapping from names to arrays.

    The format is recognised by content: `.npz`, `.safetensors`, or `*.safetensors.index.json` with
    its shards. A folder stands for the one of these that it holds. PyTorch pickles are refused with
    the command that converts them; so is, with the file, the member and the rule named, whatever
    is damaged or made to do harm.

    A .safetensors file is mapped: if another program cuts it short in place while an array is read,
    the system ends the process (SIGBUS). Replacing it, as every writer here does, is safe.

    Args:
        path: The file or folder.

    Example:

    >>> with open_arrays("ViT-B_16.npz") as arrays:
    ...     arrays.shapes["cls"], arrays["cls"].mean()
    """
    path = _choose(Path(path))
    if path.name.endswith(INDEX):
        return Arrays(ShardsReader(path), path)
    file = path.open("rb")
    try:
        start = file.read(16)
        file.seek(0)
        # A safetensors header may begin with the two bytes of a pickle: look for its brace first.
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
    """A line that says how many NaN and Inf `array` holds, or None where all is finite."""
    with np.errstate(all="ignore"):
        flat = array.reshape(-1)
        if np.isfinite(np.dot(flat, flat)):  # one pass, no mask: a NaN or Inf shows in the sum
            return None
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if not nans and not infinities:  # large numbers, whose sum alone is too large
        return None
    return f"{name}: {nans} NaN and {infinities} Inf among {array.size} values"


def _choose(path: Path) -> Path:
    """The weight file that `path` stands for: itself, or the one in the folder."""
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

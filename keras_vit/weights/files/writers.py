"""Writes .npz and .safetensors files atomically, one array at a time."""

import json
import os
import zipfile
from collections.abc import Mapping

import numpy as np

from keras_vit.atomic import atomic_path
from keras_vit.weights.files.npz import broken_name
from keras_vit.weights.files.rules import DTYPES
from keras_vit.weights.files.safetensors import MAX_HEADER, NAMES

# The safetensors library sorts by dtype in this order, then by name. So do we, to write its bytes.
_ORDER = (
    *("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL"),
)
_CODES = {name: code for code, name in NAMES.items()}


def write_npz(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], *, compressed: bool = False
) -> None:
    """Writes an .npz atomically. The same arrays give the same bytes.

    bfloat16 is written as by `np.savez`: as two-byte void.

    Args:
        path: The file. No suffix is added.
        arrays: Arrays by name, accessed one at a time.
        compressed: Whether to compress. Trained weights shrink by a tenth, and reading them takes
            ten times as long.
    """
    compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with atomic_path(path) as temporary:
        with zipfile.ZipFile(temporary, "x", compression) as archive:
            for name in arrays:
                if rule := broken_name(f"{name}.npy"):
                    raise ValueError(f"arrays must {rule}. Received: name={name!r}")
                array, _ = _standard(name, arrays[name])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, (1, 0), allow_pickle=False)


def write_safetensors(
    path: str | os.PathLike,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file atomically, byte for byte as the safetensors library does.

    Args:
        path: The file. No suffix is added.
        arrays: Arrays by name, accessed one at a time and twice each: once for the header.
        metadata: Strings by name. PyTorch's readers expect `{"format": "pt"}`.
    """
    declared = {}
    for name in arrays:
        array, dtype = _standard(name, arrays[name])
        declared[name] = (_CODES[dtype], array.shape, array.nbytes)
    names = sorted(declared, key=lambda name: (_ORDER.index(declared[name][0]), name.encode()))
    header = _header(names, declared, metadata)
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            array, dtype = _standard(name, arrays[name])
            if (_CODES[dtype], array.shape, array.nbytes) != declared[name]:
                rule = "give an array of the same shape and dtype each time"
                raise ValueError(f"arrays must {rule}. Received: name={name!r}")
            file.write(array.reshape(-1).view(np.uint8).data)


def _header(names: list[str], declared: dict, metadata: Mapping[str, str] | None) -> bytes:
    entries: dict = {}
    if metadata:
        if not all(isinstance(text, str) for item in metadata.items() for text in item):
            raise ValueError(f"metadata must hold strings by name. Received: {metadata=}")
        entries["__metadata__"] = dict(metadata)
    offset = 0
    for name in names:
        code, shape, nbytes = declared[name]
        if name == "__metadata__":
            raise ValueError(f"arrays must not be named '__metadata__'. Received: {name=}")
        offsets = [offset, offset := offset + nbytes]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        rule = f"have names and shapes of at most {MAX_HEADER} bytes together"
        raise ValueError(f"arrays must {rule}. Received: {len(header)} bytes")
    return header


def _standard(name: str, value: np.ndarray) -> tuple[np.ndarray, str]:
    """The array in C order and little-endian, and its dtype's name."""
    array = np.asarray(value, order="C")  # np.ascontiguousarray turns a scalar into a vector
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in DTYPES:
        rule = f"have one of these dtypes: {', '.join(DTYPES)}"
        raise ValueError(f"arrays must {rule}. Received: name={name!r}, dtype={dtype}")
    if dtype == "bfloat16":
        return array, dtype
    return array.astype(array.dtype.newbyteorder("<"), copy=False), dtype

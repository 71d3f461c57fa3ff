"""What a weight file may declare of its arrays: the rules on shapes and dtypes, and the error.

Every reader here builds `Declared` records from a file's headers alone, and refuses what breaks a
rule before it reads, allocates or maps one byte of an array.
"""

import contextlib
import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

MAX_RANK = 8
"""Dimensions an array may have; four are the most a Vision Transformer needs, five if stacked."""
MAX_BYTES = 1 << 40
"""Bytes an array may declare: 1 TiB, a hundred times the largest published Vision Transformer."""

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""The dtypes that are read, and the NumPy dtype of their bytes."""
DTYPES["bfloat16"] = np.dtype("uint16")  # NumPy has none; `decode` makes float32 of it


ALIGNMENT = 64


class Refused(ValueError):
    """A weight file breaks a rule; the message names the file, the member, the rule."""


@dataclasses.dataclass(frozen=True)
class Declared:
    """One array as its header declares it; `dtype` is a key of `DTYPES`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes the array takes, uncompressed."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def declare(path: os.PathLike, name: str, shape: Sequence[int], dtype: str) -> Declared:
    """A `Declared` that keeps the rules, or `Refused`.

    Holds off dtypes whose bytes are not numbers, Python objects first of all (S1), and shapes that
    overflow NumPy's arithmetic or that no model has (S2).
    """
    if dtype not in DTYPES:
        rule = f"hold arrays of these dtypes only: {', '.join(DTYPES)}"
        raise refusal(path, rule, member=name, dtype=dtype)
    # To isinstance, True is an int.
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise refusal(path, "declare shapes of integers >= 0", member=name, shape=shape)
    if len(shape) > MAX_RANK:
        raise refusal(path, f"declare at most {MAX_RANK} dimensions", member=name, shape=shape)
    # A dimension of 0 must not hide the size of the others.
    if math.prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize > MAX_BYTES:
        rule = f"declare arrays of at most {MAX_BYTES} bytes"
        raise refusal(path, rule, member=name, shape=shape)
    return Declared(tuple(shape), dtype)


def aligned(nbytes: int) -> np.ndarray:
    """Bytes to fill, at an address that TensorFlow and JAX take over without a copy."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values behind stored bytes: bfloat16 becomes float32, exactly; others are as they are."""
    if dtype != "bfloat16":
        return raw
    bits = raw.astype(np.uint32)
    bits <<= 16  # bfloat16 is the upper half of a float32
    return bits.view(np.float32)


def check_shapes(
    path: str | os.PathLike,
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
) -> None:
    """Raises one error that lists every missing, extra and mis-shaped array (S3)."""
    wrong = [f"missing: {n!r} {tuple(expected[n])}" for n in expected if n not in shapes]
    wrong += [f"extra: {n!r} {tuple(shapes[n])}" for n in shapes if n not in expected]
    wrong += [
        f"other shape: {n!r} {tuple(shapes[n])}, expected {tuple(expected[n])}"
        for n in expected
        if n in shapes and tuple(shapes[n]) != tuple(expected[n])
    ]
    if wrong:
        raise mismatch(path, wrong)


def mismatch(path: str | os.PathLike, differences: list[str]) -> Refused:
    """The error for a sound file that holds other arrays than expected, a line each."""
    lines = [line if len(line) <= 300 else line[:300] + "..." for line in differences[:1000]]
    if len(differences) > len(lines):
        lines.append(f"and {len(differences) - len(lines)} more")
    listed = "\n  ".join(lines)
    rule = "hold exactly the expected arrays"
    return Refused(f"path must {rule}. Received: path={os.fspath(path)!r}\n  {listed}")


def refusal(path: str | os.PathLike, rule: str, **received: object) -> Refused:
    """The one error of this package for a bad file: the file, the rule and what was found.

    What was found comes from the file, so it is quoted and cut: a hostile name cannot fill a log
    or send control characters to a terminal.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 12
    found = [f"path={os.fspath(path)!r}", *(f"{k}={short.repr(v)}" for k, v in received.items())]
    return Refused(f"path must {rule}. Received: {', '.join(found)}")


@contextlib.contextmanager
def refused_as(
    path: str | os.PathLike, rule: str, errors: tuple[type[Exception], ...], **received: object
) -> Iterator[None]:
    """Turns `errors` that a parser raises inside the block into `refusal(path, rule, ...)`."""
    try:
        yield
    except Refused:
        raise
    except errors as error:
        said = str(error) or type(error).__name__
        raise refusal(path, rule, **received, error=said) from error

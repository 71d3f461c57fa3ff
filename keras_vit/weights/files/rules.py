"""Which files are refused: the rules on shapes and dtypes, and the error `Refused`.

Every reader creates `Declared` records from a file's headers, and refuses a file that breaks a rule
before it reads, allocates or maps one byte of an array.
"""

import contextlib
import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator, Sequence

import numpy as np

MAX_RANK = 8
"""Dimensions of an array. A Vision Transformer needs four, five with stacked blocks."""
MAX_BYTES = 1 << 40
"""Bytes of an array: 1 TiB, a hundred times the largest published Vision Transformer."""

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""The supported dtypes, and the NumPy dtype of their bytes."""
DTYPES["bfloat16"] = np.dtype("uint16")  # NumPy has no bfloat16: `decode` returns float32
ALIGNMENT = 64


class Refused(ValueError):
    """A file breaks a rule. The message names the file, the member and the rule."""


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
    """Checks a declared array.

    Refuses dtypes that are not numbers, Python objects above all (S1), and shapes that overflow
    NumPy's arithmetic or that no model has (S2).
    """
    if dtype not in DTYPES:
        rule = f"hold arrays of these dtypes only: {', '.join(DTYPES)}"
        raise refusal(path, rule, member=name, dtype=dtype)
    # type(), because isinstance counts True as an int.
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
    """An empty buffer, aligned so that TensorFlow and JAX use it without a copy."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values of stored bytes: bfloat16 becomes float32, exactly. Others are unchanged."""
    if dtype != "bfloat16":
        return raw
    bits = raw.astype(np.uint32)
    bits <<= 16  # bfloat16 is the upper half of a float32
    return bits.view(np.float32)


def mismatch(path: str | os.PathLike, differences: list[str]) -> Refused:
    """The error for a valid file with other arrays than expected, one line per difference."""
    lines = [line if len(line) <= 300 else line[:300] + "..." for line in differences[:1000]]
    if len(differences) > len(lines):
        lines.append(f"and {len(differences) - len(lines)} more")
    listed = "\n  ".join(lines)
    rule = "hold exactly the expected arrays"
    return Refused(f"path must {rule}. Received: path={os.fspath(path)!r}\n  {listed}")


def refusal(path: str | os.PathLike, rule: str, **received: object) -> Refused:
    """The error for a file that breaks a rule.

    Values from the file are quoted and truncated, so that they cannot fill a log or send control
    characters to a terminal.
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
    """Raises `refusal(path, rule, ...)` in place of `errors` that a parser raises in the block."""
    try:
        yield
    except Refused:
        raise
    except errors as error:
        said = str(error) or type(error).__name__
        raise refusal(path, rule, **received, error=said) from error

"""Builders of hostile weight files, and `refuse`, which checks that a file is refused."""

import json
import os
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from keras_vit.weights.files import arrays
from keras_vit.weights.files.rules import Refused

TIB = 1 << 40
FLAT = 8 << 20
"""Bytes that a refusal may allocate. The files declare 100 MiB and more."""


def refusal_of(function, *args):
    """The message of the `Refused` that a function must raise, using little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as error:
            function(*args)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < FLAT, peak
    return str(error.value)


def read_all(path):
    """Opens a file and reads every array."""
    with arrays.open_arrays(path) as file:
        return dict(file)


def refuse(path, *found):
    """Checks that reading a file raises a `Refused` that contains `found`, using little memory."""
    message = refusal_of(read_all, path)
    assert message.startswith("path must ") and "Received: path=" in message
    assert str(path) in message or str(path.parent) in message
    assert len(message) < 2000
    for text in found:
        assert re.search(text, message), (text, message)


class Canary:
    """An object whose unpickling creates a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def npy(shape=(3,), dtype="<f4", data=None, fortran=False, header=None):
    """The bytes of an .npy member, with a header of its own."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"
    text = (header or text).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    data = np.zeros(shape, dtype).tobytes() if data is None else data
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(path, *members, compression=zipfile.ZIP_STORED, attributes=None):
    """A zip file of (name, bytes) members, duplicates and odd names included."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members:
            info = zipfile.ZipInfo("x")
            info.filename = name  # ZipInfo's own check would change it
            info.compress_type = compression
            info.external_attr = (attributes or 0o600) << 16
            file.writestr(info, data)
    return path


def tensors(path, header, data=b"", length=None):
    """A safetensors file of a dict, or of any bytes as its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def entry(begin=0, end=12, shape=(3,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}

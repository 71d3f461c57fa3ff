"""Reads .npz files that others wrote: lazily, from checked headers, without np.load.

An .npz is a zip archive of .npy members. Nothing is extracted to the disk, so a member's name is
only a key. Names that would be dangerous to extract are refused anyway, because no writer of
weights creates them.
"""

import os
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from keras_vit.weights.files import pickles
from keras_vit.weights.files.rules import (
    DTYPES,
    Declared,
    aligned,
    declare,
    decode,
    refusal,
    refused_as,
)

MAX_DIRECTORY = 4 << 20
"""Bytes of the zip directory: 4 MiB hold about 30,000 arrays."""
MAX_HEADER = 1024
"""Characters of an array's header; NumPy writes 118."""
MAX_INFLATION = 20
"""Declared bytes per byte of a compressed file; trained weights reach 1.1."""
SMALL = 16 << 20
"""Bytes that a file may declare at any ratio: a tiny model of zeros is not a zip bomb."""
CHUNK = 1 << 18

BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError),
)
"""What zipfile raises on a corrupt file."""


class NpzReader:
    """The arrays of an open .npz file, for `arrays.open_arrays`."""

    def __init__(self, file: BinaryIO, path: Path):
        self.path, self.metadata = path, {}
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._directory, count = self._find_directory()
        with refused_as(path, "be a whole zip archive", BROKEN):
            self._zip = zipfile.ZipFile(file)
        members = self._zip.infolist()
        if len(members) != count:  # one bit in a comment's length hides the members after it
            raise refusal(path, f"list the {count} members it counts", found=len(members))
        pickles.refuse_archive(path, [member.filename for member in members])
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            self._check_member(member)
            name = member.filename.removesuffix(".npy")
            if name in self._members:
                raise refusal(path, "name every array once", member=member.filename)
            self._members[name] = member
        self._check_sizes()
        self._layouts: dict[str, tuple[np.dtype, bool]] = {}
        self.declared = {name: self._read_header(name) for name in self._members}

    def close(self) -> None:
        """Closes the file."""
        self._zip.close()
        self._file.close()

    def read_array(self, name: str) -> np.ndarray:
        """Reads one array. Refuses a member that is truncated or changed (S4).

        At the end of the member, zipfile compares the checksum with the directory's.
        """
        declared, member = self.declared[name], self._members[name]
        dtype, fortran = self._layouts[name]
        array = aligned(declared.nbytes)
        rule = "hold every array whole and unchanged"
        with refused_as(self.path, rule, BROKEN, member=member.filename):
            with self._zip.open(member) as stream:
                stream.read(member.file_size - declared.nbytes)  # a seek would skip the checksum
                _fill(stream, array.data)
        array = array.view(dtype)
        if not dtype.isnative:
            array = array.byteswap(inplace=True).view(dtype.newbyteorder("="))
        array = decode(array, declared.dtype)
        if fortran:
            return array.reshape(declared.shape[::-1]).T
        return array.reshape(declared.shape)

    def _find_directory(self) -> tuple[int, int]:
        """Where the zip directory starts and how many members it has, from the end record.

        Refuses a file that is truncated or has bytes appended (S4), an archive that starts after
        another file's bytes, and a directory too long for the memory (S2).
        """
        rule = "end with the directory of a zip archive, with nothing cut off or appended"
        self._file.seek(max(self._size - 98, 0))
        tail = self._file.read(98)
        record, end = tail[-22:], self._size - 22
        if record[:4] != b"PK\5\6" or record[20:] != b"\0\0":  # the last two: a comment's length
            raise refusal(self.path, rule, bytes=self._size)
        count, length, start = struct.unpack("<HLL", record[10:20])
        if tail[-42:-38] == b"PK\6\7":  # zip64: the numbers are in a longer record before it
            record, end = tail[-98:-42], self._size - 98
            if record[:12] != b"PK\6\6" + struct.pack("<Q", 44):
                raise refusal(self.path, rule, bytes=self._size)
            count, length, start = struct.unpack("<QQQ", record[32:56])
        if start + length != end:
            raise refusal(self.path, rule, bytes=self._size)
        if length > MAX_DIRECTORY:
            rule = f"have a zip directory of at most {MAX_DIRECTORY} bytes"
            raise refusal(self.path, rule, directory=length)
        return start, count

    def _check_member(self, member: zipfile.ZipInfo) -> None:
        """Refuses members that are not plain arrays: links, encryption, dangerous names (S7)."""
        name = member.filename
        if name != member.orig_filename:  # zipfile truncates a name at its first NUL
            raise refusal(self.path, "have no NUL in a name", member=member.orig_filename)
        if broken := broken_name(name):
            raise refusal(self.path, broken, member=name)
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise refusal(self.path, "hold plain members, no links", member=name)
        if member.flag_bits & 0x2041:  # encrypted, strongly encrypted, masked directory
            raise refusal(self.path, "not be encrypted", member=name)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            rule = "hold members that are stored or deflated"
            raise refusal(self.path, rule, member=name, compression=member.compress_type)

    def _check_sizes(self) -> None:
        """Refuses sizes that exceed the file's own bytes: zip bombs and overlaps (S2)."""
        for member in self._members.values():
            begin = member.header_offset + 30 + len(member.filename)  # after the local header
            if begin + member.compress_size > self._directory or (
                member.compress_type == zipfile.ZIP_STORED
                and member.compress_size != member.file_size
            ):
                rule = f"hold the bytes its directory declares; the file has {self._size}"
                raise refusal(self.path, rule, member=member.filename, declared=member.file_size)
        if sum(member.compress_size for member in self._members.values()) > self._size:
            raise refusal(self.path, "hold members that do not overlap", bytes=self._size)
        declared = sum(member.file_size for member in self._members.values())
        if declared > max(SMALL, MAX_INFLATION * self._size):
            largest = max(self._members.values(), key=lambda member: member.file_size)
            rule = f"declare at most {MAX_INFLATION} times its own {self._size} bytes"
            raise refusal(self.path, rule, declared=declared, member=largest.filename)

    def _read_header(self, name: str) -> Declared:
        """What the .npy header of one member declares.

        Refuses pickles (S1: an object dtype is refused here, and nothing in this file unpickles),
        headers long enough to exhaust Python's parser, and a shape that does not match the
        member's size (S2, S4).
        """
        member = self._members[name]
        rule = f"hold .npy members of format 1.0 with a header of at most {MAX_HEADER} characters"
        # NumPy parses untrusted text here: whatever it raises, the file is refused.
        with refused_as(self.path, rule, (Exception,), member=member.filename):
            with self._zip.open(member) as stream:
                # Formats 2 and 3 are for records, and allow headers of 4 GiB.
                if (version := np.lib.format.read_magic(stream)) != (1, 0):
                    raise ValueError(f"format {version}")
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, MAX_HEADER)
                start = stream.tell()
        if dtype == np.dtype("V2"):  # how np.savez stores bfloat16
            declared = declare(self.path, member.filename, shape, "bfloat16")
            dtype = DTYPES["bfloat16"].newbyteorder("<")
        else:
            plain = dtype.newbyteorder("=").name if dtype.subdtype is None else str(dtype)
            declared = declare(self.path, member.filename, shape, plain)
        if start + declared.nbytes != member.file_size:
            rule = f"hold {declared.nbytes} bytes for shape {declared.shape}, {declared.dtype}"
            found = member.file_size - start
            raise refusal(self.path, rule, member=member.filename, bytes=found)
        self._layouts[name] = (dtype, fortran)
        return declared


def broken_name(name: str) -> str | None:
    """The rule that a member's name breaks, or None (S7)."""
    if not name.endswith(".npy") or name == ".npy":
        return "hold .npy members only"
    parts = name.split("/")
    if "\\" in name or ":" in parts[0] or not all(parts) or not {".", ".."}.isdisjoint(parts):
        return "name members by plain relative paths"
    return None


def _fill(stream: IO[bytes], view: memoryview) -> None:
    at = 0
    while at < len(view):
        block = stream.read(min(CHUNK, len(view) - at))
        if not block:
            raise EOFError("the member ends early")
        view[at : at + len(block)] = block
        at += len(block)

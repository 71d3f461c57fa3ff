"""Hostile .npz files (S1-S4, S7), files of unknown formats, and the memory of a refusal."""

import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import textwrap
import zipfile

import h5py
import numpy as np
import pytest
from hostile import TIB, Canary, archive, entry, npy, refuse, tensors

from keras_vit.weights.files import arrays, npz, writers
from keras_vit.weights.files.h5 import check_weights_h5
from keras_vit.weights.files.rules import Refused

pytestmark = pytest.mark.backend_free


def patched(path, position, data):
    """The same file with the bytes at `position` replaced."""
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)
    return path


def test_valid_npz_is_read(tmp_path):  # the control: the cases below are variations of it
    path = archive(tmp_path / "x.npz", ("a/b.npy", npy()), ("c.npy", npy((2, 3), ">f8")))
    with arrays.open_arrays(path) as file:
        assert file.shapes == {"a/b": (3,), "c": (2, 3)}
        assert np.array_equal(file["c"], np.zeros((2, 3)))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_with_a_pickle_is_refused_before_unpickling(tmp_path, shape, compression):
    canary = tmp_path / "canary"
    payload = pickle.dumps(np.full(shape, Canary(canary), object))
    members = ("good.npy", npy()), ("evil.npy", npy(shape, "|O", payload))
    refuse(archive(tmp_path / "x.npz", *members, compression=compression), "'evil.npy'", "object")
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists()  # the payload works


@pytest.mark.parametrize(
    "dtype",
    [[("a", "|O")], [("a", "<f4")], "<U4", "|S4", "<c8", "<M8[s]", "<f16", "|V4", "<V3"],
)
def test_npz_with_dtypes_other_than_numbers_is_refused(tmp_path, dtype):
    member = npy((1,), dtype, bytes(16))
    refuse(archive(tmp_path / "x.npz", ("a.npy", member)), "of these dtypes only", "'a.npy'")


@pytest.mark.parametrize(
    "header",
    [
        "__import__('os').system('true')",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3",
        "{'descr': 7, 'fortran_order': False, 'shape': (3,)}",
        "{'descr': ('<f4', (3,)), 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3.0,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -3)}",
        "{'descr': '<f4', 'fortran_order': 2, 'shape': (3,)}",
        "(" * 900,
        "-" * 900,
        "[" * 20000,
        " " * 2000 + "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}",
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 9 + (3,)}}}",
        "",
    ],
)
def test_npz_with_a_broken_header_is_refused(tmp_path, header):
    member = npy(header=header or "{}", data=bytes(12))
    refuse(archive(tmp_path / "x.npz", ("a.npy", member)), "'a.npy'")


@pytest.mark.parametrize("version", [b"\x02\x00", b"\x03\x00", b"\x09\x00"])
def test_npz_of_another_format_version_is_refused(tmp_path, version):
    # Format 2.0 has four bytes for the header's length, which here is 4 GiB.
    member = b"\x93NUMPY" + version + b"\xff\xff\xff\xff" + npy()[10:]
    refuse(archive(tmp_path / "x.npz", ("a.npy", member)), "format 1.0", "'a.npy'")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "shape",
    [(TIB,), (1 << 20, 1 << 20), (1 << 62, 0), (1 << 32, 1 << 32), (4,), (2,), (0, 1 << 60)],
)
def test_npz_that_declares_another_shape_than_it_holds_is_refused(tmp_path, shape, compression):
    member = npy(shape, data=bytes(12))
    path = archive(tmp_path / "x.npz", ("a.npy", member), compression=compression)
    refuse(path, "'a.npy'", "bytes")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_whose_directory_declares_4_tib_is_refused(tmp_path, compression):
    member = npy((TIB,), data=bytes(12))
    path = archive(tmp_path / "x.npz", ("a.npy", member), compression=compression)
    content = path.read_bytes()
    start = content.index(b"PK\1\2")
    entry = bytearray(content[start:-22])
    compressed = struct.unpack("<L", entry[20:24])[0]
    entry[24:28] = b"\xff\xff\xff\xff"  # the size is in a zip64 field
    entry[30:32] = struct.pack("<H", 12)
    entry += struct.pack("<HHQ", 1, 8, 4 * TIB + 128)
    end = bytearray(content[-22:])
    end[12:16] = struct.pack("<L", len(entry))
    path.write_bytes(content[:start] + entry + end)
    refuse(path, "'a.npy'", str(4 * TIB + 128), "declare")
    assert compressed < 1000


@pytest.mark.parametrize("megabytes", [100, 17])
def test_npz_bomb_is_refused_from_its_directory(tmp_path, megabytes):
    size = megabytes << 20
    noise = np.random.default_rng(0).bytes(size // 100)  # 100 : 1 for the whole file
    bomb = npy((size // 4,), data=bytes(size))
    members = ("noise.npy", npy((len(noise),), "|u1", noise)), ("bomb.npy", bomb)
    path = archive(tmp_path / "x.npz", *members, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size * 80 < size
    refuse(path, "declare at most 20 times its own", "'bomb.npy'")


def test_small_model_of_zeros_is_no_bomb(tmp_path):
    writers.write_npz(tmp_path / "x.npz", {"a": np.zeros((1 << 20,))}, compressed=True)
    with arrays.open_arrays(tmp_path / "x.npz") as file:
        assert file["a"].sum() == 0


def test_npz_that_inflates_beyond_its_size_is_refused(tmp_path):
    path = archive(
        tmp_path / "x.npz",
        ("a.npy", npy((3,), data=bytes(64 << 20))),
        compression=zipfile.ZIP_DEFLATED,
    )
    content = path.read_bytes()
    directory = content.index(b"PK\1\2")
    patched(path, directory + 24, struct.pack("<L", 128 + 12))
    refuse(path, "'a.npy'")


@pytest.mark.parametrize(
    "name, rule",
    [
        ("../a.npy", "plain relative paths"),
        ("a/../../b.npy", "plain relative paths"),
        ("a/..", "npy members only"),
        ("/etc/a.npy", "plain relative paths"),
        ("//host/a.npy", "plain relative paths"),
        ("C:/a.npy", "plain relative paths"),
        ("C:a.npy", "plain relative paths"),
        ("..\\a.npy", "plain relative paths"),
        ("./a.npy", "plain relative paths"),
        ("a//b.npy", "plain relative paths"),
        ("a.npy\0b.npy", "no NUL"),
        ("a", "npy members only"),
        ("a/", "npy members only"),
        (".npy", "npy members only"),
        ("a.py", "npy members only"),
    ],
)
def test_npz_with_a_dangerous_name_is_refused(tmp_path, name, rule):
    path = archive(tmp_path / "x.npz", ("good.npy", npy()), (name, npy()))
    refuse(path, rule, re.escape(repr(name)))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR])
def test_npz_with_a_link_is_refused(tmp_path, kind):
    path = archive(tmp_path / "x.npz", ("a.npy", b"/etc/passwd"), attributes=kind | 0o777)
    refuse(path, "no links", "'a.npy'")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_npz_with_a_duplicate_name_is_refused(tmp_path):
    members = ("a.npy", npy()), ("b.npy", npy()), ("a.npy", npy((2,)))
    refuse(archive(tmp_path / "x.npz", *members), "every array once", "'a.npy'")


@pytest.mark.parametrize("bit", [0x1, 0x40, 0x2000])
def test_npz_with_encryption_is_refused(tmp_path, bit):
    path = archive(tmp_path / "x.npz", ("a.npy", npy()))
    directory = path.read_bytes().index(b"PK\1\2")
    for position in (6, directory + 8):
        patched(path, position, struct.pack("<H", bit))
    refuse(path, "encrypted|encryption|whole zip")


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_with_another_compression_is_refused(tmp_path, compression):
    path = archive(tmp_path / "x.npz", ("a.npy", npy()), compression=compression)
    refuse(path, "stored or deflated", "'a.npy'", f"compression={compression}")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_truncated_anywhere_is_refused(tmp_path, compression):
    data = np.random.default_rng(0).bytes(1200)
    path = archive(tmp_path / "x.npz", ("a.npy", npy((300,), data=data)), compression=compression)
    content = path.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        refuse(path)


@pytest.mark.parametrize(
    "extra, where", [(b"\0", "end"), (b"PK\5\6" + bytes(18), "end"), (b"\0" * 64, "start")]
)
def test_npz_with_added_bytes_is_refused(tmp_path, extra, where):
    content = archive(tmp_path / "x.npz", ("a.npy", npy())).read_bytes()
    path = tmp_path / "y.npz"
    path.write_bytes(content + extra if where == "end" else extra + content)
    refuse(path)


def test_npz_with_a_comment_is_refused(tmp_path):
    path = archive(tmp_path / "x.npz", ("a.npy", npy()))
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"hidden"
    refuse(path, "nothing cut off or appended")
    path = archive(tmp_path / "y.npz", ("a.npy", npy()))
    patched(path, path.stat().st_size - 2, b"\1")  # a comment that is missing
    refuse(path, "nothing cut off or appended")


def test_npz_with_overlapping_members_is_refused(tmp_path):
    path = archive(tmp_path / "x.npz", ("a.npy", npy()), ("b.npy", npy((999,))))
    content = path.read_bytes()
    entry = content.index(b"PK\1\2")
    patched(path, entry + 20, struct.pack("<LL", entry - 35, entry - 35))
    refuse(path, "do not overlap")


def test_npz_member_that_reaches_into_the_directory_is_refused(tmp_path):
    path = archive(tmp_path / "x.npz", ("a.npy", npy((8,), data=bytes(12))))
    entry = path.read_bytes().index(b"PK\1\2")
    patched(path, entry + 20, struct.pack("<LL", 128 + 32, 128 + 32))
    refuse(path, "hold the bytes its directory declares", "'a.npy'")


def test_npz_changed_anywhere_is_refused_or_reads_the_same(tmp_path):
    path = archive(tmp_path / "x.npz", ("a/b.npy", npy((2, 3))), ("c.npy", npy((1,), "|V2", b"ab")))
    with arrays.open_arrays(path) as file:
        before = {name: file[name].tolist() for name in file}
    content, refused = path.read_bytes(), 0
    for position in range(len(content)):
        for bit in (position % 8, (position + 3) % 8):
            patched(path, position, bytes([content[position] ^ 1 << bit]))
            try:
                with arrays.open_arrays(path) as file:
                    assert {name: file[name].tolist() for name in file} == before, (position, bit)
            except Refused:
                refused += 1
            path.write_bytes(content)
    assert refused > len(content)


def test_npz_with_a_long_directory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = archive(tmp_path / "x.npz", *((f"{i:02}.npy", npy()) for i in range(40)))
    monkeypatch.setattr(npz, "MAX_DIRECTORY", 40 * (46 + 6))
    with arrays.open_arrays(path) as file:
        assert len(file) == 40
    monkeypatch.setattr(npz, "MAX_DIRECTORY", 40 * (46 + 6) - 1)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    refuse(path, "directory of at most")


# -- files of unknown formats


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"\0" * 8, b"\xff" * 8 + b"{", b"[1, 2]", b"\0" * 99]
)
def test_files_of_unknown_formats_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    refuse(tmp_path / "x.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    refuse(tmp_path / "x.npz", "regular file")
    with pytest.raises(Refused, match="regular file"):
        check_weights_h5(tmp_path / "x.npz")


# -- memory, as the system measures it

MEASURE = """
    import resource, sys
    from keras_vit.weights.files.arrays import open_arrays
    from keras_vit.weights.files.h5 import check_weights_h5
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in sys.argv[1:]:
        try:
            if path.endswith(".h5"):
                check_weights_h5(path)
            else:
                with open_arrays(path) as file:
                    dict(file)
        except ValueError as error:
            assert "path must" in str(error)
        else:
            sys.exit(f"accepted: {path}")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kB on Linux")
def test_refusing_needs_no_memory(tmp_path):
    size = 256 << 20
    h5 = tmp_path / "x.weights.h5"
    with h5py.File(h5, "w") as file:
        file.create_dataset("x", (1 << 20, 1 << 20), "float32")
        file.create_dataset("y", data=np.zeros(size // 8), compression="gzip")
    bomb, declared = tmp_path / "bomb.npz", tmp_path / "declared.npz"
    archive(bomb, ("a.npy", npy((size,), "|u1", bytes(size))), compression=zipfile.ZIP_DEFLATED)
    archive(declared, ("a.npy", npy((TIB,), data=bytes(12))))
    header = tensors(tmp_path / "x.safetensors", {"a": entry(0, 12, (1 << 38,))}, bytes(12))
    files = [str(path) for path in (bomb, declared, header, h5)]
    run = [sys.executable, "-c", textwrap.dedent(MEASURE), *files]
    grown = subprocess.run(run, capture_output=True, text=True, check=False)
    assert grown.returncode == 0, grown.stderr
    assert int(grown.stdout.split()[-1]) < 32 << 10  # kB, h5py's own import included

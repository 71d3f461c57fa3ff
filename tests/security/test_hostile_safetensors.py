"""Hostile safetensors files and indices of shards (S2-S4, S7)."""

import json
import os

import pytest
from hostile import TIB, entry, refuse, tensors

from keras_vit.weights.files import arrays

pytestmark = pytest.mark.backend_free


def test_valid_safetensors_are_read(tmp_path):  # the control
    header = {"b": entry(12, 24), "a": entry(), "none": entry(12, 12, (0, 7))}
    with arrays.open_arrays(tensors(tmp_path / "x.safetensors", header, bytes(24))) as file:
        assert file.shapes == {"b": (3,), "a": (3,), "none": (0, 7)}
        assert file["none"].shape == (0, 7)


@pytest.mark.parametrize(
    "header, found",
    [
        ({"a": entry(), "b": entry(8, 20)}, "without gap or overlap"),
        ({"a": entry(), "b": entry()}, "without gap or overlap"),
        ({"a": entry(4, 16), "b": entry(16, 24, (2,))}, "without gap or overlap"),
        ({"a": entry(), "b": entry(16, 24, (2,))}, "without gap or overlap"),
        ({"a": entry()}, "end with its last array"),
        ({}, "end with its last array"),
        ({"a": entry(0, 28, (7,))}, "offsets .* within the file"),
        ({"a": entry(-12, 0)}, "offsets .* within the file"),
        ({"a": entry(24, 12)}, "offsets .* within the file"),
        ({"a": entry(0.0, 12.0)}, "offsets .* within the file"),
        ({"a": entry(False, 12)}, "offsets .* within the file"),
        ({"a": entry(0, 24)}, "12 bytes for shape"),
        ({"a": entry(0, 24, (TIB,))}, "at most|bytes for shape"),
        ({"a": entry(0, 0, (1 << 62, 0)), "b": entry(0, 24, (6,))}, "at most"),
        ({"a": entry(0, 24, (1 << 40, 1 << 40))}, "at most"),
        ({"a": entry(0, 24, (-6, -1))}, "integers >= 0"),
        ({"a": entry(0, 24, (6.0,))}, "integers >= 0"),
        ({"a": entry(0, 4, (True,))}, "integers >= 0"),
        ({"a": entry(0, 24, (6,) + (1,) * 8)}, "dimensions"),
        ({"a": {**entry(), "shape": 6}}, "integers >= 0"),
        ({"a": entry(0, 24, (24,), "F8_E4M3")}, "of these dtypes only.*F8_E4M3"),
        ({"a": entry(0, 24, (3,), "C64")}, "of these dtypes only"),
        ({"a": entry(0, 24, (6,), "float32\x1b[2J")}, r"of these dtypes only.*\\x1b"),
        ({"a": entry(0, 24, (6,), ["F32"])}, "of these dtypes only"),
        ({"a": entry(0, 24, (6,), None)}, "of these dtypes only"),
        ({"a": entry(0, 24, (6,), more=1)}, "declare dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "declare dtype, shape and data_offsets"),
        ({"a": [1, 2]}, "declare dtype, shape and data_offsets"),
        ({"__metadata__": {"k": 1}, "a": entry(0, 24, (6,))}, "metadata of strings"),
        ({"__metadata__": "k", "a": entry(0, 24, (6,))}, "metadata of strings"),
        (b'{"a":' + json.dumps(entry(0, 24, (6,))).encode() + b',"a":0}', "each name once.*'a'"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', "each name once.*'k'"),
        (b'{"a": ', "JSON"),
        (b"{\xff\xfe}", "JSON"),
        (b'{"a":' * 100_000, "JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "JSON"),
        (b'{"a":NaN}', "declare dtype"),
        (b'{"' + b"x" * 100_000 + b'":0}', "declare dtype"),
    ],
)
def test_safetensors_with_a_broken_header_are_refused(tmp_path, header, found):
    refuse(tensors(tmp_path / "x.safetensors", header, bytes(24)), found)


@pytest.mark.parametrize("length", [1 << 47, 100 << 20, 5 << 20, 300, 87])
def test_safetensors_with_a_header_beyond_the_file_are_refused(tmp_path, length):
    path = tensors(tmp_path / "x.safetensors", {"a": entry()}, bytes(12), length)
    if length == 100 << 20:
        os.truncate(path, 200 << 20)  # too long, but there: a sparse file
    refuse(path, f"header={length}" if length != 87 else "header")


def test_safetensors_truncated_anywhere_are_refused(tmp_path):
    path = tensors(tmp_path / "x.safetensors", {"a": entry(), "b": entry(12, 24)}, bytes(24))
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refuse(path)
    path.write_bytes(content + b"\0")
    refuse(path, "end with its last array")


# -- shards


@pytest.mark.parametrize(
    "weight_map, found",
    [
        (
            {"a": "one.safetensors", "b": "gone.safetensors"},
            "one folder with every shard.*'gone.safe",
        ),
        ({"a": "one.safetensors", "b": "twice.safetensors"}, "in one shard.*member='a'"),
        ({"a": "../one.safetensors"}, r"files beside it.*'\.\./one"),
        ({"a": "/etc/one.safetensors"}, "files beside it"),
        ({"a": "sub/one.safetensors"}, "files beside it"),
        ({"a": "..\\one.safetensors"}, "files beside it"),
        ({"a": "C:one.safetensors"}, "files beside it"),
        ({"a": "one.safetensors\0"}, "files beside it"),
        ({"a": "one.bin"}, "files beside it"),
        ({"a": 1}, "files beside it"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "exactly the arrays.*'c'"),
        ({"c": "one.safetensors"}, "exactly the arrays"),
        ({}, "weight_map"),
        (["one.safetensors"], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_index_that_contradicts_its_shards_is_refused(tmp_path, weight_map, found):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for place in (folder, folder / "sub", tmp_path):
        tensors(place / "one.safetensors", {"a": entry()}, bytes(12))
    tensors(folder / "twice.safetensors", {"b": entry(), "a": entry(12, 24)}, bytes(24))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with arrays.open_arrays(index) as file:  # the control
        assert list(file) == ["a"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    refuse(index, found)


def test_index_that_is_not_an_object_or_too_long_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text in ("", "[]", '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'):
        index.write_text(text)
        refuse(index, "JSON")
    index.touch()
    os.truncate(index, 5 << 20)
    refuse(index, "index of at most")

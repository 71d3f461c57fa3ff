"""JSON documents are checked against a shape; an error names the file and the field."""

import json

import pytest

from keras_vit.weights.files.documents import (
    COUNT,
    FLAG,
    INT,
    MAX_JSON,
    NAMES,
    NUMBER,
    OBJECT,
    TEXT,
    check_fields,
    not_null,
    one_of,
    parse_document,
    read_document,
    stated,
)
from keras_vit.weights.files.rules import Refused

pytestmark = pytest.mark.backend_free
SHAPE = {
    "format": stated(INT),
    "kind": one_of("a", "b", None),
    "names": NAMES,
    "position": stated(OBJECT, {"step": stated(COUNT), "rate": NUMBER}),
    "model": {"name": TEXT, "inner": {"flag": FLAG}},
    "run": not_null({}),
}
WHOLE = {
    "format": 1,
    "kind": "a",
    "names": ["x"],
    "position": {"step": 3, "rate": 0.5},
    "model": {"name": "m", "inner": {"flag": True}, "more": 5},
    "run": {},
    "others": [1],
}


def test_whole_document_is_returned(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(WHOLE))
    assert read_document(tmp_path / "a.json", SHAPE) == WHOLE
    check_fields("x", {"format": 1, "position": {"step": 0}}, SHAPE)
    check_fields("x", {**WHOLE, "model": None, "kind": None, "names": None}, SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": True}, "state format as an int.*format=True"),
        ({"format": None}, "state format as an int.*format=None"),
        ({"kind": 0}, "state kind as one of 'a', 'b', None.*kind=0"),
        ({"kind": ["a"]}, "kind="),
        ({"names": ["x", 1]}, "state names as a list of strings"),
        ({"names": ["\ud800"]}, "state names as a list of strings"),
        ({"position": None}, "state position as an object.*position=None"),
        ({"position": {}}, "state position.step as an int of at least 0. .*fields="),
        ({"position": {"step": -1}}, "position.step=-1"),
        ({"position": {"step": 10**20}}, "position.step=1000"),
        ({"position": {"step": 1, "rate": float("nan")}}, "position.rate=nan"),
        ({"model": 5}, "state model as an object"),
        ({"model": {"inner": {"flag": 1}}}, "state model.inner.flag as true or false"),
        ({"run": None}, "state run as an object.*run=None"),
    ],
)
def test_wrong_fields_are_named(tmp_path, changes, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**WHOLE, **changes}))
    with pytest.raises(Refused, match=f"^path must .*{message}") as error:
        read_document(path, SHAPE)
    assert str(path) in str(error.value)


def test_missing_field_is_named():
    with pytest.raises(Refused, match=r"state format as an int.*x.json.*fields=\['position'\]"):
        check_fields("x.json", {"position": {"step": 1}}, SHAPE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b'{"a": 1',
        b'{"a": 1, "a": 2}',
        b"\xff{}",
        b"[" * 10**5,
        b'{"a": ' + b"1" * 5000,
    ],
)
def test_other_documents_are_refused(data):
    with pytest.raises(Refused, match="hold one JSON object with each name once.*x.json"):
        parse_document("x.json", data)


def test_large_or_special_files_are_not_read(tmp_path):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_JSON + 1)
    with pytest.raises(Refused, match="be a file of at most .*large.json"):
        read_document(large)
    with pytest.raises(Refused, match="be a regular file"):
        read_document(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_document(tmp_path / "none.json")

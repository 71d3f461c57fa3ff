"""JSON and tensors, by the rules of TensorFlow Serving."""

import base64
import json

import numpy as np
import pytest

from keras_vit.serve import tensors
from keras_vit.serve.errors import RequestError
from keras_vit.serve.signatures import Tensor

pytestmark = pytest.mark.backend_free

FLOATS = Tensor("float32", (-1, 2))
PIXELS = Tensor("uint8", (-1, 2))
FILES = Tensor("string", (-1,))
B64 = {"b64": base64.b64encode(b"\xff\x00").decode()}


def read(request, tensor=FLOATS, name="x"):
    return tensors.to_tensor(tensors.parse(json.dumps(request).encode()), name, tensor)


@pytest.mark.parametrize(
    ("request_", "tensor", "expected", "rows"),
    [
        ({"instances": [[1, 2.5], [3, 4]]}, FLOATS, [[1, 2.5], [3, 4]], True),
        ({"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}, FLOATS, [[1, 2], [3, 4]], True),
        ({"inputs": [[1, 2]]}, FLOATS, [[1, 2]], False),
        ({"inputs": {"x": [[1, 2]]}}, FLOATS, [[1, 2]], False),
        ({"inputs": []}, FILES, [], False),
        ({"inputs": 1}, FLOATS, 1, False),
        ({"instances": [[0, 255]]}, PIXELS, [[0, 255]], True),
        ({"instances": [B64, {"x": B64}][:1]}, FILES, [b"\xff\x00"], True),
        ({"instances": [{"x": B64}]}, FILES, [b"\xff\x00"], True),
        ({"inputs": {"x": [B64, "ab"]}}, FILES, [b"\xff\x00", b"ab"], False),
    ],
)
def test_both_forms_are_read(request_, tensor, expected, rows):
    array, found = read(request_, tensor)
    assert (array.tolist(), found) == (expected, rows)
    assert array.dtype == (object if tensor is FILES else tensor.dtype)


@pytest.mark.parametrize(
    ("body", "tensor", "message"),
    [
        ({"instances": [[1, 2], [3]]}, FLOATS, "Expecting tensor size: 2 but got: 1"),
        (
            {"instances": [[[1, 2]], [[3], [4]]]},
            FLOATS,
            r"Expecting shape \[1,2\] but got: \[2,1\]",
        ),
        ({"instances": [[[1], [2, 3]]]}, FLOATS, "unexpected size: 2 at level: 1"),
        ({"instances": [[1, [2]]]}, FLOATS, "unexpected level"),
        ({"instances": [[[2], 1]]}, FLOATS, "incorrect level"),
        ({"instances": [[1, True]]}, FLOATS, "Type: True is not of expected type: float"),
        ({"instances": [[1, None]]}, FLOATS, "Type: Null is not of expected type: float"),
        ({"instances": [[10**400, 1]]}, FLOATS, "without loss of precision"),
        ({"instances": [[0, 256]]}, PIXELS, "256 to uint8"),
        ({"instances": [[0, 1.5]]}, PIXELS, "Type: Number is not of expected type: uint8"),
        ({"instances": [B64, [1]]}, FILES, "not of expected type|but got"),
        ({"instances": [{"b64": "%"}]}, FILES, "Unable to base64 decode"),
        ({"instances": [{"y": B64}]}, FILES, "does not have named input: y"),
        ({"instances": [{"x": B64, "b64": 1}]}, FILES, "does not have named input: b64"),
        ({"instances": [[1, 2], {"x": [1, 2]}]}, FLOATS, "Expecting value/list but got object"),
        ({"inputs": {"y": 1}}, FLOATS, "Missing named input: x"),
    ],
)
def test_what_is_no_tensor_is_refused(body, tensor, message):
    with pytest.raises(RequestError, match=message) as caught:
        read(body, tensor)
    assert caught.value.status == 400


def test_examples_of_classify_are_objects_of_one_feature():
    def examples(*values):
        return tensors.from_examples({"examples": list(values)}, "x", FILES).tolist()

    assert examples({"x": "ab"}, {"x": [B64]}) == [b"ab", b"\xff\x00"]
    for wrong in ({}, {"examples": []}, {"examples": {"x": "ab"}}, {"examples": "ab"}):
        with pytest.raises(RequestError, match="'examples' is expected to be a non-empty list"):
            tensors.from_examples(wrong, "x", FILES)
    for wrong in ("ab", {}, {"y": "ab"}, {"x": "ab", "y": "ab"}):
        with pytest.raises(RequestError, match="must be JSON object with the feature x but got"):
            examples(wrong)
    assert examples({"x": ["ab", "cd"]}) == [[b"ab", b"cd"]]  # whose shape no signature has


def test_answers_have_the_form_of_the_request():
    outputs = {"a": np.float32([[0.1], [1]]), "b": np.array(["x", "é"], object)}
    assert json.loads(tensors.to_json(outputs, rows=True)) == {
        "predictions": [{"a": [0.1], "b": "x"}, {"a": [1.0], "b": "é"}]
    }
    assert json.loads(tensors.to_json(outputs, rows=False)) == {
        "outputs": {"a": [[0.1], [1.0]], "b": ["x", "é"]}
    }
    alone = {"a": outputs["a"]}
    assert json.loads(tensors.to_json(alone, rows=True)) == {"predictions": [[0.1], [1.0]]}
    assert json.loads(tensors.to_json(alone, rows=False)) == {"outputs": [[0.1], [1.0]]}
    third = np.float32(1) / np.float32(3)
    (text,) = json.loads(tensors.to_json({"a": third[None]}, rows=True))["predictions"]
    assert text == 0.33333334 and np.float32(text) == third


def test_errors_repeat_only_the_beginning():
    with pytest.raises(RequestError) as caught:
        read({"instances": [[0.5] * 10_000], "inputs": 1})
    assert len(str(caught.value)) < 500

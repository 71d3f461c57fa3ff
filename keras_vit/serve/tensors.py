"""JSON <-> tensors by the rules of TensorFlow Serving's REST interface.

Row form is {"instances": [...]} -> {"predictions": [...]}, column form {"inputs": ...} ->
{"outputs": ...}; {"b64": "..."} is bytes. Errors are worded as TensorFlow Serving words them.
"""

import base64
import binascii
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.serve.errors import invalid
from keras_vit.serve.signatures import Tensor

TF_NAMES = {"float32": "float", "uint8": "uint8", "string": "string"}
SHOWN = 200
"""Most characters of a request that an error repeats; TensorFlow Serving repeats all of it."""


def parse(body: bytes) -> dict[str, Any]:
    """A request's body: an object; NaN and Infinity may stand in it."""
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        offset = getattr(error, "pos", 0)
        raise invalid(f"JSON Parse error: Invalid value. at offset: {offset}") from None
    if not isinstance(request, dict):
        raise invalid(f"JSON Value: {_show(request)} Is not object")
    if not isinstance(request.get("signature_name", ""), str):
        raise invalid(
            f"JSON Value: {_show(request)} not formatted correctly. "
            "'signature_name' key must be a string value."
        )
    return request


def to_tensor(request: Mapping[str, Any], name: str, tensor: Tensor) -> tuple[np.ndarray, bool]:
    """The input of a request, and whether it is in row form.

    Args:
        request: The parsed body.
        name: Name of the signature's only input.
        tensor: Its dtype; the shape is not compared.
    """
    if "instances" in request and "inputs" in request:
        raise invalid(
            f"JSON Value: {_show(request)} Not formatted correctly expecting only  one of "
            "'inputs' or 'instances' keys to exist "
        )
    if "instances" in request:
        return _from_rows(request, name, tensor.dtype), True
    if "inputs" in request:
        return _from_columns(request["inputs"], name, tensor.dtype), False
    raise invalid("Missing 'inputs' or 'instances' key")


def from_examples(request: Mapping[str, Any], name: str, tensor: Tensor) -> np.ndarray:
    """The input of a `:classify` request, whose examples are objects of named features."""
    examples = request.get("examples")
    if not isinstance(examples, list) or not examples:
        raise invalid("When method is classify, key 'examples' is expected to be a non-empty list")
    values = []
    for example in examples:
        if not isinstance(example, dict) or list(example) != [name]:
            raise invalid(
                f"Example must be JSON object with the feature {name} but got JSON Value: "
                f"{_show(example)}"
            )
        value = example[name]
        values.append(value[0] if isinstance(value, list) and len(value) == 1 else value)
    return _array(values, tensor.dtype)


def to_json(outputs: Mapping[str, np.ndarray], rows: bool) -> bytes:
    """The answer in the form of the request; a single output stands without its name."""
    values = {name: as_lists(array) for name, array in outputs.items()}
    if not rows:
        return dump({"outputs": values if len(values) > 1 else next(iter(values.values()))})
    if len(values) == 1:
        return dump({"predictions": next(iter(values.values()))})
    columns = zip(*values.values(), strict=True)
    return dump({"predictions": [dict(zip(values, row, strict=True)) for row in columns]})


def dump(value: Any) -> bytes:
    """A value as JSON, which has no word for NaN."""
    return json.dumps(value, allow_nan=False).encode()


def as_lists(array: np.ndarray) -> list:
    """An array as lists; floats have the fewest digits that give the same float32."""
    if array.dtype == object:  # names of classes
        return array.tolist()
    numbers = np.array([float(str(v)) for v in array.ravel()])
    return numbers.reshape(array.shape).tolist()


# -- in


def _from_rows(request: Mapping[str, Any], name: str, dtype: str) -> np.ndarray:
    rows = request["instances"]
    if not isinstance(rows, list):
        raise invalid(f"JSON Value: {_show(request)} Excepting 'instances' to be an list/array")
    if not rows:
        raise invalid(f"JSON Value: {_show(request)} No values in 'instances' array")
    named = _is_object(rows[0])
    arrays: list[np.ndarray] = []
    for number, row in enumerate(rows):
        if named != _is_object(row):
            wanted, got = ("object", "list") if named else ("value/list", "object")
            raise invalid(f"Expecting {wanted} but got {got} at item {number} of input list")
        if named and set(row) != {name}:
            other = next((key for key in row if key != name), None)
            reason = (
                f"JSON object: {_show(row)} keys must be equal to: {name}"
                if other is None
                else f"JSON object: does not have named input: {_short(other)}"
            )
            raise invalid(f"Failed to process element: {number} of 'instances' list. {reason}")
        try:
            array = _array(row[name] if named else row, dtype)
            if arrays and arrays[0].size != array.size:
                raise invalid(f"Expecting tensor size: {arrays[0].size} but got: {array.size}")
            if arrays and arrays[0].shape != array.shape:
                before, now = (f"[{','.join(map(str, a.shape))}]" for a in (arrays[0], array))
                raise invalid(f"Expecting shape {before} but got: {now}")
        except Exception as error:
            key = f" key: {name}" if named else ""
            raise invalid(
                f"Failed to process element: {number}{key} of 'instances' list. "
                f"Error: INVALID_ARGUMENT: {error}"
            ) from None
        arrays.append(array)
    return np.stack(arrays)


def _from_columns(value: Any, name: str, dtype: str) -> np.ndarray:
    if not _is_object(value):
        value = {name: value}
    if name not in value:
        raise invalid(f"Missing named input: {name} in 'inputs' object.")
    return _array(value[name], dtype)


def _array(value: Any, dtype: str) -> np.ndarray:
    """A dense tensor: its shape is that of the first items, and every other item must fit."""
    shape: list[int] = []
    flat: list[Any] = [value]
    kinds = {type(value)}
    while kinds == {list}:  # level by level, because a call for each number would be slow
        sizes = set(map(len, flat))
        if len(sizes) > 1:
            break
        shape.append(sizes.pop())
        flat = list(itertools.chain.from_iterable(flat))
        kinds = set(map(type, flat))
    if list in kinds:
        raise _ragged(value)
    if dtype == "string":
        flat = [_decoded(item) for item in flat]
        array = np.empty(len(flat), object)
        array[:] = flat
        return array.reshape(shape)
    if not kinds <= {int, float} or (dtype != "float32" and float in kinds):
        raise _wrong_type(flat, dtype)
    return _numbers(flat, dtype).reshape(shape)


def _numbers(flat: list[int | float], dtype: str) -> np.ndarray:
    if dtype == "float32":
        try:
            wide = np.array(flat, "float64")
        except OverflowError:  # an int beyond float64
            raise invalid("Cannot convert JSON value to float without loss of precision.") from None
        with np.errstate(over="ignore"):
            array = wide.astype("float32")
        lost = np.isinf(array) & np.isfinite(wide)
        if lost.any():
            raise invalid(
                f"Cannot convert JSON value: {wide[lost][0]} to float without loss of precision."
            )
        return array
    if flat and not 0 <= min(flat) <= max(flat) <= 255:
        wrong = next(v for v in flat if not 0 <= v <= 255)
        raise invalid(f"Cannot convert JSON value: {_show(wrong)} to uint8: it is not 0 to 255.")
    return np.array(flat, "uint8")


def _ragged(value: Any) -> Exception:
    """The error for lists of different lengths or depths."""
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    level, items = 0, [value]
    while items:
        for item in items:
            if not isinstance(item, list):
                return invalid(
                    f"JSON Value: {_show(item)} found at incorrect level: {level + 1} "
                    f"in the JSON DOM. Expected at level: {len(shape)}"
                )
            if level >= len(shape):
                return invalid(
                    f"Encountered list at unexpected level: {level} expected < {len(shape)}"
                )
            if len(item) != shape[level]:
                return invalid(
                    f"Encountered list at unexpected size: {len(item)} at level: {level} "
                    f"expected size: {shape[level]}"
                )
        items = list(itertools.chain.from_iterable(items))
        level += 1
        if level >= len(shape):
            items = [item for item in items if isinstance(item, list)]
    return invalid("Encountered lists of different depths")


def _wrong_type(flat: list[Any], dtype: str) -> Exception:
    allowed = (int, float) if dtype == "float32" else (int,)
    value = next(item for item in flat if type(item) not in allowed)
    names = {dict: "Object", str: "String", type(None): "Null"}
    kind = names.get(type(value), str(value) if isinstance(value, bool) else "Number")
    return invalid(
        f"JSON Value: {_show(value)} Type: {kind} is not of expected type: {TF_NAMES[dtype]}"
    )


def _decoded(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if not isinstance(value, dict):
        kind = {bool: str(value), type(None): "Null"}.get(type(value), "Number")
        raise invalid(f"JSON Value: {_show(value)} Type: {kind} is not of expected type: string")
    if not _is_b64(value):
        raise invalid(f"JSON Value: {_show(value)} not formatted correctly for base64 data")
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError):
        raise invalid("Unable to base64 decode") from None


def _is_b64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_b64(value)


def _show(value: Any) -> str:
    """The beginning of a value's JSON, without writing all of a large one."""
    try:
        parts = json.JSONEncoder().iterencode(value)
        text = ""
        while len(text) <= SHOWN:
            text += next(parts, "\0")
            if text.endswith("\0"):
                return _short(text[:-1])
        return _short(text)
    except RecursionError:
        return "..."


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

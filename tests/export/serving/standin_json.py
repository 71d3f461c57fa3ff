"""JSON <-> tensors by the rules of TF Serving's REST interface, for the stand-in server.

Row form is {"instances": [...]} -> {"predictions": [...]}, column form {"inputs": ...} ->
{"outputs": ...}; {"b64": "..."} is bytes. Errors are worded as TF Serving words them.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from c_loader import Info, LibraryError

INVALID = 3
TF_NAMES = {"float32": "float", "uint8": "uint8", "string": "string", "int64": "int64"}


def refuse(message: str) -> LibraryError:
    """INVALID_ARGUMENT."""
    return LibraryError(INVALID, message)


def parse(body: bytes) -> dict[str, Any]:
    """A request's body: an object; NaN and Infinity may stand in it."""
    if not body:
        raise refuse("JSON Parse error: The document is empty")
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        offset = getattr(error, "pos", 0)
        raise refuse(f"JSON Parse error: Invalid value. at offset: {offset}") from None
    if not isinstance(request, dict):
        raise refuse(f"JSON Value: {_show(request)} Is not object")
    if not isinstance(request.get("signature_name", ""), str):
        raise refuse(
            f"JSON Value: {_show(request)} not formatted correctly. "
            "'signature_name' key must be a string value."
        )
    return request


def to_tensors(request: dict[str, Any], infos: Mapping[str, Info]) -> tuple[dict, bool]:
    """The tensors of a request, and whether it is in row form."""
    both = "instances" in request and "inputs" in request
    if both:
        raise refuse(
            f"JSON Value: {_show(request)} Not formatted correctly expecting only  one of "
            "'inputs' or 'instances' keys to exist "
        )
    if "instances" in request:
        return _from_rows(request, infos), True
    if "inputs" in request:
        return _from_columns(request["inputs"], infos), False
    raise refuse("Missing 'inputs' or 'instances' key")


def to_json(outputs: Mapping[str, np.ndarray], rows: bool) -> bytes:
    """The answer in the form of the request; a single output stands without its name."""
    values = {name: _values(name, array) for name, array in outputs.items()}
    if not rows:
        answer = values if len(values) > 1 else next(iter(values.values()))
        return json.dumps({"outputs": answer}, indent=1).encode()
    sizes = {len(value) for value in values.values()}
    if len(sizes) > 1:
        raise refuse(f"Tensor name: {next(iter(values))} has inconsistent batch size: {sizes}")
    if len(values) == 1:
        return json.dumps({"predictions": next(iter(values.values()))}, indent=1).encode()
    predictions = [
        {name: value[i] for name, value in values.items()} for i in range(next(iter(sizes)))
    ]
    return json.dumps({"predictions": predictions}, indent=1).encode()


# -- in


def _from_rows(request: dict[str, Any], infos: Mapping[str, Info]) -> dict[str, np.ndarray]:
    rows = request["instances"]
    if not isinstance(rows, list):
        raise refuse(f"JSON Value: {_show(request)} Excepting 'instances' to be an list/array")
    if not rows:
        raise refuse(f"JSON Value: {_show(request)} No values in 'instances' array")
    named = _is_object(rows[0])
    if not named and len(infos) > 1:
        raise refuse(
            "instances is a plain list, but expecting list of objects as multiple "
            "input tensors required as per tensorinfo_map"
        )
    found: dict[str, list[np.ndarray]] = {}
    for number, row in enumerate(rows):
        if named != _is_object(row):
            wanted, got = ("object", "list") if named else ("value/list", "object")
            raise refuse(f"Expecting {wanted} but got {got} at item {number} of input list")
        for name, value in (row if named else {next(iter(infos)): row}).items():
            try:
                _add(found.setdefault(name, []), name, value, infos)
            except LibraryError as error:
                key = f" key: {name}" if named else ""
                raise refuse(
                    f"Failed to process element: {number}{key} of 'instances' list. "
                    f"Error: INVALID_ARGUMENT: {error}"
                ) from None
        if named and set(row) != set(infos):
            raise refuse(
                f"Failed to process element: {number} of 'instances' list. JSON object: "
                f"{_show(row)} keys must be equal to: {','.join(sorted(infos))}"
            )
    return {name: np.stack(arrays) for name, arrays in found.items()}


def _add(arrays: list[np.ndarray], name: str, value: Any, infos: Mapping[str, Info]) -> None:
    if name not in infos:
        raise refuse(f"JSON object: does not have named input: {name}")
    array = _array(value, infos[name].dtype)
    if arrays and arrays[0].size != array.size:
        raise refuse(f"Expecting tensor size: {arrays[0].size} but got: {array.size}")
    if arrays and arrays[0].shape != array.shape:
        before, now = (f"[{','.join(map(str, a.shape))}]" for a in (arrays[0], array))
        raise refuse(f"Expecting shape {before} but got: {now}")
    arrays.append(array)


def _from_columns(value: Any, infos: Mapping[str, Info]) -> dict[str, np.ndarray]:
    if not _is_object(value):
        if len(infos) > 1:
            raise refuse(
                "inputs is a plain value/list, but expecting an object as multiple "
                "input tensors required as per tensorinfo_map"
            )
        value = {next(iter(infos)): value}
    for name in infos:
        if name not in value:
            raise refuse(f"Missing named input: {name} in 'inputs' object.")
    return {name: _array(value[name], info.dtype) for name, info in infos.items()}


def _array(value: Any, dtype: str) -> np.ndarray:
    """A dense tensor: its shape is that of the first items, and every other item must fit."""
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    flat: list[Any] = []
    _fill(value, 0, shape, dtype, flat)
    wide = {"string": "object", "float32": "float64"}.get(dtype, "int64")
    array = np.empty(len(flat), wide)
    array[:] = flat
    return array.astype("object" if dtype == "string" else dtype).reshape(shape)


def _fill(value: Any, level: int, shape: list[int], dtype: str, flat: list[Any]) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise refuse(
                f"JSON Value: {_show(value)} found at incorrect level: {level + 1} "
                f"in the JSON DOM. Expected at level: {len(shape)}"
            )
        flat.append(_scalar(value, dtype))
        return
    if level >= len(shape):
        raise refuse(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise refuse(
            f"Encountered list at unexpected size: {len(value)} at level: {level} "
            f"expected size: {shape[level]}"
        )
    for item in value:
        _fill(item, level + 1, shape, dtype, flat)


def _scalar(value: Any, dtype: str) -> Any:
    if dtype == "string":
        if isinstance(value, dict):
            return _decode(value)
        if isinstance(value, str):
            return value.encode()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if dtype == "float32" and np.isfinite(value) and abs(value) > np.finfo(dtype).max:
            raise refuse(f"Cannot convert JSON value: {value} to float without loss of precision.")
        if dtype == "float32" or isinstance(value, int):
            return value
    kind = {dict: "Object", list: "Array", str: "String", type(None): "Null"}.get(
        type(value), str(value) if isinstance(value, bool) else "Number"
    )
    raise refuse(
        f"JSON Value: {_show(value)} Type: {kind} is not of expected type: {TF_NAMES[dtype]}"
    )


def _decode(value: dict) -> bytes:
    if not _is_b64(value):
        raise refuse(f"JSON Value: {_show(value)} not formatted correctly for base64 data")
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError):
        raise refuse("Unable to base64 decode") from None


def _is_b64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_b64(value)


def _show(value: Any) -> str:
    return json.dumps(value)[:1000]  # TF Serving shows all of it


# -- out


def _values(name: str, array: np.ndarray) -> Any:
    if array.dtype != object:  # the shortest digits that give the same float32, as TF Serving
        return [_number(v) for v in array] if array.ndim < 2 else [_values(name, a) for a in array]
    if array.ndim > 1:
        return [_values(name, row) for row in array]
    if name.endswith("_bytes"):
        return [{"b64": base64.b64encode(value).decode()} for value in array]
    return [value.decode() for value in array]


def _number(value: Any) -> float | int:
    return float(str(value)) if isinstance(value, np.floating) else value.item()

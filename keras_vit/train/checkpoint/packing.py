"""Python values as JSON, with their arrays beside it, and back again, exactly."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

PLAIN = (bool, int, float, str, type(None))


def pack(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    """A value as JSON, exactly; its arrays are added to `arrays`.

    Raises:
        TypeError: It holds anything but plain values, arrays, lists, tuples and dicts.
    """
    if type(value) in PLAIN:
        return value
    variable = isinstance(value, keras.Variable)
    tensor = not variable and keras.ops.is_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) or variable or tensor:
        array = np.array(keras.ops.convert_to_numpy(value))
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise TypeError(f"{name} must hold numbers. Received: dtype={array.dtype}")
        arrays[name] = array
        kind = "scalar" if isinstance(value, np.generic) else "tensor" if tensor else "array"
        return {"array": name, "kind": kind, "dtype": array.dtype.name}
    if type(value) in (list, tuple):
        items = [pack(item, arrays, f"{name}/{number}") for number, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        items = [
            [key, pack(item, arrays, f"{name}/{number}")]
            for number, (key, item) in enumerate(value.items())
        ]
        return {"dict": items}
    raise TypeError(f"{name} must be something JSON can hold. Received: {type(value).__name__}")


def unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that was packed."""
    if isinstance(value, list):
        return [unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]].astype(value["dtype"])  # bfloat16 is read as float32
        if value["kind"] == "tensor":
            return keras.ops.convert_to_tensor(array)
        return array[()] if value["kind"] == "scalar" else array
    if "tuple" in value:
        return tuple(unpack(item, arrays) for item in value["tuple"])
    return {key: unpack(item, arrays) for key, item in value["dict"]}

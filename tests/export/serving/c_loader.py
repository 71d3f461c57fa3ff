"""A SavedModel through TensorFlow's C API: the C++ loader that TF Serving uses, and nothing else.

`libtensorflow_cc.so.2` of the TensorFlow wheel is opened with ctypes; Python's TensorFlow, Keras
and keras_vit are not imported. As a program, `python c_loader.py MODEL REQUESTS.npz ANSWERS.npz`
runs one request a signature, so that a test can compare the answers and see what was imported:

    REQUESTS.npz  "SIGNATURE/INPUT": an array, or for bytes "SIGNATURE/INPUT#0", "...#1": uint8 each
    ANSWERS.npz   "SIGNATURE/OUTPUT": an array
    stdout        one line of JSON: the signatures as the library reads them, the modules imported
"""

import ctypes
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# tensorflow/c/tf_datatype.h, as far as a signature here may use them.
# 0 stands on an operation without a value: __saved_model_init_op, which every file lists too.
DTYPES = {
    0: "invalid",
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    7: "string",
    9: "int64",
    10: "bool",
}
NUMBERS = {name: number for number, name in DTYPES.items()}
TSTRING = 24  # sizeof(TF_TString)
POINTER = ctypes.c_void_p


class LibraryError(Exception):
    """What a TF_Status says: its code, which is gRPC's, and its message."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Info:
    """One input or output of a signature."""

    tensor: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Signature:
    """A SignatureDef."""

    method: str
    inputs: dict[str, Info]
    outputs: dict[str, Info]


class Output(ctypes.Structure):
    """TF_Output."""

    _fields_ = [("operation", POINTER), ("index", ctypes.c_int)]


class Buffer(ctypes.Structure):
    """TF_Buffer."""

    _fields_ = [("data", POINTER), ("length", ctypes.c_size_t), ("deallocator", POINTER)]


class SavedModel:
    """A version folder, loaded with the tag "serve"."""

    def __init__(self, path: str | Path):
        lib = self._lib = library()
        self._graph = lib.TF_NewGraph()
        options = lib.TF_NewSessionOptions()
        tags = (ctypes.c_char_p * 1)(b"serve")
        found = Buffer()
        with status() as said:
            self._session = lib.TF_LoadSessionFromSavedModel(
                options, None, str(path).encode(), tags, 1, self._graph, ctypes.byref(found), said
            )
        lib.TF_DeleteSessionOptions(options)
        self.meta_graph = ctypes.string_at(found.data, found.length)
        """The serialized MetaGraphDef."""
        self.signatures = dict(_signatures(self.meta_graph))

    def run(self, signature: str, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Runs a signature as TF Serving does: feeds its input tensors, fetches its outputs.

        Nothing is checked here, so that what is wrong with an input is said by the graph.
        """
        chosen = self.signatures[signature]
        feeds = [self._output(chosen.inputs[name].tensor) for name in inputs]
        fetches = [self._output(info.tensor) for info in chosen.outputs.values()]
        tensors = [to_tensor(array) for array in inputs.values()]
        answers = (POINTER * len(fetches))()
        try:
            with status() as said:
                self._lib.TF_SessionRun(
                    self._session,
                    None,
                    (Output * len(feeds))(*feeds),
                    (POINTER * len(tensors))(*tensors),
                    len(feeds),
                    (Output * len(fetches))(*fetches),
                    answers,
                    len(fetches),
                    None,
                    0,
                    None,
                    said,
                )
        finally:
            for tensor, array in zip(tensors, inputs.values(), strict=True):
                delete(tensor, array)
        return {
            name: to_array(tensor) for name, tensor in zip(chosen.outputs, answers, strict=True)
        }

    def _output(self, tensor: str) -> Output:
        operation, _, index = tensor.partition(":")
        found = self._lib.TF_GraphOperationByName(self._graph, operation.encode())
        if not found:
            raise LibraryError(5, f"{operation} is not in the graph")
        return Output(found, int(index))

    def close(self) -> None:
        """Frees the session and the graph."""
        with status() as said:
            self._lib.TF_CloseSession(self._session, said)
        with status() as said:
            self._lib.TF_DeleteSession(self._session, said)
        self._lib.TF_DeleteGraph(self._graph)


# -- tensors


def to_tensor(values: Any) -> int:
    """A TF_Tensor with a copy of an array; bytes stand in arrays of objects."""
    lib, array = library(), np.asarray(values)
    dims = (ctypes.c_int64 * array.ndim)(*array.shape)
    if array.dtype != object:
        array = np.ascontiguousarray(array).reshape(array.shape)
        number = NUMBERS[array.dtype.name]
        tensor = lib.TF_AllocateTensor(number, dims, array.ndim, array.nbytes)
        ctypes.memmove(lib.TF_TensorData(tensor), array.ctypes.data, array.nbytes)
        return tensor
    tensor = lib.TF_AllocateTensor(NUMBERS["string"], dims, array.ndim, TSTRING * array.size)
    for place, value in zip(_strings(tensor, array.size), array.flat, strict=True):
        lib.TF_StringInit(place)
        lib.TF_StringCopy(place, value, len(value))
    return tensor


def to_array(tensor: int) -> np.ndarray:
    """The array in a TF_Tensor, which is freed."""
    lib = library()
    shape = [lib.TF_Dim(tensor, axis) for axis in range(lib.TF_NumDims(tensor))]
    dtype = DTYPES[lib.TF_TensorType(tensor)]
    if dtype == "string":
        array = np.empty(int(np.prod(shape)), object)
        for i, place in enumerate(_strings(tensor, array.size)):
            size = lib.TF_StringGetSize(place)
            array[i] = ctypes.string_at(lib.TF_StringGetDataPointer(place), size)
    else:
        data = ctypes.string_at(lib.TF_TensorData(tensor), lib.TF_TensorByteSize(tensor))
        array = np.frombuffer(data, dtype)
    lib.TF_DeleteTensor(tensor)
    return array.reshape(shape)


def delete(tensor: int, values: Any) -> None:
    """Frees a tensor made by `to_tensor`, its strings first."""
    array = np.asarray(values)
    if array.dtype == object:
        for place in _strings(tensor, array.size):
            library().TF_StringDealloc(place)
    library().TF_DeleteTensor(tensor)


def _strings(tensor: int, count: int) -> list[int]:
    first = library().TF_TensorData(tensor) or 0
    return [first + TSTRING * i for i in range(count)]


# -- the library


@functools.cache
def library() -> ctypes.CDLL:
    """The wheel's library, found without importing the wheel.

    TENSORFLOW_FOLDER says where it is for an environment that has no TensorFlow.
    """
    folder = Path(os.environ.get("TENSORFLOW_FOLDER") or _installed())
    ctypes.CDLL(str(folder / "libtensorflow_framework.so.2"), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(folder / "libtensorflow_cc.so.2"), mode=ctypes.RTLD_GLOBAL)
    size, integer, text = ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
    many = [POINTER, POINTER, integer]
    for name, returns, takes in (
        ("TF_Version", text, []),
        ("TF_NewStatus", POINTER, []),
        ("TF_DeleteStatus", None, [POINTER]),
        ("TF_GetCode", integer, [POINTER]),
        ("TF_Message", text, [POINTER]),
        ("TF_NewGraph", POINTER, []),
        ("TF_DeleteGraph", None, [POINTER]),
        ("TF_GraphOperationByName", POINTER, [POINTER, text]),
        ("TF_NewSessionOptions", POINTER, []),
        ("TF_DeleteSessionOptions", None, [POINTER]),
        (
            "TF_LoadSessionFromSavedModel",
            POINTER,
            [POINTER, POINTER, text, POINTER, integer, POINTER, POINTER, POINTER],
        ),
        ("TF_SessionRun", None, [POINTER, POINTER, *many, *many, POINTER, integer, *[POINTER] * 2]),
        ("TF_CloseSession", None, [POINTER, POINTER]),
        ("TF_DeleteSession", None, [POINTER, POINTER]),
        ("TF_AllocateTensor", POINTER, [integer, POINTER, integer, size]),
        ("TF_DeleteTensor", None, [POINTER]),
        ("TF_TensorType", integer, [POINTER]),
        ("TF_NumDims", integer, [POINTER]),
        ("TF_Dim", ctypes.c_int64, [POINTER, integer]),
        ("TF_TensorByteSize", size, [POINTER]),
        ("TF_TensorData", POINTER, [POINTER]),
        ("TF_StringInit", None, [POINTER]),
        ("TF_StringCopy", None, [POINTER, text, size]),
        ("TF_StringGetSize", size, [POINTER]),
        ("TF_StringGetDataPointer", POINTER, [POINTER]),
        ("TF_StringDealloc", None, [POINTER]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = returns, takes
    return lib


def _installed() -> Path:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("tensorflow must be installed")
    return Path(spec.origin).parent


class status:
    """A TF_Status for one call; what it holds afterwards is raised unless it is OK."""

    def __enter__(self) -> int:
        self._status = library().TF_NewStatus()
        return self._status

    def __exit__(self, *error: object) -> None:
        code = library().TF_GetCode(self._status)
        message = library().TF_Message(self._status).decode(errors="replace")
        library().TF_DeleteStatus(self._status)
        if code:
            raise LibraryError(code, message)


# -- the MetaGraphDef, read without its generated classes, which would import TensorFlow


def _signatures(meta_graph: bytes) -> Iterator[tuple[str, Signature]]:
    for number, entry in _fields(meta_graph):
        if number == 5:  # map<string, SignatureDef>
            name, signature = _entry(entry)
            fields = list(_fields(signature))
            inputs, outputs = (
                {key: _info(value) for n, e in fields if n == wanted for key, value in [_entry(e)]}
                for wanted in (1, 2)
            )
            method = b"".join(value for n, value in fields if n == 3).decode()
            yield (
                name,
                Signature(method, dict(sorted(inputs.items())), dict(sorted(outputs.items()))),
            )


def _info(message: bytes) -> Info:
    fields = dict(_fields(message))  # 1: name, 2: dtype, 3: TensorShapeProto
    dims = [dict(_fields(value)) for number, value in _fields(fields.get(3, b"")) if number == 2]
    # A size is an int64, so -1 (any) arrives as 2**64 - 1; field 3 of a shape says that not even
    # the rank is known.
    shape = tuple(size - (size >> 63 << 64) for size in (dim.get(1, 0) for dim in dims))
    unknown = dict(_fields(fields.get(3, b""))).get(3)
    return Info(fields[1].decode(), DTYPES[fields.get(2, 0)], None if unknown else shape)


def _entry(message: bytes) -> tuple[str, bytes]:
    fields = dict(_fields(message))
    return fields.get(1, b"").decode(), fields.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, and ints or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = message[at : at + length], at + length
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


# -- the program


def _requests(file: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    requests: dict[str, dict[str, Any]] = {}
    for key in file:
        signature, _, name = key.partition("/")
        name, _, item = name.partition("#")
        inputs = requests.setdefault(signature, {})
        if item:
            inputs.setdefault(name, []).append(file[key].tobytes())
        else:
            inputs[name] = file[key]
    for inputs in requests.values():
        for name, value in inputs.items():
            inputs[name] = np.array(value, object) if isinstance(value, list) else value
    return requests


def main(model: str, requests: str, answers: str) -> None:
    """Runs the requests and writes the answers."""
    loaded = SavedModel(model)
    found = {}
    with np.load(requests) as file:
        for signature, inputs in _requests(file).items():
            for name, array in loaded.run(signature, inputs).items():
                if array.dtype == object:
                    array = np.array([value.decode() for value in array.flat]).reshape(array.shape)
                found[f"{signature}/{name}"] = array
    np.savez(answers, **found)
    described = {
        name: {
            kind: {key: [info.dtype, info.shape] for key, info in getattr(s, kind).items()}
            for kind in ("inputs", "outputs")
        }
        for name, s in loaded.signatures.items()
    }
    loaded.close()
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    version = library().TF_Version().decode()
    print(json.dumps({"signatures": described, "modules": modules, "version": version}))


if __name__ == "__main__":
    main(*sys.argv[1:])

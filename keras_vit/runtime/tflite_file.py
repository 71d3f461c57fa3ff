"""What a TFLite file states, read before LiteRT sees it: its metadata, and the memory it needs.

LiteRT allocates whatever a file's shapes ask for. A damaged or hostile file of a megabyte could
take all memory, so each tensor is compared with what a model of the stated config needs. It also
reads the options of an operator without looking whether they are there, which ends the process.
"""

import functools
import math
import os
import struct
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.runtime.base import RECORD, parse_record
from keras_vit.weights.files.rules import refusal, refused_as

IDENTIFIER = b"TFL3"
BROKEN = (struct.error, IndexError, TypeError, AttributeError, ValueError, RecursionError)
"""What the bindings raise on a damaged file."""
ALWAYS = 1 << 26
"""Bytes of a tensor that any file may have."""
MAX_INPUT = 1 << 28
"""Bytes of the input, a batch of images. 256 images of 512 x 512 as uint8 take 201 MB."""
OTHER_OPTIONS = {
    "MEAN": "ReducerOptions",
    "SUM": "ReducerOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "RESHAPE": "",  # TensorFlow writes these two without options
    "CAST": "",
}
"""The options of operators that are not named like them, as SPLIT and SplitOptions are."""
BIAS = 2
"""The place of the one input that may be left out."""
NUMBER_BYTES = 8
"""Bytes of a number in the largest type of a tensor."""


def read_record(content: bytes, path: str | os.PathLike) -> dict[str, Any]:
    """The metadata of a file that keras_vit wrote."""
    data = None
    if content[4:8] == IDENTIFIER:
        with refused_as(path, "be a whole TFLite file", BROKEN):
            data = _metadata(content)
    return parse_record(path, data, "a TFLite", "export_tflite")


def check_graph(content: bytes, path: str | os.PathLike, config: ViTConfig) -> None:
    """Raises if LiteRT must not see the file: see the top of this module."""
    with refused_as(path, "be a whole TFLite file", BROKEN):
        model = _model(content)
        graphs = [model.Subgraphs(i) for i in range(model.SubgraphsLength())]
        if len(graphs) != 1 or graphs[0].InputsLength() != 1 or graphs[0].OutputsLength() != 1:
            rule = "have one graph with one input and one output"
            raise refusal(path, rule, graphs=len(graphs))
        _check_operators(path, model, graphs[0])
        batch = _check_input(path, graphs[0].Tensors(graphs[0].Inputs(0)), config)
        most = max(ALWAYS, len(content), _largest(config) * batch * NUMBER_BYTES)
        for number in range(graphs[0].TensorsLength()):
            shape = _shape(graphs[0].Tensors(number))
            if math.prod(max(size, 1) for size in shape) * NUMBER_BYTES > most:
                name = graphs[0].Tensors(number).Name()
                rule = f"have tensors of at most {most} bytes, enough for its config"
                raise refusal(path, rule, tensor=name, shape=shape)


def _check_operators(path: str | os.PathLike, model: Any, graph: Any) -> None:
    """Raises if an operator lacks the options that it reads, or an input."""
    schema = _schema()
    names = {number: name for name, number in vars(schema.BuiltinOperator).items()}
    kinds = {number: name for name, number in vars(schema.BuiltinOptions).items()}
    needed = {}
    for i in range(model.OperatorCodesLength()):
        name = names.get(_code(model.OperatorCodes(i)), "unknown")
        needed[i] = name, _options(name)
    for i in range(graph.OperatorsLength()):
        operator = graph.Operators(i)
        name, wanted = needed.get(operator.OpcodeIndex(), ("unknown", None))
        found = kinds.get(operator.BuiltinOptionsType())
        if wanted and (found != wanted or operator.BuiltinOptions() is None):
            raise refusal(path, f"have {wanted} for {name}", operator=i, options=found)
        inputs = [int(operator.Inputs(k)) for k in range(operator.InputsLength())]
        outputs = [int(operator.Outputs(k)) for k in range(operator.OutputsLength())]
        places = [n for k, n in enumerate(inputs) if n != -1 or k != BIAS] + outputs
        if not inputs or not outputs or not all(0 <= n < graph.TensorsLength() for n in places):
            rule = "have operators with inputs and outputs"
            raise refusal(path, rule, operator=i, inputs=inputs, outputs=outputs)


@functools.cache
def _options(name: str) -> str | None:
    """The class of the options that an operator reads; None if it reads none."""
    schema = _schema()
    own = OTHER_OPTIONS.get(name, name.replace("_", "") + "Options").lower()
    kinds = (kind for kind in vars(schema.BuiltinOptions) if kind.lower() == own)
    kind = next(kinds, None)
    return kind if kind and any(key.startswith(f"{kind}Add") for key in vars(schema)) else None


def _code(code: Any) -> int:
    """The number of an operator; small ones are in a field of one byte, as in old files."""
    return max(code.BuiltinCode(), code.DeprecatedBuiltinCode())


def _check_input(path: str | os.PathLike, tensor: Any, config: ViTConfig) -> int:
    """The number of images in the input, whose bytes are checked."""
    shape = _shape(tensor)
    if tuple(shape[1:]) != config.input_shape or shape[0] < 1:
        rule = f"take images of the size in its config, {config.input_shape}"
        raise refusal(path, rule, input=shape)
    itemsize = 1 if tensor.Type() == _schema().TensorType.UINT8 else 4
    if math.prod(shape) * itemsize > MAX_INPUT:
        raise refusal(path, f"take batches of at most {MAX_INPUT} bytes", input=shape)
    return shape[0]


def _largest(config: ViTConfig) -> int:
    """A bound of the numbers in any tensor of the model, for one image."""
    height, width, channels = config.input_shape
    tokens = config.num_tokens
    rows = max(3 * config.width, 3 * config.key_dim * config.num_heads, 2 * config.mlp_dim)
    scores = max(config.num_heads, config.pooling_heads or 0) * tokens * tokens
    pixels = (height + config.patch_size[0]) * (width + config.patch_size[1])
    planes = max(channels * config.patch_copies, 4 * config.stem_width if config.stem else 0)
    return max(tokens * rows, scores, pixels * planes, config.num_classes * tokens)


def _shape(tensor: Any) -> list[int]:
    return [int(tensor.Shape(i)) for i in range(tensor.ShapeLength())]


def _metadata(content: bytes) -> bytes | None:
    model = _model(content)
    pieces = [model.Metadata(i) for i in range(model.MetadataLength())]
    places = {piece.Name(): piece.Buffer() for piece in pieces}
    buffer = model.Buffers(places.get(RECORD.encode(), 0))  # 0 is empty
    return buffer.DataAsNumpy().tobytes() if buffer.DataLength() else None


def _model(content: bytes) -> Any:
    return _schema().Model.GetRootAs(content)


def _schema() -> Any:
    return litert("schema_py_generated")


def litert(module: str) -> Any:
    """Imports a module of LiteRT, or raises an error that says how to install it."""
    import importlib

    try:
        return importlib.import_module(f"ai_edge_litert.{module}")
    except ImportError as error:
        raise ImportError(
            "ai-edge-litert must be installed to run TFLite files: pip install 'keras3-vit[export]'"
        ) from error

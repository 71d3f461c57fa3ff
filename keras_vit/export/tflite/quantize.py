"""Makes a float32 .tflite file smaller and faster: float16 or int8 weights, int8 activations.

Only layers are quantized, that is products with constant kernels: they are nearly all of a file's
bytes and time. Everything between them stays in float32: the residual stream, LayerNorm, the scores
of attention, softmax and GELU. In int8, those would move the logits more than all layers together
and make the file three to five times as slow (`benchmarks/int8.py`).
"""

import contextlib
import dataclasses
import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.export.quantization import Ranges, check_ranges, modes_of
from keras_vit.runtime.tflite_file import IDENTIFIER
from keras_vit.runtime.tflite_interpreter import open_interpreter

MODES = ("float16", "dynamic", "int8")
PRODUCTS = ("FULLY_CONNECTED", "CONV_2D")
BETWEEN = (
    "ADD BATCH_MATMUL CONCATENATION GELU LOGISTIC MAX_POOL_2D MEAN MUL PAD RESHAPE RSQRT SOFTMAX "
    "SPLIT STRIDED_SLICE SUB TANH TRANSPOSE"
).split()
"""Operators between the products, which `quantize_file` leaves alone although int8 has them."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of a file."""

    kind: str
    """Such as "FULLY_CONNECTED"."""
    layer: str | None
    """Of a product: the path of the model's layer, such as "encoder_block_3/mlp/dense_1"."""
    kernel: Any
    """Of a product: an array whose first axis is that of the outputs."""
    bias: Any
    """Of a product: an array, or None."""
    activations: Mapping[int, str]
    """The float tensors computed at run time, by number: those it reads, then those it writes."""
    scope: str
    """The name of the operator, made of the names of the tensors that it writes."""


def quantize_file(
    content: bytes,
    mode: str,
    *,
    calibration: Any = None,
    float_layers: Collection[str] = (),
) -> bytes:
    """Quantizes a float32 .tflite file.

    | mode | kernels | activations at a product |
    |---|---|---|
    | "float16" | float16 | float32 |
    | "dynamic" | int8, a scale for each output | int8, scaled anew at each call |
    | "int8" | int8, a scale for each output | int8 in ranges seen on `calibration` |

    In "int8" the patch projection, a stem's root and the head are treated as in "dynamic", because
    logits in 256 steps would tie, and so are layers whose bias does not fit. Everything else is
    float32 in all modes.

    Args:
        content: The file, as `to_float32_tflite` makes it.
        mode: "float16", "dynamic" or "int8".
        calibration: For "int8": typical images as the file takes them, `(count, H, W, C)`. A
            hundred are enough.
        float_layers: Layers that stay in float32, such as "encoder_block_3/mlp/dense_1"; or
            "encoder_block_3" for all layers of the block.

    Returns:
        The quantized file.
    """
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"mode must be one of {known}. Received: mode={mode!r}")
    if (calibration is not None) != (mode == "int8"):
        raise ValueError(
            "calibration must be images for mode='int8', and None for another. "
            f"Received: mode={mode!r}, calibration={_described(calibration)}"
        )
    layers = layer_names(content)
    how = modes_of(mode, layers, float_layers)
    ranges = measure_ranges(content, calibration) if mode == "int8" else {}
    return quantize_layers(content, how, ranges)


def layer_names(content: bytes) -> tuple[str, ...]:
    """The layers that can be quantized, in the order in which they run."""
    return tuple(dict.fromkeys(o.layer for o in read_operators(content) if o.layer is not None))


def read_operators(content: bytes) -> tuple[Operator, ...]:
    """The operators of a file, in the order in which they run."""
    from ai_edge_litert import schema_py_generated as schema

    if content[4:8] != IDENTIFIER:
        raise ValueError(
            f"content must be a TFLite file. Received: {len(content)} bytes of something else"
        )
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if name.isupper()}
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    graph = model.subgraphs[0]
    found = []
    for operator in graph.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        kind = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
        tensors = {i: graph.tensors[i] for i in (*operator.inputs, *operator.outputs) if i >= 0}
        constants = {
            i: model.buffers[t.buffer].data
            for i, t in tensors.items()
            if model.buffers[t.buffer].data is not None
        }
        scope = ";".join(graph.tensors[i].name.decode() for i in operator.outputs) + ";"
        layer = kernel = bias = None
        if kind in PRODUCTS and operator.inputs[1] in constants:
            weight = tensors[operator.inputs[1]]
            name = weight.name.decode()
            if weight.type != schema.TensorType.FLOAT32:
                raise ValueError(
                    "content must be a float32 file, not a quantized one. Received: a kernel "
                    f"{name!r} of another type"
                )
            # A kernel that two layers share is not named after them, but what they write is.
            layer = (name if "/" in name else scope).split(";")[0].rpartition("/")[0]
            kernel = _floats(constants[operator.inputs[1]]).reshape(weight.shape)
            bias = _floats(constants[i]) if (i := _third(operator.inputs)) in constants else None
        floats = {
            int(i): t.name.decode()
            for i, t in tensors.items()
            if i not in constants and t.type == schema.TensorType.FLOAT32
        }
        found.append(Operator(kind, layer, kernel, bias, floats, scope))
    return tuple(found)


def measure_ranges(content: bytes, images: np.ndarray) -> Ranges:
    """The range of every activation that an operator reads or writes, by the name of its tensor.

    Args:
        content: A float32 file.
        images: Any number of images as the file takes them, `(count, H, W, C)`.
    """
    wanted = {}
    for operator in read_operators(content):
        wanted |= operator.activations
    with _quiet():
        interpreter = open_interpreter(content, experimental_preserve_all_tensors=True)
    (entry,) = interpreter.get_input_details()
    images = _as_taken(images, entry)
    batch = int(entry["shape"][0])  # 1 where it takes any number
    low = dict.fromkeys(wanted.values(), float("inf"))
    high = dict.fromkeys(wanted.values(), float("-inf"))
    for start in range(0, len(images), batch):
        # The last batch is filled up with the first images, which does not change the ranges.
        places = np.arange(start, start + batch) % len(images)
        interpreter.set_tensor(entry["index"], images[places])
        interpreter.invoke()
        for index, name in wanted.items():
            values = interpreter.get_tensor(index)
            low[name] = min(low[name], float(values.min()))
            high[name] = max(high[name], float(values.max()))
    return check_ranges({name: (low[name], high[name]) for name in low})


def quantize_layers(
    content: bytes, how: Mapping[str, str], ranges: Ranges, kinds: Collection[str] = ()
) -> bytes:
    """Quantizes some layers of a file, each in its own mode.

    In "int8" a bias is an int32 in steps of the input's scale times the kernel's. A layer whose
    bias does not fit, because its weights are near 0, is quantized as in "dynamic".

    Args:
        content: A float32 file.
        how: The mode of each layer to quantize; other layers stay in float32.
        ranges: From `measure_ranges`, if a mode is "int8".
        kinds: Operators of `BETWEEN` that also get int8 activations.
    """
    try:
        from ai_edge_quantizer import algorithm_manager, qtyping, quantizer
    except ImportError as error:
        raise ImportError(
            "ai-edge-quantizer must be installed to quantize TFLite files: "
            "pip install 'keras3-vit[export]'"
        ) from error

    tool = quantizer.Quantizer(bytearray(_with_own_buffers(content)))
    names = qtyping.TFLOperationName
    for operator in read_operators(content):
        if operator.kind not in (*PRODUCTS, *kinds):
            continue
        place = (f"^{re.escape(operator.scope)}$", names[operator.kind])
        mode = how.get(operator.layer) if operator.layer is not None else None
        if mode == "int8" and not _bias_fits(operator, ranges):
            mode = "dynamic"
        if mode == "float16":
            _check_float16(operator)
            cast = algorithm_manager.AlgorithmName.FLOAT_CASTING
            tool.add_weight_only_config(*place, num_bits=16, algorithm_key=cast)
        elif mode == "dynamic":
            tool.add_dynamic_config(*place, num_bits=8)
        elif mode == "int8" or operator.kind in kinds:
            tool.add_static_config(*place, activation_num_bits=8, weight_num_bits=8)
    if not tool.get_quantization_recipe():
        return content
    seen = {name: {"min": np.array([a]), "max": np.array([b])} for name, (a, b) in ranges.items()}
    with _quiet():
        result: Any = tool.quantize(
            seen or None, enable_progress_bar=False, enable_progress_report=False
        )
    return bytes(result.quantized_model)


def _with_own_buffers(content: bytes) -> bytes:
    """The file, with separate buffers for constants of different shapes.

    The converter stores equal bytes once, such as the zeros of two kernels. If their shapes differ,
    the quantizer would give both the scales of one, in the wrong number.
    """
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools.flatbuffer_utils import convert_object_to_bytearray

    model = schema.ModelT.InitFromPackedBuf(content, 0)
    shapes: dict[int, tuple[int, ...]] = {}
    count = len(model.buffers)
    for tensor in model.subgraphs[0].tensors:
        shape = tuple(tensor.shape)
        if model.buffers[tensor.buffer].data is None:
            continue
        if shapes.setdefault(tensor.buffer, shape) != shape:
            model.buffers.append(schema.BufferT(model.buffers[tensor.buffer].data))
            tensor.buffer = len(model.buffers) - 1
    return content if len(model.buffers) == count else bytes(convert_object_to_bytearray(model))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress bars, and a warning that keeping all activations takes memory."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Enabling `experimental_preserve_all_tensors`")
        yield


def _as_taken(images: Any, entry: Mapping[str, Any]) -> np.ndarray:
    array = np.asarray(images)
    shape = tuple(entry["shape"][1:].tolist())
    if array.dtype != entry["dtype"] or array.shape[1:] != shape or not len(array):
        raise ValueError(
            f"calibration must be at least one image (count, {', '.join(map(str, shape))}) of "
            f"{np.dtype(entry['dtype'])}, as the file takes them. Received: {_described(images)}"
        )
    if not np.isfinite(array).all():
        raise ValueError("calibration must hold finite numbers. Received: NaN or infinite ones")
    return array


def _floats(data: Any) -> np.ndarray:
    return np.asarray(data, "uint8").view("float32")


def _third(inputs: Any) -> int:
    """The tensor of a product's bias, or -1."""
    return int(inputs[2]) if len(inputs) > 2 else -1


def _bias_fits(operator: Operator, ranges: Ranges) -> bool:
    """Whether the bias of a product fits into int32."""
    if operator.bias is None:
        return True
    low, high = ranges[next(iter(operator.activations.values()))]
    step = (max(high, 0.0) - min(low, 0.0)) / 255
    steps = np.abs(operator.kernel.reshape(len(operator.bias), -1)).max(-1) / 127 * step
    return bool((np.abs(operator.bias) <= np.iinfo("int32").max * steps.astype("float64")).all())


def _check_float16(operator: Operator) -> None:
    largest = float(np.abs(operator.kernel).max())
    if largest > float(np.finfo("float16").max):
        raise ValueError(
            "content must have kernels that float16 can hold, or name those that cannot in "
            f"float_layers. Received: {largest:.4g} in {operator.layer!r}"
        )


def _described(images: Any) -> str:
    if images is None:
        return "None"
    array = np.asarray(images)
    return f"shape {array.shape}, {array.dtype}"

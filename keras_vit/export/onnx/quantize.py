"""Products in int8, for ONNX Runtime on processors: kernels a quarter of the size, and the speed.

Only products are quantized, each with a scale an output channel of its kernel (int8, symmetric) and
one scale of its input (uint8): processors multiply unsigned by signed bytes, and ONNX Runtime's
product of two signed ones takes ten times as long. Sums are taken in int32 and become float32 with
the bias, which is not quantized.

In "dynamic" an input is scaled at each call, by standard operators that ONNX Runtime joins to one.
In "int8" the scales come from calibration, and the product is ONNX Runtime's own operator:
QDQ nodes around a Gemm, which are standard, take 1 to 12 % longer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.export.folded import Folded, Product
from keras_vit.export.onnx.operators import OnnxOperators, Tensor, import_onnx, to_onnx
from keras_vit.export.quantization import Ranges, check_ranges, int8_kernel, product_names
from keras_vit.export.smoothing import Channels, whole_ranges
from keras_vit.runtime.onnx import import_onnxruntime, session_options

DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators
AT_ONCE = 8  # images of a calibration
ENDS = ("ReduceMin", "ReduceMax")


class QuantizedOperators(OnnxOperators):
    """The operators with some products in int8.

    Args:
        how: "dynamic" or "int8" for each product to quantize, by the path of its layer.
        ranges: Of what products read, if a mode is "int8".
    """

    def __init__(self, how: Mapping[str, str], ranges: Ranges):
        super().__init__("float32")
        self._how = how
        self._ranges = ranges
        self._inputs: dict[tuple, tuple[Tensor, str, str]] = {}

    def product(self, x: Tensor, p: Product) -> Tensor:
        mode = self._how.get(p.name)
        if mode is None:
            return super().product(x, p)
        kernel, scale = int8_kernel(p.kernel)
        self._keep(kernel, f"{p.name}/kernel")
        self._keep(scale, f"{p.name}/kernel_scale")
        bias = self._weight(f"{p.name}/bias", p.bias)
        with self.scope(p.name):
            quantized = self._dynamic if mode == "dynamic" else self._static
            return quantized(x, p.name, bias, (-1, len(p.bias)))

    def _dynamic(self, x: Tensor, name: str, bias: str, shape: tuple[int, ...]) -> Tensor:
        """Operators of the standard, in the order that ONNX Runtime recognizes."""
        value, scale, zero = (Tensor(self._free_name("DynamicQuantizeLinear"), ()) for _ in "123")
        outputs = [value.name, scale.name, zero.name]
        self._add("DynamicQuantizeLinear", [x.name], outputs, {})
        y = self.node("MatMulInteger", value, f"{name}/kernel", zero, shape=shape)
        scales = self.node("Mul", scale, f"{name}/kernel_scale")
        y = self.node("Mul", self.node("Cast", y, to=1), scales)  # to float32
        return self.node("Add", y, bias)

    def _static(self, x: Tensor, name: str, bias: str, shape: tuple[int, ...]) -> Tensor:
        step, zero = input_scale(*self._ranges[name])
        place = (x.name, float(step), int(zero))
        if place not in self._inputs:  # two products may read the same
            ends = f"{name}/input_scale", f"{name}/input_zero"
            self._keep(step, ends[0])
            self._keep(zero, ends[1])
            self._inputs[place] = (self.node("QuantizeLinear", x, *ends), *ends)
        value, *ends = self._inputs[place]
        others = [f"{name}/kernel", ends[0], f"{name}/kernel_scale", ends[1], "", bias]
        return self.node("MatMulIntegerToFloat", value, *others, shape=shape, domain=DOMAIN)


def input_scale(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the zero point of a product's input in uint8, for values from low to high."""
    low, high = min(low, 0.0), max(high, 0.0)  # 0 is exact
    step = (high - low) / 255 or 1.0
    return np.array(step, "float32"), np.array(round(-low / step), "uint8")


def measure_channels(
    folded: Folded, images: np.ndarray, takes: str = "float32", num_threads: int | None = None
) -> Channels:
    """The ends of each channel that a product reads over all images, by the product's name.

    Args:
        folded: What `fold` returns.
        images: Any number of images as the file takes them, (count, H, W, C).
        takes: "float32" or "uint8", what the file's `images` are.
        num_threads: As of `OnnxRuntime`.
    """
    session = open_session(channels_graph(folded, takes), num_threads)
    names = [output.name for output in session.get_outputs()]
    found = [
        session.run(names, {"images": images[i : i + AT_ONCE]})
        for i in range(0, len(images), AT_ONCE)
    ]
    return channels_of(folded, dict(zip(names, zip(*found, strict=True), strict=True)))


def channels_graph(folded: Folded, takes: str) -> Any:
    """The ONNX model in float32 that gives the ends of each channel that a product reads."""
    onnx = import_onnx()
    made = to_onnx(folded, images=takes)
    graph = made.graph
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], "int64"), "rows"))
    widths = {weight.name: weight.dims[0] for weight in graph.initializer if weight.dims}
    read = {node.input[1]: node.input[0] for node in graph.node if node.op_type == "Gemm"}
    del graph.output[:]
    for name in product_names(folded):
        for kind in ENDS:
            output = f"{name}/{kind}"
            inputs = [read[f"{name}/kernel"], "rows"]
            graph.node.append(onnx.helper.make_node(kind, inputs, [output], keepdims=0))
            graph.output.append(
                onnx.helper.make_tensor_value_info(
                    output, onnx.TensorProto.FLOAT, [widths[f"{name}/kernel"]]
                )
            )
    return made


def channels_of(folded: Folded, found: Mapping[str, Sequence[np.ndarray]]) -> Channels:
    """The channels, from what the outputs of `channels_graph` were in several batches."""
    low, high = (
        {name: reduce(found[f"{name}/{kind}"], axis=0) for name in product_names(folded)}
        for kind, reduce in zip(ENDS, (np.min, np.max), strict=True)
    )
    seen = {name: (low[name], high[name]) for name in low}
    check_ranges(whole_ranges(seen))
    return seen


def open_session(made: Any, num_threads: int | None) -> Any:
    """A model in memory, opened by ONNX Runtime as `OnnxRuntime` opens a file."""
    onnxruntime = import_onnxruntime()
    return onnxruntime.InferenceSession(
        made.SerializeToString(), session_options(num_threads), providers=["CPUExecutionProvider"]
    )

"""From a folded model to OpenVINO's own graph: through our ONNX graph, which OpenVINO reads.

The graph is that of `export_onnx`, operator by operator, in memory. In int8 each quantized product
reads its input and its kernel through a pair of QuantizeLinear and DequantizeLinear, which OpenVINO
joins with the product: uint8 by int8 in int32. The model is not `smoothed` first, as it is for ONNX
Runtime: of a trained DINOv2-S that left the mean cosine of the features as it was, 0.999, and took
the worst of 32 images from 0.998 to 0.989.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.export.folded import Folded, Product
from keras_vit.export.onnx.operators import OnnxOperators, Tensor, to_onnx
from keras_vit.export.onnx.quantize import channels_graph, channels_of, input_scale
from keras_vit.export.quantization import Ranges, int8_kernel
from keras_vit.export.smoothing import Channels
from keras_vit.runtime.openvino import compile_model, core

AT_ONCE = 8  # images of a calibration


class PairedOperators(OnnxOperators):
    """The operators with some products between pairs of quantizing nodes.

    Args:
        how: "int8" for each product to quantize, by the path of its layer. What `mode_of` calls
            "dynamic" stays in float: OpenVINO has no product that is scaled at each call.
        ranges: Of what products read.
    """

    def __init__(self, how: Mapping[str, str], ranges: Ranges):
        super().__init__("float32")
        self._how = how
        self._ranges = ranges

    def product(self, x: Tensor, p: Product) -> Tensor:
        if self._how.get(p.name) != "int8":
            return super().product(x, p)
        kernel, scale = int8_kernel(p.kernel)
        step, zero = input_scale(*self._ranges[p.name])
        places = {
            "kernel": kernel,
            "kernel_scale": scale,
            "kernel_zero": np.zeros(scale.shape, "int8"),
            "input_scale": step,
            "input_zero": zero,
        }
        names = {leaf: f"{p.name}/{leaf}" for leaf in places}
        for leaf, array in places.items():
            self._keep(array, names[leaf])
        bias = self._weight(f"{p.name}/bias", p.bias)
        ends = names["input_scale"], names["input_zero"]
        with self.scope(p.name):
            x = self.node("DequantizeLinear", self.node("QuantizeLinear", x, *ends), *ends)
            weight = Tensor(names["kernel"], kernel.shape)
            scales = names["kernel_scale"], names["kernel_zero"]
            weight = self.node("DequantizeLinear", weight, *scales, axis=1)
            return self.node("Add", self.node("MatMul", x, weight, shape=(-1, len(p.bias))), bias)

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        """As in float, but no scale of a product may pass where it has fewer columns than tokens.

        OpenVINO moves the scale behind the reshape. It tells the columns from the tokens by which
        are more, and refuses such models: Ti/16 from 320 px, S/16 from 448 px.
        """
        if len(x.shape) == 2 and x.shape[1] < shape[1]:
            lowest = self.number(float(np.finfo("float32").min))
            x = self.node("Max", x, lowest, shape=x.shape)  # the same numbers
        return super().reshape(x, *shape)


def to_openvino(folded: Folded, *, images: str, activation: str, ops: Any = None) -> Any:
    """Makes OpenVINO's model of a folded one, with the inputs and outputs of `to_onnx`."""
    made = to_onnx(folded, images=images, activation=activation, ops=ops)
    return read_onnx(made)


def measure_channels(folded: Folded, images: np.ndarray, takes: str = "float32") -> Channels:
    """The ends of each channel that a product reads over all images, by the product's name.

    Args:
        folded: What `fold` returns.
        images: Any number of images as the file takes them, (count, H, W, C).
        takes: "float32" or "uint8", what the file's `images` are.
    """
    made = channels_graph(folded, takes)
    names = [output.name for output in made.graph.output]
    compiled = compile_model(read_onnx(made), "float32")
    found = []
    for i in range(0, len(images), AT_ONCE):
        answers = compiled({"images": np.ascontiguousarray(images[i : i + AT_ONCE])})
        found.append([np.array(answers[number]) for number in range(len(names))])
    return channels_of(folded, dict(zip(names, zip(*found, strict=True), strict=True)))


def read_onnx(made: Any) -> Any:
    """An ONNX model in memory as OpenVINO's."""
    return core().read_model(made.SerializeToString())

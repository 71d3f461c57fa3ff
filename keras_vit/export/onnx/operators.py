"""The operators of `Program` in ONNX: one graph of standard operators.

It is made with the `onnx` package alone, on whatever backend the model was trained. Tokens stay
flat (B * T, D), so that each product with its bias is one Gemm; GELU and LayerNorm are one operator
each; tokens are put in front by padding, which does not need the batch size. Compared with the
`MatMul`, `Add` and `Erf` that converters write, this saves ONNX Runtime a tenth of the time.

Names are the paths of the model's layers, such as `encoder_block_3/mlp/dense_1`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_vit.export.fold_stem import Convolution, GroupNorm, same_padding
from keras_vit.export.folded import Folded, Gain, Norm, Product, Rotation, joined, pixel_gain
from keras_vit.export.onnx.token_merging import merge
from keras_vit.export.program import Program

DTYPES = ("float32", "float16")
ACTIVATIONS = {
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
}
OPSET = 20  # the first that has Gelu
MAX_BYTES = 2**31 - 2**20  # a file of protocol buffers holds less than 2 GB


def to_onnx(
    folded: Folded,
    *,
    dtype: str = "float32",
    images: str = "float32",
    activation: str = "softmax",
    opset: int = OPSET,
    ops: "OnnxOperators | None" = None,
) -> Any:
    """Makes the ONNX model of a folded one.

    It takes `images` (B, H, W, C) and gives `features`, what the model's head reads, and with a
    head `logits` and `probabilities`: (B, D) and (B, K), or where the model does not pool (B, T, D)
    and (B, T, K), all in float32.

    Args:
        folded: What `fold` returns.
        dtype: "float32" or "float16": of the weights and the products up to the last block.
            LayerNorm and softmax compute in float32, and so does everything after the last block.
        images: "float32" for what the model takes, "uint8" for pixels, which the graph normalizes.
        activation: "softmax" or "sigmoid": from logits to probabilities.
        opset: The version of ONNX' operators, at least 20.
        ops: The operators, without nodes yet; None means those of `dtype`.

    Returns:
        An `onnx.ModelProto`, without metadata.
    """
    onnx, config = import_onnx(), folded.config
    ops = ops or OnnxOperators(dtype)
    program = Program(folded, ops)
    x = Tensor("images", (-1, *config.input_shape))
    if images == "uint8":
        with ops.scope("pixels"):
            x = ops.gain(ops.cast(x, "float32"), pixel_gain(config))
    x = program.head_input(x)
    outputs = {"features": program.features(x)}
    if folded.head:
        logits = program.logits(x)
        with ops.scope("head"):
            probabilities = ops.activate(logits, activation)
        outputs = {"logits": logits, "probabilities": probabilities, **outputs}
    for name, value in outputs.items():
        ops.node("Identity", value, output=name)

    def declared(name: str, kind: int, *shape: int) -> Any:
        return onnx.helper.make_tensor_value_info(name, kind, ["batch", *shape])

    float_type, pixel_type = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8
    taken = pixel_type if images == "uint8" else float_type
    tokens = (config.num_tokens,) if config.pooling is None else ()
    others = sorted({node.domain for node in ops.nodes} - {""})
    versions = [onnx.helper.make_opsetid("", opset)]
    graph = onnx.helper.make_graph(
        ops.nodes,
        "vit",
        [declared("images", taken, *config.input_shape)],
        [declared(name, float_type, *tokens, value.shape[-1]) for name, value in outputs.items()],
        list(ops.weights.values()),
    )
    # The lowest version that fits, so that runtimes of that time read the file too.
    ir_version = onnx.helper.find_min_ir_version_for(versions)
    versions += [onnx.helper.make_opsetid(domain, 1) for domain in others]
    return onnx.helper.make_model(graph, opset_imports=versions, ir_version=ir_version)


def import_onnx() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            "onnx must be installed to export to ONNX: pip install 'keras3-vit[onnx]'"
        ) from error
    return onnx


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the graph."""

    name: str
    shape: tuple[int, ...]
    """-1 for the first axis, which depends on the batch."""


class OnnxOperators:
    """The operators, which add nodes and weights to a graph.

    Args:
        dtype: "float32" or "float16": of what is computed from `patches` to `to_float32`.

    Attributes:
        nodes: The nodes so far.
        weights: The initializers so far, by name.
    """

    def __init__(self, dtype: str):
        self.onnx = import_onnx()
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self._compute_dtype = dtype
        self.dtype = "float32"  # of what is added now
        self._scope = ""
        self._names: set[str] = set()

    # -- the operators of `Program`

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        before, self._scope = self._scope, name
        yield
        self._scope = before

    def crop(self, images: Tensor, height: int, width: int) -> Tensor:
        ends = self.ints(0, 0), self.ints(height, width), self.ints(1, 2)
        return self.node("Slice", images, *ends, shape=(-1, height, width, images.shape[-1]))

    def shift(self, images: Tensor, rows: int, columns: int) -> Tensor:
        _, height, width, channels = images.shape
        x = self.node("Pad", images, self.ints(0, rows, columns, 0, 0, rows, columns, 0))
        copies = []
        for top in (0, 2 * rows):
            for left in (0, 2 * columns):
                ends = self.ints(top, left), self.ints(top + height, left + width)
                copies.append(self.node("Slice", x, *ends, self.ints(1, 2), shape=images.shape))
        shape = (-1, height, width, 5 * channels)
        return self.node("Concat", images, *copies, shape=shape, axis=-1)

    def to_map(self, images: Tensor) -> Tensor:
        """Channels come first in ONNX."""
        return self._transpose(self._start(images), 0, 3, 1, 2)  # (B, C, H, W)

    def from_map(self, x: Tensor) -> Tensor:
        return self._transpose(x, 0, 2, 3, 1)  # (B, H, W, C)

    def convolve(self, x: Tensor, c: Convolution) -> Tensor:
        kernel = self._weight(f"{c.name}/kernel", c.kernel.transpose(3, 2, 0, 1))
        with self.scope(c.name):
            return self._slide("Conv", x, kernel, size=len(c.kernel), stride=c.stride)

    def group_norm(self, x: Tensor, n: GroupNorm) -> Tensor:
        """An InstanceNormalization of the groups: GroupNormalization has no kernel of its own."""
        _, channels, rows, columns = x.shape
        with self.scope(n.name):
            half = self.dtype != "float32"
            z = self.reshape(x, -1, n.groups, rows * columns * (channels // n.groups))
            z = self.cast(z, "float32") if half else z
            ones, zeros = (self._floats(value, n.groups) for value in (1.0, 0.0))
            z = self.node("InstanceNormalization", z, ones, zeros, epsilon=n.epsilon)
            z = self.cast(z, self.dtype) if half else z
            z = self.reshape(z, -1, channels, rows, columns)
            scale = self._weight(f"{n.name}/gamma", n.scale[:, None, None])
            offset = self._weight(f"{n.name}/beta", n.offset[:, None, None])
            return self.node("Add", self.node("Mul", z, scale), offset)

    def relu(self, x: Tensor) -> Tensor:
        return self.node("Relu", x)

    def max_pool(self, x: Tensor) -> Tensor:
        return self._slide("MaxPool", x, size=3, stride=2)

    def patches(self, images: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
        (rows, columns), (height, length) = grid, patch
        width = length * images.shape[-1]
        x = self._start(images)
        x = self.reshape(x, -1, rows, height, columns, width)
        x = self._transpose(x, 0, 1, 3, 2, 4)  # (B, rows, columns, P, P * C)
        return self.reshape(x, -1, height * width)  # (B * N, P * P * C)

    def sequence(
        self, x: Tensor, prefix: np.ndarray, positions: np.ndarray | None, num_patches: int
    ) -> Tensor:
        front, width = len(prefix), x.shape[-1]
        if positions is None:
            positions = np.zeros((num_patches, width))
        x = self.by_image(x, num_patches)  # (B, N, D)
        if front:  # zeros, which become the tokens when the table is added
            x = self.node("Pad", x, self.ints(0, front, 0, 0, 0, 0))  # (B, T, D)
        table = self._weight(f"{self._scope}/table", np.concatenate([prefix, positions]))  # (T, D)
        return self.reshape(self.node("Add", x, table), -1, width)  # (B * T, D)

    def product(self, x: Tensor, p: Product) -> Tensor:
        kernel = self._weight(f"{p.name}/kernel", p.kernel)
        bias = self._weight(f"{p.name}/bias", p.bias)
        with self.scope(p.name):
            return self.node("Gemm", x, kernel, bias, shape=(-1, len(p.bias)))

    def norm(self, x: Tensor, n: Norm) -> Tensor:
        """In float32 whatever `x` is in, as the operator's default `stash_type`, 1, says."""
        if n.rms:
            return self._rms_norm(x, n)
        size = x.shape[-1]
        if n.scale is None or n.offset is None:  # the operator needs a gain all the same
            weights = [self._weight(f"ones/{self.dtype}/{size}", np.ones(size))]
        else:
            weights = [self._weight(f"{n.name}/gamma", n.scale)]
            weights += [self._weight(f"{n.name}/beta", n.offset)]
        with self.scope(n.name):
            return self.node("LayerNormalization", x, *weights, axis=-1, epsilon=n.epsilon)

    def heads(
        self, x: Tensor, products: Sequence[Product], tokens: int, num_heads: int
    ) -> list[Tensor]:
        parts = len(products)
        x = self.product(x, joined(products))
        size = x.shape[-1] // (parts * num_heads)
        if tokens == parts == 1:  # and so nothing to transpose
            return [self.reshape(x, -1, num_heads, 1, size)]
        x = self.reshape(x, -1, tokens, parts, num_heads, size)
        x = self._transpose(x, 2, 0, 3, 1, 4)  # (parts, B, h, T, d)
        split = self.outputs("Split", x, shapes=[()] * parts, axis=0, num_outputs=parts)
        first = self.ints(0)
        shape = (-1, num_heads, tokens, size)
        return [self.node("Squeeze", part, first, shape=shape) for part in split]

    def rotate(self, x: Tensor, r: Rotation) -> Tensor:
        cos, sin = self._weight(f"{r.name}/cos", r.cos), self._weight(f"{r.name}/sin", r.sin)
        one, other = self.outputs("Split", x, shapes=[()] * 2, axis=-1, num_outputs=2)
        swapped = self.node("Concat", other, one, shape=x.shape, axis=-1)
        return self.node("Add", self.node("Mul", x, cos), self.node("Mul", swapped, sin))

    def offset_scores(self, q: Tensor, name: str, keys: np.ndarray) -> Tensor:
        (_, heads, tokens, _), columns = q.shape, keys.shape[1]
        weight = self._weight(f"{name}/keys", keys.swapaxes(1, 2))  # (h, d, 2T)
        scores = self.node("MatMul", q, weight, shape=(-1, heads, tokens, columns))
        if tokens > 1:  # `skewed`, in nodes
            line = self.reshape(scores, -1, heads, tokens * columns)
            line = self.slice(line, tokens - 1, tokens - 1 + tokens * (columns - 1), axis=2)
            line = self.reshape(line, -1, heads, tokens, columns - 1)
            scores = self.slice(line, 0, tokens, axis=3)  # (B, h, T, T)
        return scores if self.dtype == "float32" else self.cast(scores, "float32")

    def bias(self, name: str, array: np.ndarray) -> Tensor:
        self._keep(array.astype("float32"), f"{name}/bias")
        return Tensor(f"{name}/bias", array.shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows_of: Tensor, bias: Any) -> Tensor:
        _, num_heads, tokens, size = v.shape
        shape = (*q.shape[:3], tokens)
        scores = self.node("MatMul", q, self._transpose(k, 0, 1, 3, 2), shape=shape)  # (B, h, T, T)
        exact = self.dtype == "float32"
        scores = scores if exact else self.cast(scores, "float32")
        scores = scores if bias is None else self.node("Add", scores, bias)
        scores = self.activate(scores, "softmax")
        scores = scores if exact else self.cast(scores, self.dtype)
        z = self.node("MatMul", scores, v, shape=q.shape)  # (B, h, T, d)
        z = self._transpose(z, 0, 2, 1, 3)  # (B, T, h, d)
        return self.reshape(z, -1, num_heads * size)  # (B * T, h * d)

    def merge(self, x: Tensor, k: Tensor, sizes: Any, start: int, count: int) -> tuple[Any, Any]:
        return merge(self, x, k, sizes, start, count)

    def size_bias(self, sizes: Tensor) -> Tensor:
        return self.node("Log", self.reshape(sizes, -1, 1, 1, sizes.shape[1]))

    def mean_by_size(self, x: Tensor, sizes: Tensor, start: int, total: int) -> Tensor:
        tokens = sizes.shape[1]
        x = self.multiply(self.by_image(x, tokens), self.reshape(sizes, -1, tokens, 1))
        x = self.slice(x, start, tokens) if start else x
        x = self.node("ReduceSum", x, self.ints(1), shape=(-1, x.shape[-1]), keepdims=0)
        return self.node("Div", x, self.number(total))  # (B, D)

    def weigh(self, scores: Tensor, values: Tensor, start: int, tokens: int) -> Tensor:
        heads, size = scores.shape[-1], values.shape[-1]
        scores, values = self.by_image(scores, tokens), self.by_image(values, tokens)
        if start:
            scores = self.slice(scores, start, tokens)  # (B, T, h)
            values = self.slice(values, start, tokens)  # (B, T, h * d)
        left = tokens - start
        scores = self.reshape(self._transpose(scores, 0, 2, 1), -1, heads, 1, left)
        scores = self.activate(scores, "softmax")  # (B, h, 1, T)
        v = self.reshape(values, -1, left, heads, size // heads)
        v = self._transpose(v, 0, 2, 1, 3)  # (B, h, T, d)
        z = self.node("MatMul", scores, v, shape=(-1, heads, 1, size // heads))
        return self.reshape(z, -1, size)  # (B, h * d)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.node("Add", x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return self.node("Mul", x, y)

    def gain(self, x: Tensor, g: Gain) -> Tensor:
        scale = self._weight(f"{g.name}/gamma", g.scale)
        offset = self._weight(f"{g.name}/beta", g.offset)
        with self.scope(g.name):
            return self.node("Add", self.node("Mul", x, scale), offset)

    def gelu(self, x: Tensor, kind: str) -> Tensor:
        return self.node("Gelu", x, approximate="tanh" if kind == "tanh" else "none")

    def activate(self, x: Tensor, name: str) -> Tensor:
        if name == "silu":  # an operator of its own only from opset 24 on
            return self.multiply(x, self.activate(x, "sigmoid"))
        attributes: dict[str, Any] = {"axis": -1} if "softmax" in name else {}
        return self.node(ACTIVATIONS[name], x, **attributes)

    def token(self, x: Tensor, index: int, tokens: int) -> Tensor:
        x = self.slice(self.by_image(x, tokens), index, index + 1)  # (B, 1, D)
        return self.reshape(x, -1, x.shape[-1])  # (B, D)

    def mean(self, x: Tensor, start: int, tokens: int) -> Tensor:
        x = self.by_image(x, tokens)  # (B, T, D)
        x = self.slice(x, start, tokens) if start else x
        return self.node(
            "ReduceMean", x, self.ints(1), shape=(-1, x.shape[-1]), keepdims=0
        )  # (B, D)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        first, *rest = xs
        shape = (*first.shape[:-1], sum(x.shape[-1] for x in xs))
        return self.node("Concat", first, *rest, shape=shape, axis=-1)

    def by_image(self, x: Tensor, tokens: int) -> Tensor:
        return self.reshape(x, -1, tokens, x.shape[-1])

    def to_float32(self, x: Tensor) -> Tensor:
        x = x if self.dtype == "float32" else self.cast(x, "float32")
        self.dtype = "float32"
        return x

    # -- nodes and weights

    def node(
        self,
        kind: str,
        x: Tensor,
        *inputs: Tensor | str,
        shape: tuple[int, ...] | None = None,
        output: str = "",
        **attributes: Any,
    ) -> Tensor:
        """Adds a node with one output, of the shape of `x` unless another is given."""
        names = [i if isinstance(i, str) else i.name for i in inputs]
        output = output or self._free_name(kind)
        self._add(kind, [x.name, *names], [output], attributes)
        return Tensor(output, x.shape if shape is None else shape)

    def outputs(
        self, kind: str, x: Tensor, *inputs: str, shapes: Sequence[tuple[int, ...]], **attributes: Any
    ) -> list[Tensor]:
        """Adds a node with an output of each shape."""
        names = [self._free_name(kind) for _ in shapes]
        self._add(kind, [x.name, *inputs], names, attributes)
        return [Tensor(name, shape) for name, shape in zip(names, shapes, strict=True)]

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Adds a cast to "float32" or "float16"."""
        return self.node("Cast", x, to=self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def _rms_norm(self, x: Tensor, n: Norm) -> Tensor:
        """In several operators: ONNX has one only from opset 23 on."""
        dtype = self.dtype
        with self.scope(n.name):
            x = x if dtype == "float32" else self.cast(x, "float32")
            shape = (*x.shape[:-1], 1)
            square = self.node("ReduceMean", self.multiply(x, x), self.ints(-1), shape=shape)
            self.dtype = "float32"
            epsilon = self._weight(f"epsilon/{n.epsilon}", np.array(n.epsilon))
            self.dtype = dtype
            x = self.node("Div", x, self.node("Sqrt", self.node("Add", square, epsilon)))
            x = x if dtype == "float32" else self.cast(x, dtype)
            if n.scale is None:
                return x
            return self.node("Mul", x, self._weight(f"{n.name}/gamma", n.scale))

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        return self.node("Reshape", x, self.ints(*shape), shape=shape)

    def _transpose(self, x: Tensor, *order: int) -> Tensor:
        shape = tuple(x.shape[axis] for axis in order)
        return self.node("Transpose", x, shape=shape, perm=list(order))

    def _start(self, x: Tensor) -> Tensor:
        """From here on everything is computed in the export's dtype."""
        if self.dtype == self._compute_dtype:
            return x
        self.dtype = self._compute_dtype
        return self.cast(x, self.dtype)

    def _slide(self, kind: str, x: Tensor, *kernel: str, size: int, stride: int) -> Tensor:
        """A convolution or a pooling of (B, C, H, W)."""
        channels, *sides = x.shape[1:]
        if kernel:
            channels = self.weights[kernel[0]].dims[0]
        before, after = zip(*(same_padding(side, size, stride) for side in sides), strict=True)
        return self.node(
            kind,
            x,
            *kernel,
            shape=(-1, channels, *(-(-side // stride) for side in sides)),
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[*before, *after],
        )

    def slice(self, x: Tensor, start: int, end: int, axis: int = 1) -> Tensor:
        """From `start` to `end` on one axis: tokens of (B, T, D)."""
        shape = (*x.shape[:axis], end - start, *x.shape[axis + 1 :])
        places = self.ints(start), self.ints(end), self.ints(axis)
        return self.node("Slice", x, *places, shape=shape)

    def _weight(self, name: str, array: np.ndarray) -> str:
        """The name of a weight in the dtype of what is added now."""
        if name not in self.weights:
            largest = float(np.abs(array).max(initial=0))
            if largest > float(np.finfo(self.dtype).max):
                raise ValueError(
                    f"dtype must be 'float32' for weights that {self.dtype} cannot hold. "
                    f"Received: dtype={self.dtype!r} with {largest:.4g} in {name}"
                )
            self._keep(array.astype(self.dtype), name)
        return name

    def number(self, value: float, dtype: str = "float32") -> str:
        """The name of a scalar."""
        name = f"{dtype}/{value:g}"
        if name not in self.weights:
            self._keep(np.array(value, dtype), name)
        return name

    def table(self, values: Sequence[int]) -> Tensor:
        """Ints that are looked up."""
        return Tensor(self.ints(*values), (len(values),))

    def floats(self, *values: float) -> str:
        """The name of numbers in float32."""
        name = "floats/" + "x".join(f"{value:g}" for value in values)
        if name not in self.weights:
            self._keep(np.array(values, "float32"), name)
        return name

    def ints(self, *values: int) -> str:
        """The name of a shape, of axes or of places."""
        name = "shape/" + "x".join(map(str, values))
        if name not in self.weights:
            self._keep(np.array(values, "int64"), name)
        return name

    def _floats(self, value: float, count: int) -> str:
        """The name of `count` equal numbers in float32."""
        name = f"{value:g}/{count}"
        if name not in self.weights:
            self._keep(np.full(count, value, "float32"), name)
        return name

    def _keep(self, array: np.ndarray, name: str) -> None:
        self.weights[name] = self.onnx.numpy_helper.from_array(array, name)

    def _add(self, kind: str, inputs: list[str], outputs: list[str], attributes: Any) -> None:
        make = self.onnx.helper.make_node
        self.nodes.append(make(kind, inputs, outputs, name=outputs[0], **attributes))

    def _free_name(self, kind: str) -> str:
        """A name in the scope that no other node has."""
        name = wanted = f"{self._scope}/{kind}" if self._scope else kind
        number = 2
        while name in self._names:
            name, number = f"{wanted}_{number}", number + 1
        self._names.add(name)
        return name

"""The ONNX executor: a folded model as one graph of standard operators.

It computes what `fuse.Folded` describes with the `onnx` package alone, on whatever backend the
model was trained. Tokens stay flat (B * T, D), so that each product with its bias is one Gemm;
GELU and LayerNorm are one operator each; tokens are put in front by padding, which needs no shape
of the batch. Beside the `MatMul`, `Add` and `Erf` that others write, ONNX Runtime saves a tenth.

Names are the paths of the model's layers, such as `encoder_block_3/mlp/dense_1`.
"""

from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.fold import Block, Folded, Norm, Product

DTYPES = ("float32", "float16")
IMAGES = ("float32", "uint8")
PROBABILITIES = {"softmax": "Softmax", "sigmoid": "Sigmoid"}
OPSET = 20  # the first that has Gelu
MAX_BYTES = 2**31 - 2**20  # a file of protocol buffers holds less than 2 GB


def to_onnx(
    folded: Folded,
    *,
    dtype: str = "float32",
    images: str = "float32",
    activation: str = "softmax",
    opset: int = OPSET,
    gain: Norm | None = None,
) -> Any:
    """Makes the ONNX model of a folded one.

    It takes `images` (B, H, W, C) and gives `features`, what the head reads, and with a head
    `logits` and `probabilities`: (B, D) and (B, K), or where the model does not pool (B, T, D) and
    (B, T, K), all in float32.

    Args:
        folded: What `fold` returns.
        dtype: "float32" or "float16": of the weights and the products up to the last block.
            LayerNorm and softmax compute in float32, and so does all behind the last block.
        images: "float32" for what the model takes, "uint8" for pixels, which are normalised inside.
        activation: "softmax" or "sigmoid": from logits to probabilities.
        opset: The version of ONNX' operators, at least 20.
        gain: The gain and the offset that moved from the last norm into the head, which `features`
            have; None where there are none.

    Returns:
        An `onnx.ModelProto`, without metadata.
    """
    onnx = import_onnx()
    config, graph = folded.config, _Graph(dtype)
    run = _Executor(folded, graph)
    read = run.read(run.pool(run.encode(run.embed(run.pixels(images)))))
    features = read if gain is None else graph.gained(read, gain)
    size = config.representation_size or config.width
    outputs: dict[str, Any] = {"features": (run.by_image(features, size), size)}
    if folded.head:
        size = config.num_classes
        logits = run.by_image(graph.product(read, folded.head, "head"), size)
        attributes: dict[str, Any] = {"axis": -1} if activation == "softmax" else {}
        probabilities = graph.add(PROBABILITIES[activation], logits, at="head", **attributes)
        outputs = {"logits": (logits, size), "probabilities": (probabilities, size), **outputs}

    def declared(name: str, kind: int, *shape: int) -> Any:
        return onnx.helper.make_tensor_value_info(name, kind, ["batch", *shape])

    float_type, pixel_type = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8
    tokens = (config.num_tokens,) if config.pooling is None else ()
    for name, (value, _) in outputs.items():
        graph.add("Identity", value, output=name)
    versions = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "vit",
            [
                declared(
                    "images", pixel_type if images == "uint8" else float_type, *config.input_shape
                )
            ],
            [declared(name, float_type, *tokens, size) for name, (_, size) in outputs.items()],
            list(graph.weights.values()),
        ),
        opset_imports=versions,
        ir_version=onnx.helper.find_min_ir_version_for(versions),  # for runtimes of that time, too
    )


def import_onnx() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            "onnx must be installed to export to ONNX: pip install 'keras3-vit[onnx]'"
        ) from error
    return onnx


class _Graph:
    """Nodes and weights as they are added, each under the name of its layer."""

    def __init__(self, dtype: str):
        self.onnx = import_onnx()
        self.dtype = dtype  # of what is added now
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self._names: set[str] = set()

    def add(
        self, kind: str, *inputs: str, at: str = "", output: str = "", **attributes: Any
    ) -> str:
        """A node with one output; returns the output's name."""
        return self._node(kind, inputs, [output or self._free(at, kind)], attributes)[0]

    def split(self, x: str, parts: int, at: str) -> list[str]:
        """The parts along the first axis, without it."""
        names = [self._free(at, "Split") for _ in range(parts)]
        self._node("Split", [x], names, {"axis": 0, "num_outputs": parts})
        return [self.add("Squeeze", name, self.ints(0), at=at) for name in names]

    def weight(self, array: np.ndarray, name: str) -> str:
        """A weight in the dtype of what is added now."""
        if name not in self.weights:
            largest = float(np.abs(array).max(initial=0))
            if largest > float(np.finfo(self.dtype).max):
                raise ValueError(
                    f"dtype must be 'float32' for weights that {self.dtype} cannot hold. "
                    f"Received: dtype={self.dtype!r} with {largest:.4g} in {name}"
                )
            self._keep(array.astype(self.dtype), name)
        return name

    def ints(self, *values: int) -> str:
        """A shape, axes or places."""
        name = "shape/" + "x".join(map(str, values))
        if name not in self.weights:
            self._keep(np.array(values, "int64"), name)
        return name

    def reshape(self, x: str, *shape: int, at: str = "") -> str:
        return self.add("Reshape", x, self.ints(*shape), at=at)

    def cast(self, x: str, dtype: str, at: str) -> str:
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.add("Cast", x, at=at, to=kind)

    def product(self, x: str, p: Product, at: str) -> str:
        return self.add(
            "Gemm",
            x,
            self.weight(p.kernel, f"{at}/kernel"),
            self.weight(p.bias, f"{at}/bias"),
            at=at,
        )

    def norm(self, x: str, n: Norm, size: int, at: str) -> str:
        """In float32, whatever `x` is: that is what `stash_type` 1, the operator's own, says."""
        if n.scale is None or n.offset is None:  # the operator asks for a gain all the same
            weights = [self.weight(np.ones(size), f"ones/{self.dtype}/{size}")]
        else:
            weights = [self.weight(n.scale, f"{at}/gamma"), self.weight(n.offset, f"{at}/beta")]
        return self.add("LayerNormalization", x, *weights, at=at, axis=-1, epsilon=n.epsilon)

    def gained(self, x: str, n: Any) -> str:  # a Norm with a gain
        at = "encoder_norm"
        x = self.add("Mul", x, self.weight(n.scale, f"{at}/gamma"), at=at)
        return self.add("Add", x, self.weight(n.offset, f"{at}/beta"), at=at)

    def _node(self, kind: str, inputs: Any, outputs: list[str], attributes: Any) -> list[str]:
        make = self.onnx.helper.make_node
        self.nodes.append(make(kind, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def _free(self, at: str, kind: str) -> str:
        """A name that no other node has."""
        name = wanted = f"{at}/{kind}" if at else kind
        number = 2
        while name in self._names:
            name, number = f"{wanted}_{number}", number + 1
        self._names.add(name)
        return name

    def _keep(self, array: np.ndarray, name: str) -> None:
        self.weights[name] = self.onnx.numpy_helper.from_array(array, name)


class _Executor:
    """The steps of `Folded` as nodes.

    Shapes: B batch, k tokens in front, N patches, T = k + N, D width, h heads, d head size, K
    classes, M the MLP's width.
    """

    def __init__(self, folded: Folded, graph: _Graph):
        self.folded = folded
        self.config: ViTConfig = folded.config
        self.graph = graph

    def pixels(self, images: str) -> str:
        """What the model takes, in float32."""
        if images == "float32":
            return "images"
        graph, at, dtype = self.graph, "pixels", self.graph.dtype
        mean, std = (
            np.broadcast_to(np.asarray(v, "float64"), self.config.in_channels)
            for v in (self.config.pixel_mean, self.config.pixel_std)
        )
        graph.dtype = "float32"
        x = graph.cast("images", "float32", at)
        x = graph.add("Mul", x, graph.weight(1 / (255 * std), f"{at}/scale"), at=at)
        x = graph.add("Add", x, graph.weight(-mean / std, f"{at}/offset"), at=at)
        graph.dtype = dtype
        return x

    def embed(self, x: str) -> str:
        graph, config, folded, at = self.graph, self.config, self.folded, "patches"
        (rows, columns), (height, length) = config.grid, config.patch_size
        size, width = len(folded.patches.kernel), config.width
        if graph.dtype != "float32":
            x = graph.cast(x, graph.dtype, at)
        x = graph.reshape(x, -1, rows, height, columns, length * config.in_channels, at=at)
        x = graph.add("Transpose", x, at=at, perm=[0, 1, 3, 2, 4])  # (B, rows, columns, P, P * C)
        x = graph.reshape(x, -1, size, at=at)  # (B * N, P * P * C)
        if folded.patch_norm:
            x = graph.norm(x, folded.patch_norm, size, f"{at}/norm_before")
        x = graph.product(x, folded.patches, at)  # (B * N, D)
        if folded.token_norm:
            x = graph.norm(x, folded.token_norm, width, f"{at}/norm_after")
        at, prefix, positions = "tokens", folded.prefix, folded.positions
        if not len(prefix) and positions is None:
            return x
        x = graph.reshape(x, -1, config.num_patches, width, at=at)  # (B, N, D)
        if len(prefix):  # zeros, which become the tokens when the table is added
            x = graph.add("Pad", x, graph.ints(0, len(prefix), 0, 0, 0, 0), at=at)  # (B, T, D)
        if positions is None:
            positions = np.zeros((config.num_patches, width))
        table = graph.weight(np.concatenate([prefix, positions]), f"{at}/table")  # (T, D)
        x = graph.add("Add", x, table, at=at)
        return graph.reshape(x, -1, width, at=at)  # (B * T, D)

    def encode(self, x: str) -> str:
        """The blocks; (B * T, D), or of the first token alone (B, D), in float32."""
        graph, pre = self.graph, self.config.block_norm == "pre"
        for i, block in enumerate(self.folded.blocks):
            at, last = f"encoder_block_{i}", i + 1 == self.config.depth
            z = self._norm(x, block.attention_norm, f"{at}/attention_norm") if pre else x
            first = last and self.folded.first_token_only
            qkv = self._first_query(z, block, at) if first else self._qkv(z, block, at)
            z = self._attend(*qkv, block, at)  # (B * T, h * d)
            x = self._first(x, at) if first else x
            x = self._finish(x, z, block, at)  # (B * T, D)
        if graph.dtype != "float32":
            graph.dtype = "float32"
            x = graph.cast(x, "float32", "encoder_norm")
        return x

    def pool(self, x: str) -> str:
        graph, config, norm = self.graph, self.config, self.folded.final_norm
        if norm and config.final_norm == "before_pooling":
            x = self._norm(x, norm, "encoder_norm")
        if config.pooling in ("mean", "mean_all"):
            x = graph.reshape(x, -1, config.num_tokens, config.width, at="pooling")  # (B, T, D)
            start = config.num_prefix_tokens if config.pooling == "mean" else 0
            if start:
                ends = graph.ints(config.num_tokens)
                x = graph.add("Slice", x, graph.ints(start), ends, graph.ints(1), at="pooling")
            x = graph.add("ReduceMean", x, graph.ints(1), at="pooling", keepdims=0)  # (B, D)
        if norm and config.final_norm == "after_pooling":
            x = self._norm(x, norm, "encoder_norm")
        return x

    def read(self, x: str) -> str:
        """What the head reads."""
        if self.folded.pre_logits is None:
            return x
        x = self.graph.product(x, self.folded.pre_logits, "pre_logits")
        return self.graph.add("Tanh", x, at="pre_logits")

    def by_image(self, x: str, size: int) -> str:
        """The tokens of each image together, where the model does not pool; (B, T, size)."""
        if self.config.pooling is not None:
            return x
        return self.graph.reshape(x, -1, self.config.num_tokens, size, at="tokens")

    # -- the parts of a block

    def _qkv(self, z: str, block: Block, at: str) -> list[str]:
        z = self.graph.product(z, block.qkv, f"{at}/attention/qkv")
        return self._by_head(z, self.config.num_tokens, 3, f"{at}/attention")

    def _first_query(self, z: str, block: Block, at: str) -> list[str]:
        """Queries of the first token, keys and values of all."""
        at, columns = f"{at}/attention", self.config.num_heads * self.config.key_dim
        kernels = np.split(block.qkv.kernel, [columns], axis=1)
        query, key_value = map(Product, kernels, np.split(block.qkv.bias, [columns]))
        q = self.graph.product(self._first(z, at), query, f"{at}/query")
        z = self.graph.product(z, key_value, f"{at}/key_value")
        return [*self._by_head(q, 1, 1, at), *self._by_head(z, self.config.num_tokens, 2, at)]

    def _by_head(self, x: str, length: int, parts: int, at: str) -> list[str]:
        heads, size = self.config.num_heads, self.config.key_dim
        if length == 1:  # and so nothing to transpose
            return [self.graph.reshape(x, -1, heads, 1, size, at=at)]
        x = self.graph.reshape(x, -1, length, parts, heads, size, at=at)
        x = self.graph.add("Transpose", x, at=at, perm=[2, 0, 3, 1, 4])
        return self.graph.split(x, parts, at)  # parts of (B, h, T, d)

    def _attend(self, q: str, k: str, v: str, block: Block, at: str) -> str:
        graph, config, at = self.graph, self.config, f"{at}/attention"
        size = config.key_dim
        if block.query_norm and block.key_norm:
            q = graph.norm(q, block.query_norm, size, f"{at}/query_norm")
            k = graph.norm(k, block.key_norm, size, f"{at}/key_norm")
        k = graph.add("Transpose", k, at=at, perm=[0, 1, 3, 2])  # (B, h, d, T)
        scores = graph.add("MatMul", q, k, at=at)  # (B, h, T, T)
        if graph.dtype != "float32":
            scores = graph.cast(scores, "float32", at)
        scores = graph.add("Softmax", scores, at=at, axis=-1)
        if graph.dtype != "float32":
            scores = graph.cast(scores, graph.dtype, at)
        z = graph.add("MatMul", scores, v, at=at)  # (B, h, T, d)
        z = graph.add("Transpose", z, at=at, perm=[0, 2, 1, 3])
        return graph.reshape(z, -1, config.num_heads * size, at=at)  # (B * T, h * d)

    def _finish(self, x: str, z: str, block: Block, at: str) -> str:
        """Eq. 2 and 3 from the attended values `z` on."""
        graph, pre = self.graph, self.config.block_norm == "pre"
        z = graph.product(z, block.output, f"{at}/attention/attention_output")
        x = graph.add("Add", z, x, at=at)  # Eq. 2
        x = x if pre else self._norm(x, block.attention_norm, f"{at}/attention_norm")
        z = self._norm(x, block.mlp_norm, f"{at}/mlp_norm") if pre else x
        z = graph.product(z, block.mlp_1, f"{at}/mlp/dense_1")  # (B * T, M)
        approximate = "tanh" if self.config.gelu == "tanh" else "none"
        z = graph.add("Gelu", z, at=f"{at}/mlp", approximate=approximate)
        z = graph.product(z, block.mlp_2, f"{at}/mlp/dense_2")
        x = graph.add("Add", z, x, at=at)  # (B * T, D), Eq. 3
        return x if pre else self._norm(x, block.mlp_norm, f"{at}/mlp_norm")

    def _norm(self, x: str, n: Norm, at: str) -> str:
        return self.graph.norm(x, n, self.config.width, at)

    def _first(self, x: str, at: str) -> str:
        graph, config = self.graph, self.config
        x = graph.reshape(x, -1, config.num_tokens, config.width, at=at)
        x = graph.add("Slice", x, graph.ints(0), graph.ints(1), graph.ints(1), at=at)
        return graph.reshape(x, -1, config.width, at=at)  # (B, D)

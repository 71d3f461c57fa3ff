"""The operators of `Program` in TensorFlow: one graph that oneDNN, Grappler and GPUs run fast.

Tokens stay flat (B * T, D), so that bias, GELU and residual become part of the matrix product
(`_FusedMatMul`); a LayerNorm is written so that it becomes one operation (`_MklLayerNorm`); query,
key and value are one product; weights are kept in the dtype in which they are used.

Weights are variables, of which every signature of a SavedModel reads the same copy. As constants,
oneDNN would pack them once instead of at each call, which saves up to a tenth of the time in
bfloat16 and nothing in float32. But TensorFlow keeps several copies of a constant for each
signature: a SavedModel of ViT-S/16 in bfloat16, 44 MB, takes 0.2 GB to serve with variables and
2.4 GB with constants. So only `fused`, which has a single function, uses constants.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_vit.export.fold_stem import Convolution, GroupNorm
from keras_vit.export.folded import Folded, Gain, Norm, Product, Rotation, joined
from keras_vit.export.in_tensorflow import PlainTensorFlow
from keras_vit.export.program import Program, halves, skewed

DTYPES = ("float32", "bfloat16")
MAX_CONSTANTS = 1_900_000_000  # bytes; a graph of more than 2 GB cannot be serialized


def compile_graph(folded: Folded, dtype: str = "float32", *, constants: bool = False) -> Any:
    """Compiles a folded model.

    LayerNorm and softmax compute in float32, and so does everything after the last block.

    Args:
        folded: What `fold` returns.
        dtype: "float32" or "bfloat16": of the products, and of what is computed between them.
        constants: Whether the weights are constants of the graph, if they fit into one.

    Returns:
        A `tf.Module` with one `tf.function`, `run(images)`, from `(B, H, W, C)` in float32 to the
        model's output in float32, and its variables, `weights`.

    Example:

    >>> module = compile_graph(fold(model), "bfloat16")
    >>> logits = module.run(images)
    """
    size = (2 if dtype == "bfloat16" else 4) * folded.num_weights
    ops = TensorFlowOperators(dtype, constants=constants and size <= MAX_CONSTANTS)
    module = ops.tf.Module()
    module.run = ops.function(Program(folded, ops).output, folded.config.input_shape)
    module.weights = ops.weights
    return module


class TensorFlowOperators(PlainTensorFlow):
    """The operators as they are called while a `tf.function` is traced.

    Args:
        dtype: "float32" or "bfloat16".
        constants: Whether weights are constants instead of variables.

    Attributes:
        weights: The variables that the functions read.
    """

    def __init__(self, dtype: str, *, constants: bool = False):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}. Received: dtype={dtype!r}")
        self.tf = import_tensorflow()
        self.dtype = self.tf.dtypes.as_dtype(dtype)
        self.constants = constants
        self.weights: list[Any] = []
        self._places: dict[tuple[str, Any], int] = {}

    def function(self, compute: Callable[[Any], Any], input_shape: tuple[int, int, int]) -> Any:
        """`compute` as a `tf.function` of `images` (B, H, W, C) in float32."""
        images = self.tf.TensorSpec([None, *input_shape], self.tf.float32, name="images")
        function = self.tf.function(compute, input_signature=[images], autograph=False)
        function.get_concrete_function()  # makes the variables
        return function

    def to_map(self, images: Any) -> Any:
        return self.tf.cast(images, self.dtype)

    def convolve(self, x: Any, c: Convolution) -> Any:
        kernel = self._weight(f"{c.name}/kernel", c.kernel, x.dtype)
        return self.tf.nn.conv2d(x, kernel, c.stride, "SAME")

    def group_norm(self, x: Any, n: GroupNorm) -> Any:
        tf, (_, rows, columns, channels) = self.tf, x.shape
        z = tf.cast(x, tf.float32)
        z = tf.reshape(z, [-1, rows * columns, n.groups, channels // n.groups])
        z = z - self._group_mean(z)
        inverse = tf.math.rsqrt(self._group_mean(z * z) + n.epsilon)  # (B, 1, groups, 1)
        # The gain of each image and channel: one product for each number of the map.
        scale = self._weight(f"{n.name}/gamma", n.scale, z.dtype)
        scale = inverse * tf.reshape(scale, [n.groups, -1])  # (B, 1, groups, C / groups)
        offset = self._weight(f"{n.name}/beta", n.offset, z.dtype)
        z = z * scale + tf.reshape(offset, [n.groups, -1])
        return tf.cast(tf.reshape(z, [-1, rows, columns, channels]), x.dtype)

    def patches(self, images: Any, grid: tuple[int, int], patch: tuple[int, int]) -> Any:
        tf, (rows, columns), (height, length) = self.tf, grid, patch
        channels = images.shape[-1]
        x = tf.cast(images, self.dtype)
        x = tf.reshape(x, [-1, rows, height, columns, length * channels])
        x = tf.transpose(x, [0, 1, 3, 2, 4])  # (B, rows, columns, P, P * C)
        return tf.reshape(x, [-1, height * length * channels])  # (B * N, P * P * C)

    def sequence(
        self, x: Any, prefix: np.ndarray, positions: np.ndarray | None, num_patches: int
    ) -> Any:
        tf, width = self.tf, x.shape[-1]
        x = tf.reshape(x, [-1, num_patches, width])  # (B, N, D)
        x = x if positions is None else x + self._weight("positions", positions, x.dtype)
        front = self._weight("prefix", prefix, x.dtype)[None]  # (1, k, D)
        front = tf.tile(front, [tf.shape(x)[0], 1, 1])  # (B, k, D)
        return tf.reshape(tf.concat([front, x], axis=1), [-1, width])  # (B * T, D)

    def product(self, x: Any, p: Product) -> Any:
        kernel = self._weight(f"{p.name}/kernel", p.kernel, x.dtype)
        bias = self._weight(f"{p.name}/bias", p.bias, x.dtype)
        return self.tf.nn.bias_add(self.tf.matmul(x, kernel), bias)

    def norm(self, x: Any, n: Norm) -> Any:
        """Written as batch normalization with a token as a sample: oneDNN makes it a LayerNorm."""
        tf = self.tf
        if n.rms:
            z = tf.cast(x, tf.float32)
            z *= tf.math.rsqrt(tf.reduce_mean(z * z, -1, keepdims=True) + n.epsilon)
            z = tf.cast(z, x.dtype)
            return z if n.scale is None else z * self._weight(f"{n.name}/gamma", n.scale, x.dtype)
        rows = tf.reduce_prod(tf.shape(x)[:-1])
        none = tf.constant([], tf.float32)
        z = tf.raw_ops.FusedBatchNormV3(
            x=tf.reshape(x, tf.stack([1, rows, x.shape[-1], 1])),
            scale=tf.fill([rows], 1.0),
            offset=tf.fill([rows], 0.0),
            mean=none,
            variance=none,
            epsilon=n.epsilon,
            data_format="NCHW",
            is_training=True,  # with the mean and the variance of `x` itself
        ).y
        z = tf.reshape(z, tf.shape(x))
        return self.gain(z, self._gain_of(n, x.shape[-1]))

    def heads(self, x: Any, products: Sequence[Product], tokens: int, num_heads: int) -> list[Any]:
        tf, parts = self.tf, len(products)
        x = self.product(x, joined(products))
        size = x.shape[-1] // (parts * num_heads)
        x = tf.reshape(x, [-1, tokens, parts, num_heads, size])
        return tf.unstack(tf.transpose(x, [2, 0, 3, 1, 4]))  # parts of (B, h, T, d)

    def rotate(self, x: Any, r: Rotation) -> Any:
        """In float32: bfloat16 would round the angles of far patches together."""
        tf = self.tf
        cos = self._weight(f"{r.name}/cos", r.cos, tf.float32)
        sin = self._weight(f"{r.name}/sin", r.sin, tf.float32)
        z = tf.cast(x, tf.float32)
        first, second = tf.split(z, 2, axis=-1)
        z = z * cos + tf.concat([second, first], axis=-1) * sin  # (B, h, T, d)
        return tf.cast(z, x.dtype)

    def offset_scores(self, q: Any, name: str, keys: np.ndarray) -> Any:
        tf = self.tf
        scores = tf.matmul(q, self._weight(f"{name}/keys", keys, q.dtype), transpose_b=True)
        return tf.cast(skewed(scores, tf.reshape), tf.float32)  # (B, h, T, T)

    def bias(self, name: str, array: np.ndarray) -> Any:
        return self._weight(f"{name}/bias", array, self.tf.float32)

    def attend(self, q: Any, k: Any, v: Any, rows_of: Any, bias: Any) -> Any:
        tf = self.tf
        scores = tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32)  # (B, h, T, T)
        scores = scores if bias is None else scores + bias
        scores = tf.cast(tf.nn.softmax(scores), v.dtype)
        z = tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3])  # (B, T, h, d)
        columns = z.shape[2] * z.shape[3]
        # Grappler fuses a residual only where it sees that both sides have as many rows, which a
        # shape of -1 would hide.
        return tf.reshape(z, tf.concat([tf.shape(rows_of)[:1], [columns]], axis=0))

    def merge(self, x: Any, k: Any, sizes: Any, start: int, count: int) -> tuple[Any, Any]:
        """With gathers of whole rows: a slice with a step takes ten times as long."""
        tf, tokens, width = self.tf, k.shape[2], x.shape[-1]
        batch, left = tf.shape(k)[0], tokens - count
        a, b = (places.astype("int32") for places in halves(start, tokens))
        source, rest, target = self._matched(k, a, b, count)
        target += left - len(b)  # (B, r), of those left
        rest = -tf.math.top_k(-rest, len(a) - count).values  # in their own order
        fixed = [np.arange(start, dtype="int32"), b]
        front, back = (tf.tile(part[None], [batch, 1]) for part in fixed)
        kept = tf.concat([front, tf.gather(a, rest), back], axis=1)  # (B, T - r)
        first = tokens * tf.range(batch)[:, None]
        kept = tf.reshape(first + kept, [-1])
        source = tf.reshape(first + tf.gather(a, source), [-1])
        y = tf.reshape(tf.gather(x, kept), [-1, left, width])  # (B, T - r, D)
        z = tf.reshape(tf.gather(x, source), [-1, count, width])  # (B, r, D)
        weights = tf.one_hot(target, left, axis=1)  # (B, T - r, r)
        own = tf.ones([batch, left])
        if sizes is not None:
            flat = tf.reshape(sizes, [-1])
            weights *= tf.reshape(tf.gather(flat, source), [-1, 1, count])
            own = tf.reshape(tf.gather(flat, kept), [-1, left])
        sizes = own + tf.reduce_sum(weights, axis=-1)  # (B, T - r)
        weights = tf.cast(weights / sizes[..., None], x.dtype)
        y = y * tf.cast(own / sizes, x.dtype)[..., None] + tf.matmul(weights, z)
        return tf.reshape(y, [-1, width]), sizes

    def weigh(self, scores: Any, values: Any, start: int, tokens: int) -> Any:
        tf, heads = self.tf, scores.shape[-1]
        scores = self.by_image(scores, tokens)[:, start:, None]  # (B, T, 1, h)
        scores = tf.transpose(tf.cast(scores, tf.float32), [0, 3, 2, 1])  # (B, h, 1, T)
        scores = tf.cast(tf.nn.softmax(scores), values.dtype)
        v = tf.reshape(values, [-1, tokens, heads, values.shape[-1] // heads])[:, start:]
        z = tf.matmul(scores, tf.transpose(v, [0, 2, 1, 3]))  # (B, h, 1, d)
        return tf.reshape(z, [-1, values.shape[-1]])  # (B, h * d)

    def gain(self, x: Any, g: Gain) -> Any:
        scale = self._weight(f"{g.name}/gamma", g.scale, x.dtype)
        return x * scale + self._weight(f"{g.name}/beta", g.offset, x.dtype)

    def gelu(self, x: Any, kind: str) -> Any:
        return self.tf.nn.gelu(x, approximate=kind == "tanh")

    def token(self, x: Any, index: int, tokens: int) -> Any:
        return self.by_image(x, tokens)[:, index]

    def mean(self, x: Any, start: int, tokens: int) -> Any:
        return self.tf.reduce_mean(self.by_image(x, tokens)[:, start:], axis=1)  # (B, D)

    def by_image(self, x: Any, tokens: int) -> Any:
        return self.tf.reshape(x, [-1, tokens, x.shape[-1]])

    def to_float32(self, x: Any) -> Any:
        return self.tf.cast(x, self.tf.float32)

    def _gain_of(self, n: Norm, size: int) -> Gain:
        """A norm's gain; the fusion asks for one even where it was folded away."""
        if n.scale is None or n.offset is None:
            return Gain(f"no_gain_{size}", np.ones(size, "float32"), np.zeros(size, "float32"))
        return Gain(n.name, n.scale, n.offset)

    def _weight(self, name: str, array: np.ndarray, dtype: Any) -> Any:
        if self.constants:
            return self.tf.constant(array.astype(dtype.as_numpy_dtype))
        if (name, dtype) not in self._places:  # a function may be traced more than once
            self._places[name, dtype] = len(self.weights)
            with self.tf.init_scope():
                variable = self.tf.Variable(self.tf.cast(array, dtype), trainable=False)
                self.weights.append(variable)
        return self.weights[self._places[name, dtype]]


def import_tensorflow() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import tensorflow
    except ImportError as error:
        raise ImportError(
            "The fused graph runs on TensorFlow, whatever backend Keras has: "
            "pip install 'keras3-vit[tensorflow]'"
        ) from error
    return tensorflow

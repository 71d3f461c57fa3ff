"""The operators of `Program` in TFLite: the graph that LiteRT's XNNPACK runs fast on a phone.

Only built-in operators are used. A product is a FULLY_CONNECTED with a constant kernel and its
bias; query, key and value are one each. GELU is a single operator, tokens stay flat (B * T, D), and
where the stream is centered, a norm is only a root mean square.

The operators are named after the model's layers, such as `encoder_block_3/mlp/dense_1`, so that a
layer can be found again in the file.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.export.arguments import IMAGES, check_choice
from keras_vit.export.fold_stem import Convolution, GroupNorm
from keras_vit.export.folded import Folded, Gain, Norm, Product, Rotation, pixel_gain
from keras_vit.export.in_tensorflow import PlainTensorFlow
from keras_vit.export.program import Program, halves, skewed
from keras_vit.export.quiet import without_infos
from keras_vit.probabilities import FUNCTIONS
from keras_vit.runtime.tflite_file import litert

OUTPUTS = ("probabilities", "logits", "features")
MAX_BYTES = 1_900_000_000  # neither a graph of TensorFlow nor a FlatBuffer holds more than 2 GB


def to_float32_tflite(
    folded: Folded, *, batch_size: int | None, output: str, images: str, activation: str
) -> bytes:
    """Converts a folded model to a TFLite file of built-in operators, in float32.

    The file has one input, `images`, and one output, named by `output`.

    Args:
        folded: What `fold` returns.
        batch_size: Images at a time; None means any number, which the runtime must be told before
            it runs.
        output: "probabilities", "logits" or "features". Without a head there are features only.
        images: "float32" for what the model takes, "uint8" for pixels, which the file normalizes.
        activation: "softmax" or "sigmoid": from logits to probabilities.

    Returns:
        The file's content.

    Example:

    >>> content = to_float32_tflite(
    ...     fold(model), batch_size=1, output="logits", images="float32", activation="softmax"
    ... )
    """
    check_choice("output", output, OUTPUTS)
    check_choice("images", images, IMAGES)
    check_choice("activation", activation, FUNCTIONS)
    if output == "features":
        folded = dataclasses.replace(folded, head=None)
    elif folded.head is None:
        raise ValueError(
            "output must be 'features' for a folded model without a head. "
            f"Received: output={output!r}"
        )
    size = 4 * folded.num_weights
    if size > MAX_BYTES:
        raise ValueError(
            f"model must have at most {MAX_BYTES} bytes of weights for a TFLite file. "
            f"Received: {size} bytes"
        )
    import tensorflow as tf

    # A norm must see normalized pixels, and so must the zeros around an image that a stem reads or
    # that is shifted, while a product can normalize them itself.
    padded = folded.stem is not None or folded.config.patch_shift
    gain_first = images == "uint8" and (padded or folded.patch_norm is not None)
    if images == "uint8" and not gain_first:
        folded = _of_pixels(folded)
    ops = TFLiteOperators(tf, batch_size)
    program = Program(folded, ops)

    def run(values):
        x = tf.cast(values, tf.float32)
        x = program.head_input(ops.gain(x, pixel_gain(folded.config)) if gain_first else x)
        x = program.features(x) if output == "features" else program.logits(x)
        x = ops.activate(x, activation) if output == "probabilities" else x
        return {output: tf.identity(x, output)}

    spec = tf.TensorSpec([batch_size, *folded.config.input_shape], images, name="images")
    with tf.device("CPU:0"):
        function = tf.function(run, input_signature=[spec], autograph=False)
        concrete = function.get_concrete_function()
        # Without the module, the converter silently drops the variables.
        converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], ops.module)
        with without_infos():
            content = converter.convert()
    _check_operators(content)
    return content


class TFLiteOperators(PlainTensorFlow):
    """The operators, which add to the graph that TensorFlow is tracing.

    Args:
        tf: TensorFlow.
        batch_size: Images at a time; None means any number.

    Attributes:
        module: The `tf.Module` that holds the kernels.
    """

    def __init__(self, tf: Any, batch_size: int | None):
        self.tf = tf
        self.batch = -1 if batch_size is None else batch_size
        self.module = tf.Module()
        self.module.kernels = {}

    def to_map(self, images: Any) -> Any:
        return images

    def convolve(self, x: Any, c: Convolution) -> Any:
        with self.scope(c.name):
            return self.tf.nn.conv2d(x, self._variable(c.name, c.kernel), c.stride, "SAME")

    def group_norm(self, x: Any, n: GroupNorm) -> Any:
        tf, (_, rows, columns, channels) = self.tf, x.shape
        shape = (n.groups, channels // n.groups)
        with self.scope(n.name):
            z = tf.reshape(x, [self.batch, rows * columns, *shape])
            z = z - self._group_mean(z)
            inverse = tf.math.rsqrt(self._group_mean(z * z) + n.epsilon)  # (B, 1, groups, 1)
            z = z * (inverse * n.scale.reshape(shape)) + n.offset.reshape(shape)
            return tf.reshape(z, [self.batch, rows, columns, channels])

    def patches(self, images: Any, grid: tuple[int, int], patch: tuple[int, int]) -> Any:
        tf, (_, columns), (height, length) = self.tf, grid, patch
        channels = images.shape[-1]
        # A CONV_2D is as fast in float32, and slower than this in int8.
        x = tf.reshape(images, [-1, height, columns, length * channels])
        x = tf.transpose(x, [0, 2, 1, 3])  # (B * rows, columns, P, P * C)
        return tf.reshape(x, [-1, height * length * channels])  # (B * N, P * P * C)

    def sequence(
        self, x: Any, prefix: np.ndarray, positions: np.ndarray | None, num_patches: int
    ) -> Any:
        tf, front, width = self.tf, len(prefix), x.shape[-1]
        if positions is None:
            positions = np.zeros((num_patches, width), "float32")
        x = self.by_image(x, num_patches)  # (B, N, D)
        # Zeros in front, to which the prefix is added: so the batch size need not be known.
        x = tf.pad(x, [[0, 0], [front, 0], [0, 0]]) if front else x  # (B, T, D)
        x = x + np.concatenate([prefix, positions])
        return tf.reshape(x, [-1, width])  # (B * T, D)

    def product(self, x: Any, p: Product) -> Any:
        tf = self.tf
        with self.scope(p.name):
            x = tf.matmul(x, self._variable(p.name, p.kernel))
            return tf.nn.bias_add(x, tf.constant(p.bias)) if p.bias.any() else x

    def norm(self, x: Any, n: Norm) -> Any:
        tf = self.tf
        with self.scope(n.name):
            if not (n.centered or n.rms):
                x = x - tf.reduce_mean(x, -1, keepdims=True)
            variance = tf.reduce_mean(x * x, -1, keepdims=True)  # faster than a SQUARE
            x = x * tf.math.rsqrt(variance + n.epsilon)
            return x if n.scale is None or n.offset is None else x * n.scale + n.offset

    def heads(self, x: Any, products: Sequence[Product], tokens: int, num_heads: int) -> list[Any]:
        return [self._by_head(self.product(x, p), tokens, num_heads) for p in products]

    def rotate(self, x: Any, r: Rotation) -> Any:
        tf = self.tf
        first, second = tf.split(x, 2, axis=-1)
        return x * r.cos + tf.concat([second, first], axis=-1) * r.sin  # (B, h, T, d)

    def offset_scores(self, q: Any, name: str, keys: np.ndarray) -> Any:
        tf = self.tf
        scores = tf.matmul(q, self._variable(name, keys[None]), transpose_b=True)  # (B, h, T, 2T)
        return skewed(scores, lambda x, shape: tf.reshape(x, [self.batch, *shape[1:]]))

    def bias(self, name: str, array: np.ndarray) -> Any:
        return self._variable(name, array[None])

    def attend(self, q: Any, k: Any, v: Any, rows_of: Any, bias: Any) -> Any:
        tf = self.tf
        scores = tf.matmul(q, k, transpose_b=True)  # (B, h, T, T)
        scores = tf.nn.softmax(scores if bias is None else scores + bias)
        z = tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3])  # (B, T, h, d)
        return tf.reshape(z, [-1, z.shape[2] * z.shape[3]])  # (B * T, h * d)

    def merge(self, x: Any, k: Any, sizes: Any, start: int, count: int) -> tuple[Any, Any]:
        tf, tokens, width = self.tf, k.shape[2], x.shape[-1]
        left = tokens - count
        a, b = (places.astype("int32") for places in halves(start, tokens))
        source, rest, target = self._matched(k, a, b, count)
        target += left - len(b)  # (B, r), of those left
        zero = source[:, :1] * 0
        parts = [zero + np.arange(start, dtype="int32")] if start else []
        if len(a) > count:
            # In their own order. TFLite sorts floats alone, and the numbers are exact in them.
            rest = tf.math.top_k(-tf.cast(rest, tf.float32), len(a) - count).values
            parts.append(tf.gather(a, tf.cast(-rest, tf.int32)))
        kept = tf.concat([*parts, zero + b], axis=1)  # (B, T - r)
        source = tf.gather(a, source)
        x = self.by_image(x, tokens)
        y = tf.gather(x, kept, batch_dims=1)  # (B, T - r, D)
        z = tf.gather(x, source, batch_dims=1)  # (B, r, D)
        places = np.arange(left, dtype="int32")[None, :, None]
        weights = tf.cast(tf.equal(target[:, None], places), tf.float32)  # (B, T - r, r)
        own = tf.ones([1, left])
        if sizes is not None:
            weights *= tf.gather(sizes, source, batch_dims=1)[:, None]
            own = tf.gather(sizes, kept, batch_dims=1)
        sizes = own + tf.reduce_sum(weights, axis=-1)  # (B, T - r)
        y = y * (own / sizes)[..., None] + tf.matmul(weights / sizes[..., None], z)
        return tf.reshape(y, [-1, width]), sizes

    def weigh(self, scores: Any, values: Any, start: int, tokens: int) -> Any:
        tf, heads = self.tf, scores.shape[-1]
        scores = self._by_head(scores, tokens, heads)  # (B, h, T, 1)
        v = self._by_head(values, tokens, heads)  # (B, h, T, d)
        if start:
            scores, v = scores[:, :, start:], v[:, :, start:]
        left = tokens - start
        scores = tf.nn.softmax(tf.reshape(scores, [self.batch, heads, 1, left]))
        return tf.reshape(tf.matmul(scores, v), [-1, values.shape[-1]])  # (B, h * d)

    def gain(self, x: Any, g: Gain) -> Any:
        with self.scope(g.name):
            return x * g.scale + g.offset

    def gelu(self, x: Any, kind: str) -> Any:
        """In the form that the converter recognizes as one operator."""
        tf = self.tf
        if kind == "tanh":
            return tf.nn.gelu(x, approximate=True)
        return 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0).astype("float32")))

    def token(self, x: Any, index: int, tokens: int) -> Any:
        x = self.by_image(x, tokens)[:, index : index + 1]  # faster than [:, index]
        return self.tf.reshape(x, [-1, x.shape[-1]])  # (B, D)

    def mean(self, x: Any, start: int, tokens: int) -> Any:
        return self.tf.reduce_mean(self.by_image(x, tokens)[:, start:], axis=1)  # (B, D)

    def by_image(self, x: Any, tokens: int) -> Any:
        return self.tf.reshape(x, [self.batch, tokens, x.shape[-1]])

    def to_float32(self, x: Any) -> Any:
        return x  # everything is

    def _by_head(self, x: Any, tokens: int, num_heads: int) -> Any:
        x = self.tf.reshape(x, [self.batch, tokens, num_heads, x.shape[-1] // num_heads])
        return self.tf.transpose(x, [0, 2, 1, 3])  # (B, h, T, d)

    def _variable(self, name: str, array: np.ndarray) -> Any:
        """A variable, which the converter turns into a constant.

        Of a constant it makes so many copies that a gigabyte of kernels takes twenty.
        """
        if name not in self.module.kernels:  # a function is traced more than once
            with self.tf.init_scope():
                self.module.kernels[name] = self.tf.Variable(array, trainable=False)
        return self.module.kernels[name]


def _of_pixels(folded: Folded) -> Folded:
    """The same model for pixels: their normalization moves into the patch projection."""
    gain, kernel = pixel_gain(folded.config), folded.patches.kernel.astype("float64")
    pixels = len(kernel) // len(gain.scale)  # of a patch
    bias = folded.patches.bias + np.tile(gain.offset, pixels) @ kernel
    kernel *= np.tile(gain.scale, pixels)[:, None]
    patches = Product(folded.patches.name, kernel.astype("float32"), bias.astype("float32"))
    return dataclasses.replace(folded, patches=patches)


def _check_operators(content: bytes) -> None:
    """Raises for operators that are not built in, such as Flex ones, which no phone has."""
    model = litert("schema_py_generated").Model.GetRootAs(content)
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    if others := [code.CustomCode().decode() for code in codes if code.CustomCode()]:
        raise RuntimeError(
            f"The TFLite file must have built-in operators alone. Received: {', '.join(others)}"
        )

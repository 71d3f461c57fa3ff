"""The TFLite executor: a folded model as the graph that LiteRT's XNNPACK runs fast on a phone.

It computes what `fuse.Folded` describes, in built-in operators alone: every product is a
FULLY_CONNECTED with a constant kernel and its bias, GELU is one operator, tokens stay flat
(B * T, D), and where the stream is centred a norm is a root mean square. The order that XNNPACK
likes is another than oneDNN's (`graph.py`), so this is a second short executor.

The names of operators are the paths of the model's layers, such as
`encoder_block_3/mlp/dense_1`, so that a layer can be found again in the file.
"""

import dataclasses
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.arguments import check_choice
from keras_vit.export.fold import Block, Folded, Norm, Product
from keras_vit.runtime.tflite import litert

OUTPUTS = ("probabilities", "logits", "features")
IMAGES = ("float32", "uint8")
PROBABILITIES = ("softmax", "sigmoid")
MAX_BYTES = 1_900_000_000  # neither a graph of TensorFlow nor a FlatBuffer holds more than 2 GB


def to_float32_tflite(
    folded: Folded, *, batch_size: int | None, output: str, images: str, activation: str
) -> bytes:
    """Converts a folded model to a TFLite file of built-in operators, in float32.

    The file has one input, `images`, and one output, named by `output`.

    Args:
        folded: What `fold` returns. For "features" it must have no head: where the last norm is
            part of the head, what the head reads is not in it.
        batch_size: Images at a time; None means any number, for which the runtime is told the size
            before it runs.
        output: "probabilities", "logits" or "features".
        images: "float32" for what the model takes, "uint8" for pixels, which are normalised inside.
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
    check_choice("activation", activation, PROBABILITIES)
    if (output == "features") != (folded.head is None):
        has = "no head" if folded.head is None else "a head"
        raise ValueError(
            "output must be 'features' for a folded model without a head, and only for one. "
            f"Received: output={output!r} for a model with {has}"
        )
    size = 4 * _count(folded)
    if size > MAX_BYTES:
        raise ValueError(
            f"model must have at most {MAX_BYTES} bytes of weights for a TFLite file. "
            f"Received: {size} bytes"
        )
    import tensorflow as tf

    gain, offset = _normalisation(folded.config)
    inside = images == "uint8" and folded.patch_norm is not None
    if images == "uint8" and not inside:
        folded = _of_pixels(folded, gain, offset)
    network = _Network(tf, folded, batch_size)

    def run(values):
        x = tf.cast(values, tf.float32)
        x = network.run(x * gain + offset if inside else x)
        if output == "probabilities":
            x = getattr(tf.nn, activation)(x)
        return {output: tf.identity(x, output)}

    spec = tf.TensorSpec([batch_size, *folded.config.input_shape], images, name="images")
    with tf.device("CPU:0"):
        function = tf.function(run, input_signature=[spec], autograph=False)
        concrete = function.get_concrete_function()
        # With the module, for without it the variables would be lost, and nothing be said.
        converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], network.module)
        content = converter.convert()
    _check_operators(content)
    return content


class _Network:
    """The graph, as methods that add to the one that TensorFlow is tracing.

    Shapes: B batch, k tokens in front, N patches, T = k + N, D width, h heads, d head size.
    """

    def __init__(self, tf: Any, folded: Folded, batch_size: int | None):
        self.tf = tf
        self.folded = folded
        self.config = folded.config
        self.batch = -1 if batch_size is None else batch_size
        self.module = tf.Module()
        self.module.kernels = {}

    def run(self, images):
        """Images (B, H, W, C) as floats to logits (B, K), or without a head to features."""
        tf, folded, config = self.tf, self.folded, self.config
        with tf.name_scope("patches"):
            x = self.embed(images)
        for i, block in enumerate(folded.blocks):
            last = folded.first_token_only and i == len(folded.blocks) - 1
            with tf.name_scope(f"encoder_block_{i}"):
                x = self.block(x, block, last)
        if config.final_norm == "before_pooling":
            x = self.norm(x, folded.final_norm, "encoder_norm")
        x = self.pool(x)
        if config.final_norm == "after_pooling":
            x = self.norm(x, folded.final_norm, "encoder_norm")
        if folded.pre_logits:
            x = tf.tanh(self.product(x, folded.pre_logits, "pre_logits"))
        if folded.head:
            x = self.product(x, folded.head, "head")
        if config.pooling is None:
            x = tf.reshape(x, [self.batch, config.num_tokens, x.shape[-1]])  # (B, T, K)
        return x

    def embed(self, images):
        tf, folded, config = self.tf, self.folded, self.config
        columns, (height, length) = config.grid[1], config.patch_size
        # A CONV_2D is as fast in float32, and slower than this in int8.
        x = tf.reshape(images, [-1, height, columns, length * config.in_channels])
        x = tf.transpose(x, [0, 2, 1, 3])  # (B * rows, columns, P, P * C)
        x = tf.reshape(x, [-1, len(folded.patches.kernel)])  # (B * N, P * P * C)
        if folded.patch_norm:
            x = self.norm(x, folded.patch_norm, "norm_before")
        x = self.product(x, folded.patches, "projection")  # (B * N, D)
        if folded.token_norm:
            x = self.norm(x, folded.token_norm, "norm_after")
        x = tf.reshape(x, [self.batch, config.num_patches, config.width])  # (B, N, D)
        # Zeros in front, to which the prefix is added: so the batch's size need not be known.
        front = len(folded.prefix)
        if front:
            x = tf.pad(x, [[0, 0], [front, 0], [0, 0]])  # (B, T, D)
        positions = folded.positions
        if positions is None:
            positions = np.zeros((config.num_patches, config.width), "float32")
        if front or folded.positions is not None:
            x = x + np.concatenate([folded.prefix, positions])
        return tf.reshape(x, [-1, config.width])  # (B * T, D)

    def block(self, x, block: Block, last: bool):
        """Eq. 2 and Eq. 3; with `last` for the first token alone."""
        pre = self.config.block_norm == "pre"
        with self.tf.name_scope("attention"):
            z = self.norm(x, block.attention_norm, "norm") if pre else x
            z = self.product(self.attend(z, block, last), block.output, "output")
        x = (self.first(x) if last else x) + z  # (B * T, D), or (B, D)
        x = x if pre else self.norm(x, block.attention_norm, "attention_norm")
        with self.tf.name_scope("mlp"):
            z = self.norm(x, block.mlp_norm, "norm") if pre else x
            z = self.gelu(self.product(z, block.mlp_1, "dense_1"))  # (B * T, M)
            x = x + self.product(z, block.mlp_2, "dense_2")
        return x if pre else self.norm(x, block.mlp_norm, "mlp_norm")

    def attend(self, z, block: Block, last: bool):
        tf, config = self.tf, self.config
        query, key, value = _thirds(block.qkv)
        q = self.product(self.first(z) if last else z, query, "query")
        q = self.by_head(q, 1 if last else config.num_tokens)
        k = self.by_head(self.product(z, key, "key"), config.num_tokens)
        v = self.by_head(self.product(z, value, "value"), config.num_tokens)  # (B, h, T, d)
        if block.query_norm and block.key_norm:
            q = self.norm(q, block.query_norm, "query_norm")
            k = self.norm(k, block.key_norm, "key_norm")
        scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True))  # (B, h, T, T)
        z = tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3])  # (B, T, h, d)
        return tf.reshape(z, [-1, config.num_heads * config.key_dim])  # (B * T, h * d)

    def by_head(self, x, tokens: int):
        tf, config = self.tf, self.config
        x = tf.reshape(x, [self.batch, tokens, config.num_heads, config.key_dim])
        return tf.transpose(x, [0, 2, 1, 3])  # (B, h, T, d)

    def first(self, x):
        x = self.tf.reshape(x, [self.batch, self.config.num_tokens, self.config.width])
        return self.tf.reshape(x[:, :1], [-1, self.config.width])  # (B, D); x[:, 0] is slower

    def pool(self, x):
        config = self.config
        if config.pooling in ("token", None):
            return x
        x = self.tf.reshape(x, [self.batch, config.num_tokens, config.width])
        start = config.num_prefix_tokens if config.pooling == "mean" else 0
        return self.tf.reduce_mean(x[:, start:], axis=1)  # (B, D)

    def product(self, x, p: Product, name: str):
        tf = self.tf
        with tf.name_scope(name):
            x = tf.matmul(x, self.kernel(p))
            return tf.nn.bias_add(x, tf.constant(p.bias)) if p.bias.any() else x

    def kernel(self, p: Product):
        """A variable, of which the converter makes a constant.

        Constants it would copy so often that a gigabyte of them takes twenty.
        """
        place = self.tf.get_current_name_scope()  # a function is traced more than once
        if place not in self.module.kernels:
            with self.tf.init_scope():
                self.module.kernels[place] = self.tf.Variable(p.kernel, trainable=False)
        return self.module.kernels[place]

    def norm(self, x, n: Any, name: str):  # a Norm
        tf = self.tf
        with tf.name_scope(name):
            if not n.centred:
                x = x - tf.reduce_mean(x, -1, keepdims=True)
            variance = tf.reduce_mean(x * x, -1, keepdims=True)  # faster than a SQUARE
            x = x * tf.math.rsqrt(variance + n.epsilon)
            return x if n.scale is None else x * n.scale + n.offset

    def gelu(self, x):
        """In the form that the converter knows as one operator."""
        tf = self.tf
        if self.config.gelu == "tanh":
            return tf.nn.gelu(x, approximate=True)
        return 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0).astype("float32")))


def _thirds(p: Product) -> tuple[Product, ...]:
    kernels, biases = np.split(p.kernel, 3, axis=1), np.split(p.bias, 3)
    return tuple(Product(*pair) for pair in zip(kernels, biases, strict=True))


def _normalisation(config: ViTConfig) -> tuple[np.ndarray, np.ndarray]:
    """`(pixel / 255 - mean) / std` as a gain and an offset for each channel."""
    mean, std = (
        np.broadcast_to(np.asarray(value, "float64"), config.in_channels)
        for value in (config.pixel_mean, config.pixel_std)
    )
    return (1 / (255 * std)).astype("float32"), (-mean / std).astype("float32")


def _of_pixels(folded: Folded, gain: np.ndarray, offset: np.ndarray) -> Folded:
    """The same model for pixels: the normalisation moves into the patch projection."""
    kernel = folded.patches.kernel.astype("float64")
    pixels = len(kernel) // len(gain)  # of a patch
    bias = folded.patches.bias + np.tile(offset, pixels) @ kernel
    kernel *= np.tile(gain, pixels)[:, None]
    patches = Product(kernel.astype("float32"), bias.astype("float32"))
    return dataclasses.replace(folded, patches=patches)


def _check_operators(content: bytes) -> None:
    """Raises where an operator is not built in, such as a Flex one, which no phone has."""
    model = litert("schema_py_generated").Model.GetRootAs(content)
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    if others := [code.CustomCode().decode() for code in codes if code.CustomCode()]:
        raise RuntimeError(
            f"The TFLite file must have built-in operators alone. Received: {', '.join(others)}"
        )


def _count(part: Any) -> int:
    """Numbers in all arrays."""
    if isinstance(part, np.ndarray):
        return part.size
    if isinstance(part, tuple):
        return sum(map(_count, part))
    if isinstance(part, Folded | Block | Norm | Product):
        return sum(_count(getattr(part, f.name)) for f in dataclasses.fields(part))
    return 0

"""The TensorFlow executor: a folded model as one graph that oneDNN, Grappler and GPUs run fast.

Beside `keras_vit/model.py` and `layers/encoder_block.py` it computes the same, in this order:
tokens stay flat (B * T, D), so that bias, GELU and residual become part of the matrix product
(`_FusedMatMul`); a LayerNorm is written so that it becomes one operation (`_MklLayerNorm`); the
last block works for the one token that is read; weights are kept in the dtype they are used in.

Weights are variables, of which every signature of a SavedModel reads the same copy. Constants would
let oneDNN pack them once in place of at each call, which in bfloat16 is worth up to a tenth of the
time and in float32 nothing; but TensorFlow keeps several copies of a constant for each signature: a
SavedModel of ViT-S/16 in bfloat16, 44 MB, takes 0.2 GB to serve with variables, and 2.4 GB with
constants. So only `fused`, which has one function, has them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_vit.export.fold import Block, Folded, Product, fold
from keras_vit.model import ViT

DTYPES = ("float32", "bfloat16")
MAX_CONSTANTS = 1_900_000_000  # bytes; a graph with more than 2 GB cannot be serialised


def fused(model: ViT, dtype: str = "float32") -> Callable[..., np.ndarray]:
    """The model as a function for fast inference on TensorFlow, whatever backend Keras runs on.

    The weights are those of this moment: later training does not change the function.

    Args:
        model: A `ViT`, not quantised.
        dtype: "float32", or "bfloat16" for processors that multiply it (AVX512-BF16, AMX); logits
            then move by about a hundredth of their range.

    Returns:
        `predict(images, batch_size=32)`, from images `(B, H, W, C)`, an array or a tensor, to the
        model's output, a float32 array.

    Example:

    >>> predict = keras_vit.fused(model, dtype="bfloat16")
    >>> predict(images).argmax(-1)
    """
    run = compile_graph(fold(model), dtype, constants=dtype == "bfloat16").run
    shape = model.config.input_shape

    def predict(images: Any, batch_size: int = 32) -> np.ndarray:
        images = np.asarray(keras.ops.convert_to_numpy(images), "float32")
        if images.shape[1:] != shape or not len(images):
            raise ValueError(
                f"images must have shape (batch, {', '.join(map(str, shape))}). "
                f"Received: images with shape {images.shape}"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"batch_size must be a positive int. Received: batch_size={batch_size!r}"
            )
        starts = range(0, len(images), batch_size)
        return np.concatenate([run(images[i : i + batch_size]).numpy() for i in starts])

    return predict


def compile_graph(folded: Folded, dtype: str = "float32", *, constants: bool = False) -> Any:
    """The `tf.Module` of a folded model.

    Shapes: B batch, k tokens in front, N patches, T = k + N, D width, h heads, d head size, K
    classes. LayerNorm and softmax compute in float32; everything after the last block is in it.

    Args:
        folded: What `fold` returns.
        dtype: "float32" or "bfloat16": of the products and of what runs between them.
        constants: Whether the weights are part of the graph, unless they are too large for one.

    Returns:
        A `tf.Module` with one `tf.function`, `run(images)`: `(B, H, W, C)` in float32 to the
        model's output in float32, and its variables, `weights`. To save it, or to give it other
        signatures, call it from another `tf.function`.

    Example:

    >>> module = compile_graph(fold(model), "bfloat16")
    >>> logits = module.run(images)
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}. Received: dtype={dtype!r}")
    tf = _tensorflow()
    config, compute = folded.config, tf.dtypes.as_dtype(dtype)
    tokens, width, heads, size = config.num_tokens, config.width, config.num_heads, config.key_dim
    module = tf.Module()
    module.weights = []
    places: dict[Any, int] = {}
    constants = constants and _count(folded) * compute.size <= MAX_CONSTANTS
    blocks = list(folded.blocks)
    first_query = key_value = None
    if folded.first_token_only:
        first_query, key_value = _split(blocks.pop().qkv, heads * size)

    def weight(array: np.ndarray, kind=compute):
        if constants:
            return tf.constant(array.astype(kind.as_numpy_dtype))
        key = id(array), kind  # `folded` keeps the array, so its id stays its own
        if key not in places:
            places[key] = len(module.weights)
            with tf.init_scope():
                module.weights.append(tf.Variable(tf.cast(array, kind), trainable=False))
        return module.weights[places[key]]

    @functools.cache
    def idle(size: int) -> tuple[np.ndarray, np.ndarray]:
        """The gain and the offset of a norm that has none, which the fusion asks for."""
        return np.ones(size, "float32"), np.zeros(size, "float32")

    def product(x, p: Any):  # a Product
        return tf.nn.bias_add(tf.matmul(x, weight(p.kernel, x.dtype)), weight(p.bias, x.dtype))

    def norm(x, n: Any):  # a Norm
        """Written as batch normalisation, a sample a token: so oneDNN makes it one LayerNorm."""
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
        scale, offset = idle(x.shape[-1]) if n.scale is None else (n.scale, n.offset)
        return z * weight(scale, x.dtype) + weight(offset, x.dtype)

    def embed(images):  # (B, H, W, C)
        (rows, columns), (height, length) = config.grid, config.patch_size
        x = tf.cast(images, compute)
        x = tf.reshape(x, [-1, rows, height, columns, length * config.in_channels])
        x = tf.transpose(x, [0, 1, 3, 2, 4])  # (B, rows, columns, P, P * C)
        x = tf.reshape(x, [-1, len(folded.patches.kernel)])  # (B * N, P * P * C)
        x = norm(x, folded.patch_norm) if folded.patch_norm else x
        x = product(x, folded.patches)  # (B * N, D)
        x = norm(x, folded.token_norm) if folded.token_norm else x
        x = tf.reshape(x, [-1, config.num_patches, width])  # (B, N, D)
        x = x if folded.positions is None else x + weight(folded.positions)
        prefix = tf.tile(weight(folded.prefix)[None], [tf.shape(x)[0], 1, 1])  # (B, k, D)
        return tf.reshape(tf.concat([prefix, x], axis=1), [-1, width])  # (B * T, D)

    def first(x):
        return tf.reshape(x, [-1, tokens, width])[:, 0]  # (B, D)

    def by_head(x, length, parts):
        x = tf.reshape(x, [-1, length, parts, heads, size])
        return tf.unstack(tf.transpose(x, [2, 0, 3, 1, 4]))  # parts of (B, h, T, d)

    def attend(q, k, v, block: Block):
        if block.query_norm:
            q, k = norm(q, block.query_norm), norm(k, block.key_norm)
        scores = tf.matmul(q, k, transpose_b=True)  # (B, h, T, T)
        scores = tf.cast(tf.nn.softmax(tf.cast(scores, tf.float32)), v.dtype)
        return tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3])  # (B, T, h, d)

    def finish(x, z, block: Block):
        """Eq. 2 and 3 from the attended values `z` on."""
        pre = config.block_norm == "pre"
        # Grappler fuses a sum where it sees that both sides have the rows of x: -1 would hide it.
        z = tf.reshape(z, tf.concat([tf.shape(x)[:1], [heads * size]], axis=0))  # (B * T, h * d)
        x = product(z, block.output) + x  # (B * T, D), Eq. 2
        x = x if pre else norm(x, block.attention_norm)
        z = product(norm(x, block.mlp_norm) if pre else x, block.mlp_1)
        z = tf.nn.gelu(z, approximate=config.gelu == "tanh")  # (B * T, M)
        x = product(z, block.mlp_2) + x  # (B * T, D), Eq. 3
        return x if pre else norm(x, block.mlp_norm)

    def encode(x):
        for block in blocks:
            z = norm(x, block.attention_norm) if config.block_norm == "pre" else x
            z = attend(*by_head(product(z, block.qkv), tokens, 3), block)
            x = finish(x, z, block)  # (B * T, D)
        if not folded.first_token_only:
            return x
        block = folded.blocks[-1]
        z = norm(x, block.attention_norm) if config.block_norm == "pre" else x
        (q,) = by_head(product(first(z), first_query), 1, 1)  # (B, h, 1, d)
        k, v = by_head(product(z, key_value), tokens, 2)  # (B, h, T, d)
        z = attend(q, k, v, block)  # (B, 1, h, d)
        return finish(first(x), z, block)  # (B, D)

    def pool(x):
        if config.pooling in ("token", None):
            return x
        x = tf.reshape(x, [-1, tokens, width])
        start = config.num_prefix_tokens if config.pooling == "mean" else 0
        return tf.reduce_mean(x[:, start:], axis=1)  # (B, D)

    def run(images):
        x = tf.cast(encode(embed(images)), tf.float32)
        x = norm(x, folded.final_norm) if config.final_norm == "before_pooling" else x
        x = pool(x)
        x = norm(x, folded.final_norm) if config.final_norm == "after_pooling" else x
        x = tf.tanh(product(x, folded.pre_logits)) if folded.pre_logits else x
        x = product(x, folded.head) if folded.head else x
        if config.pooling is None:
            x = tf.reshape(x, [-1, tokens, x.shape[-1]])  # (B, T, K)
        activation = _activation(tf, config.classifier_activation)
        return activation(x) if folded.head else x

    images = tf.TensorSpec([None, *config.input_shape], tf.float32, name="images")
    module.run = tf.function(run, input_signature=[images], autograph=False)
    return module


def _tensorflow() -> Any:
    try:
        import tensorflow
    except ImportError as error:
        raise ImportError(
            "The fused graph runs on TensorFlow, whatever backend Keras has: "
            "pip install 'keras3-vit[tensorflow]'"
        ) from error
    return tensorflow


def _activation(tf: Any, name: str | None) -> Any:
    return {
        None: tf.identity,
        "linear": tf.identity,
        "softmax": tf.nn.softmax,
        "log_softmax": tf.nn.log_softmax,
        "sigmoid": tf.sigmoid,
    }[name]


def _split(p: Product, columns: int) -> tuple[Product, Product]:
    """A product's first columns, and the others."""
    kernels, biases = np.split(p.kernel, [columns], axis=1), np.split(p.bias, [columns])
    left, right = (Product(*pair) for pair in zip(kernels, biases, strict=True))
    return left, right


def _count(part: Any) -> int:
    """Numbers in all arrays."""
    if isinstance(part, np.ndarray):
        return part.size
    if isinstance(part, tuple):
        return sum(_count(item) for item in part)
    if dataclasses.is_dataclass(part):
        return sum(_count(getattr(part, f.name)) for f in dataclasses.fields(part))
    return 0

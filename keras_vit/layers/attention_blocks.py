"""Attention of long sequences on TensorFlow and JAX, a block of queries at a time."""

import functools
from typing import Any

import keras
from keras import ops

LONG = {"tensorflow": 1024, "jax": 512}
"""By the backend, the tokens from which queries are taken in blocks."""
ROWS = {"tensorflow": 256, "jax": 128}
"""Queries of a block."""


def attend_in_blocks(q: Any, k: Any, v: Any, rows: int | None = None) -> Any:
    """Eq. 6 and 7 of queries that are scaled, without ever holding all T x T weights.

    Shapes: B batch, h heads, T tokens, d size of a head.

    The gradient computes each block's weights again instead of keeping them. torch has a kernel
    that does so.

    Args:
        q: Queries, `(B, h, T, d)`.
        k: Keys, `(B, h, d, T)`.
        v: Values, `(B, h, T, d)`.
        rows: Queries of a block; None is the backend's.

    Returns:
        `(B, h, T, d)`.
    """
    backend = keras.backend.backend()
    attend = _on_tensorflow if backend == "tensorflow" else _on_jax
    return attend(q, k, v, rows or ROWS[backend])


def _on_jax(q, k, v, rows):
    _, heads, length, size = q.shape
    count = -(-length // rows)
    q = ops.pad(q, ((0, 0), (0, 0), (0, count * rows - length), (0, 0)))
    blocks = ops.moveaxis(ops.reshape(q, (-1, heads, count, rows, size)), 2, 0)

    def attend(part):  # (B, h, rows, d)
        scores = ops.matmul(part, k)  # (B, h, rows, T)
        exact = keras.backend.result_type(scores.dtype, "float32")
        weights = ops.softmax(ops.cast(scores, exact), axis=-1)
        return ops.matmul(ops.cast(weights, v.dtype), v)

    x = ops.moveaxis(ops.map(keras.remat(attend), blocks), 0, 2)  # (B, h, blocks, rows, d)
    return ops.reshape(x, (-1, heads, count * rows, size))[:, :, :length]


def _on_tensorflow(q, k, v, rows):
    import tensorflow as tf

    # A block waits for the one before it: TensorFlow would compute the scores of all of them first.
    starts = range(0, q.shape[2], rows)

    @tf.custom_gradient
    def attend(q, k, v):
        blocks = []
        for start in starts:
            with tf.control_dependencies(blocks[-1:]):
                blocks.append(tf.matmul(weights(q[:, :, start : start + rows], k), v))
        return tf.concat(blocks, axis=2), functools.partial(gradient, q, k, v)

    def gradient(q, k, v, upstream):
        queries, keys, values = [], tf.zeros_like(k), tf.zeros_like(v)
        for start in starts:
            with tf.control_dependencies([keys]):
                part, flow = (x[:, :, start : start + rows] for x in (q, upstream))
                a = weights(part, k)  # (B, h, rows, T)
                values += tf.matmul(a, flow, transpose_a=True)
                a = tf.cast(a, exact)
                flow = tf.cast(tf.matmul(flow, v, transpose_b=True), exact)
                flow = a * (flow - tf.reduce_sum(a * flow, axis=-1, keepdims=True))
                flow = tf.cast(flow, q.dtype)  # of the scores
                queries.append(tf.matmul(flow, k, transpose_b=True))
                keys += tf.matmul(part, flow, transpose_a=True)
        return tf.concat(queries, axis=2), keys, values

    def weights(q, k):
        scores = tf.cast(tf.matmul(q, k), exact)
        return tf.cast(tf.nn.softmax(scores), q.dtype)

    exact = tf.float64 if q.dtype == tf.float64 else tf.float32
    return attend(q, k, v)

"""Attention in blocks of queries: the numbers and gradients of all at once, in less memory."""

import math

import keras
import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers
from keras_vit.layers import attention
from keras_vit.layers.attention_blocks import attend_in_blocks

pytestmark = pytest.mark.only_on("tensorflow", "jax")
BACKEND = keras.backend.backend()
B, H, T, D = 2, 3, 7, 4


def inputs():
    rng = np.random.default_rng(0)
    q, k, v, upstream = (rng.normal(size=(B, H, T, D)) for _ in range(4))
    return q, k.swapaxes(2, 3), v, upstream


def at_once(q, k, v):
    return keras.ops.matmul(keras.ops.softmax(keras.ops.matmul(q, k)), v)


def with_gradients(function, q, k, v, upstream):
    if BACKEND == "jax":
        import jax

        y, backward = jax.vjp(function, *(part.astype("float32") for part in (q, k, v)))
        return [np.asarray(part) for part in (y, *backward(upstream.astype("float32")))]
    import tensorflow as tf

    x = [tf.constant(part) for part in (q, k, v)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(*x)
    return [part.numpy() for part in (y, *tape.gradient(y, x, upstream))]


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_blocks_are_exact(rows):
    q, k, v, upstream = inputs()
    found = with_gradients(lambda *x: attend_in_blocks(*x, rows=rows), q, k, v, upstream)
    expected = with_gradients(at_once, q, k, v, upstream)
    bound = 1e-6 if BACKEND == "tensorflow" else 1e-5  # float64, float32
    for part, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, wanted, rtol=bound, atol=bound)
    assert np.abs(found[1] - with_gradients(at_once, q, k, v, -upstream)[1]).max() > 0.1


def test_no_tensor_holds_all_weights():
    """In the graph of the values and of the gradient, not even block by block."""

    def of_jax(function):
        import jax

        def equations(jaxpr):
            for equation in jaxpr.eqns:
                yield equation
                for part in jax.tree.leaves(list(equation.params.values())):
                    if inner := getattr(part, "jaxpr", part if hasattr(part, "eqns") else None):
                        yield from equations(inner)

        x = [np.zeros((B, H, *shape), "float32") for shape in ((T, D), (D, T), (T, D))]
        graph = jax.make_jaxpr(jax.grad(lambda *x: function(*x).sum(), (0, 1, 2)))(*x)
        return [out.aval.shape for equation in equations(graph.jaxpr) for out in equation.outvars]

    def of_tensorflow(function):
        import tensorflow as tf

        graph = tf.function(lambda *x: tf.gradients(function(*x), x)).get_concrete_function(
            *(tf.TensorSpec((B, H, *shape)) for shape in ((T, D), (D, T), (T, D)))
        )
        outputs = [out.shape for op in graph.graph.get_operations() for out in op.outputs]
        return [tuple(shape) for shape in outputs if shape.rank is not None]

    shapes = of_jax if BACKEND == "jax" else of_tensorflow
    found = shapes(lambda *x: attend_in_blocks(*x, rows=3))
    assert max(map(math.prod, found)) < B * H * T * T and (B, H, 3, T) in found
    assert (B, H, T, T) in shapes(at_once)


@pytest.mark.parametrize("queries", [9, 2])
def test_the_layer_takes_blocks_for_long_sequences(monkeypatch, queries):
    used = []

    def in_blocks(q, k, v):
        used.append(q.shape[2])
        return attend_in_blocks(q, k, v, rows=4)

    rng = np.random.default_rng(0)
    x, z = (rng.normal(size=(2, length, 12)).astype("float32") for length in (queries, 9))
    layer = layers.MultiHeadAttention(num_heads=3, key_dim=4)
    layer.build(x.shape, z.shape)
    built_at_random(layer, x, z)
    expected = to_numpy(layer(x, z))
    monkeypatch.setattr(attention, "attend_in_blocks", in_blocks)
    monkeypatch.setattr(attention, "LONG", {BACKEND: 9})
    np.testing.assert_allclose(to_numpy(layer(x, z)), expected, atol=1e-6)
    assert used == [queries]
    layer(x, z, return_attention_scores=True)
    layer(x, keras.ops.convert_to_tensor(z[:, :8]))
    assert used == [queries]

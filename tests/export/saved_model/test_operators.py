"""The operators in TensorFlow: the graph is the model, and fused as its speed needs it."""

import sys
from collections import Counter

import numpy as np
import pytest
from conformance import CONFIGS, TINY, images, quick_if_covering, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.saved_model import operators
from keras_vit.export.saved_model.operators import compile_graph

FLOAT32 = 1e-5  # of the logits' range
BFLOAT16 = 2e-2


def error(folded, model, x, dtype="float32"):
    expected = run(model, x)
    got = compile_graph(folded, dtype).run(x).numpy()
    assert got.shape == expected.shape and got.dtype == "float32"
    return np.abs(got - expected).max() / np.ptp(expected)


@pytest.mark.backend_free
@pytest.mark.parametrize("case", quick_if_covering(CONFIGS))  # test_program.py: all of them
def test_graph_is_the_model(case):
    model = tiny_model(case, seed=3)
    x = images(model.config)
    folded = fold(model)
    assert error(folded, model, x) < FLOAT32
    assert error(folded, model, x, "bfloat16") < BFLOAT16


@pytest.mark.backend_free
def test_bfloat16_rounds():
    model = tiny_model()
    assert error(fold(model), model, images(TINY), "bfloat16") > 1e-4
    with pytest.raises(ValueError, match="dtype must be"):
        compile_graph(fold(model), "float16")


@pytest.mark.backend_free
def test_weights_are_variables_or_constants(monkeypatch):
    model = tiny_model("registers")
    x = images(model.config)
    folded = fold(model)
    module = compile_graph(folded)
    constant = compile_graph(folded, constants=True)
    np.testing.assert_allclose(module.run(x), constant.run(x), atol=1e-5)
    assert len(module.variables) == len(module.weights) > 10 * model.config.depth
    assert not constant.weights
    monkeypatch.setattr(operators, "MAX_CONSTANTS", 0)  # a graph with 2 GB cannot be serialized
    large = compile_graph(folded, constants=True)
    np.testing.assert_array_equal(large.run(x), module.run(x))
    assert len(large.weights) == len(module.weights)


@pytest.mark.backend_free
def test_grappler_fuses_bias_gelu_and_residual_into_the_products(tmp_path):
    import tensorflow as tf

    if not tf.config.list_physical_devices("CPU") or not _has_onednn(tf):
        pytest.skip("TensorFlow has no oneDNN here")
    depth = 3
    model = tiny_model(depth=depth)
    for dtype in ("float32", "bfloat16"):
        counts = _fused_products(tf, compile_graph(fold(model), dtype), tmp_path / dtype)
        assert counts["BiasAdd+GeluExact"] == depth
        # The output projection of the last block works for one token an image.
        assert counts["BiasAdd+Add"] >= 2 * depth - 1
    tanh = tiny_model(depth=1, gelu="tanh")
    counts = _fused_products(tf, compile_graph(fold(tanh)), tmp_path / "tanh")
    assert counts["BiasAdd+GeluApproximate"] == 1 and counts["BiasAdd+GeluExact"] == 0


def _fused_products(tf, module, folder):
    """What a session, as TF Serving has it, really runs: how often each fusion is in it."""
    tf.saved_model.save(module, str(folder), signatures=module.run)
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    metadata = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(folder))
        signature = loaded.signature_def["serving_default"]
        feed = {signature.inputs["images"].name: images(TINY)}
        output = signature.outputs["output_0"].name
        session.run(output, feed, options=options, run_metadata=metadata)
    return Counter(
        b"+".join(node.attr["fused_ops"].list.s).decode()
        for part in metadata.partition_graphs
        for node in part.node
        if "FusedMatMul" in node.op
    )


def _has_onednn(tf):
    with tf.Graph().as_default() as place:
        x = tf.compat.v1.placeholder("float32", (None, 16), name="x")
        y = tf.nn.bias_add(tf.matmul(x, tf.ones((16, 16))), tf.ones(16))
        z = tf.nn.gelu(y, approximate=False)
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    metadata = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=place) as session:
        session.run(z, {x: np.ones((2, 16))}, options=options, run_metadata=metadata)
    return any("_Mkl" in node.op for part in metadata.partition_graphs for node in part.node)


def test_graph_without_tensorflow_says_what_to_install(monkeypatch):
    folded = fold(tiny_model())
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="pip install"):
        compile_graph(folded)

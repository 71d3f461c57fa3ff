"""A folded model is the model: every kind of it, with every array a random one."""

import dataclasses
import sys
from collections import Counter

import keras
import numpy as np
import pytest
from conformance import KINDS, TINY, images, randomise, run, tiny_model

from keras_vit.export import fold as fuse
from keras_vit.export.saved_model import operators as graph

tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="folding reads NumPy arrays alike everywhere"
)
FLOAT32 = 1e-5  # of the logits' range
BFLOAT16 = 2e-2


def error(folded, model, x, dtype="float32"):
    expected = run(model, x)
    got = graph.compile_graph(folded, dtype).run(x).numpy()
    assert got.shape == expected.shape and got.dtype == "float32"
    return np.abs(got - expected).max() / np.ptp(expected)


def with_block(folded, index, **changes):
    blocks = list(folded.blocks)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    return dataclasses.replace(folded, blocks=tuple(blocks))


def without_bias(product):
    return fuse.Product(product.kernel, np.zeros_like(product.bias))


# One kind on every backend; the rest differs in nothing that a backend sees.
EVERYWHERE = "registers"


@pytest.mark.parametrize("kind", KINDS)
def test_folded_model_is_the_model(kind):
    if keras.backend.backend() != "tensorflow" and kind != EVERYWHERE:
        pytest.skip("one kind is enough beside TensorFlow")
    model = tiny_model(kind)
    x = images(model.config)
    folded = fuse.fold(model)
    assert error(folded, model, x) < FLOAT32
    assert error(folded, model, x, "bfloat16") < BFLOAT16
    # Negative control: one bias of one block away, in the last one too.
    for index in range(model.config.depth):
        mlp_1 = without_bias(folded.blocks[index].mlp_1)
        assert error(with_block(folded, index, mlp_1=mlp_1), model, x) > 1e-3


CASES = {
    "post_norm_layer_scale": ("post_norm", {"layer_scale": 0.3, "num_registers": 1}),
    "post_norm_final_norm": ("post_norm", {"final_norm": "before_pooling", "qk_norm": True}),
    "pre_norm_no_final_norm": ("paper", {"final_norm": "none"}),
    "after_pooling_features": ("mean", {"num_classes": 0}),
    "pre_logits_features": ("pre_logits", {"num_classes": 0}),
    "patch_norm_no_positions": ("patch_norm", {"position_embedding": "none"}),
    "learned_2d_no_class_row": ("learned_2d", {"position_class_row": False, "num_registers": 2}),
    "all_tokens_features": ("all_tokens", {"num_classes": 0, "final_norm": "none"}),
    "softmax": ("paper", {"classifier_activation": "softmax", "in_channels": 5, "depth": 1}),
    "square_image": ("mean_all", {"image_size": 32, "patch_size": (16, 4), "dropout": 0.5}),
}


@tensorflow_only
@pytest.mark.parametrize("case", CASES)
def test_folded_combination_is_the_model(case):
    kind, changes = CASES[case]
    model = tiny_model(kind, seed=3, **changes)
    x = images(model.config, count=2)
    assert error(fuse.fold(model), model, x) < FLOAT32


@tensorflow_only
def test_folded_stream_is_centred_only_where_norms_alone_read_it():
    centred = {kind: fuse.fold(tiny_model(kind)).blocks[0].mlp_norm.centred for kind in KINDS}
    assert {kind for kind, yes in centred.items() if not yes} == {"post_norm", "patch_norm"}
    assert not fuse.fold(tiny_model(final_norm="none")).blocks[0].mlp_norm.centred
    folded = fuse.fold(tiny_model())
    block = folded.blocks[0]
    for array in (block.output.kernel, block.mlp_2.bias, folded.positions, folded.prefix):
        assert np.abs(array.mean(-1)).max() < 1e-7 < np.abs(array).max()


@tensorflow_only
def test_post_norm_keeps_its_gain():
    """It stands on the residual stream, so a Dense behind it cannot take it over."""
    model = tiny_model("post_norm")
    x = images(model.config)
    folded = fuse.fold(model)
    block = folded.blocks[0]
    norm, qkv = block.mlp_norm, folded.blocks[1].qkv
    np.testing.assert_allclose(norm.scale, model.blocks[0].mlp_norm.gamma)
    moved = fuse.Product(norm.scale[:, None] * qkv.kernel, norm.offset @ qkv.kernel + qkv.bias)
    wrong = with_block(folded, 0, mlp_norm=fuse.Norm(norm.epsilon))
    assert error(with_block(wrong, 1, qkv=moved), model, x) > 1e-2
    assert all(b.attention_norm.scale is None for b in fuse.fold(tiny_model()).blocks)


@tensorflow_only
def test_bias_of_keys_and_values_is_folded_away():
    model = tiny_model()
    columns = model.config.num_heads * model.config.key_dim
    for block in fuse.fold(model).blocks:
        assert block.qkv.kernel.dtype == "float32" and block.qkv.kernel.shape == (20, 3 * columns)
        assert np.abs(block.qkv.bias[:columns]).min() > 0
        assert not block.qkv.bias[columns:].any()


@tensorflow_only
def test_fold_merges_lora_and_leaves_the_model():
    model = tiny_model("registers")
    x = images(model.config)
    before = run(model, x)
    model.enable_lora(2, ("query", "value", "attention_output", "mlp"))
    for v in model.weights:
        if "lora_kernel_b" in v.path:
            v.assign(np.random.default_rng(0).normal(size=v.shape))
    adapted = run(model, x)
    assert np.abs(adapted - before).max() > 1e-2
    assert error(fuse.fold(model), model, x) < FLOAT32
    np.testing.assert_array_equal(run(model, x), adapted)
    assert model.blocks[0].attention.query_dense.lora_enabled


@tensorflow_only
def test_fold_reads_a_mixed_precision_model_in_full():
    mixed = tiny_model(dtype="mixed_bfloat16")
    full = tiny_model()
    x = images(TINY)
    assert error(fuse.fold(mixed), full, x) < FLOAT32
    assert np.abs(run(mixed, x) - run(full, x)).max() / np.ptp(run(full, x)) > 1e-4


@tensorflow_only
def test_fold_refuses_what_it_cannot_fold():
    quantised = tiny_model()
    quantised.blocks[1].mlp.dense_2.quantize("int8")
    for model, words in (
        (quantised, "must not be quantised"),
        (keras.Sequential(), "must be a keras_vit.ViT"),
        (tiny_model().features(), "must be a keras_vit.ViT"),
        (tiny_model(classifier_activation="relu"), "classifier_activation must be"),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            fuse.fold(model)


@tensorflow_only
def test_bfloat16_rounds():
    model = tiny_model()
    assert error(fuse.fold(model), model, images(TINY), "bfloat16") > 1e-4
    with pytest.raises(ValueError, match="dtype must be"):
        graph.compile_graph(fuse.fold(model), "float16")


@tensorflow_only
def test_weights_are_variables_or_constants(monkeypatch):
    model = tiny_model("registers")
    x = images(model.config)
    folded = fuse.fold(model)
    module = graph.compile_graph(folded)
    constant = graph.compile_graph(folded, constants=True)
    np.testing.assert_allclose(module.run(x), constant.run(x), atol=1e-5)
    assert len(module.variables) == len(module.weights) > 10 * model.config.depth
    assert not constant.weights
    monkeypatch.setattr(graph, "MAX_CONSTANTS", 0)  # a graph with 2 GB cannot be serialised
    large = graph.compile_graph(folded, constants=True)
    np.testing.assert_array_equal(large.run(x), module.run(x))
    assert len(large.weights) == len(module.weights)


@tensorflow_only
def test_grappler_fuses_bias_gelu_and_residual_into_the_products(tmp_path):
    import tensorflow as tf

    if not tf.config.list_physical_devices("CPU") or not _has_onednn(tf):
        pytest.skip("TensorFlow has no oneDNN here")
    depth = 3
    model = tiny_model(depth=depth)
    for dtype in ("float32", "bfloat16"):
        counts = _fused_products(tf, graph.compile_graph(fuse.fold(model), dtype), tmp_path / dtype)
        assert counts["BiasAdd+GeluExact"] == depth
        # The output projection of the last block works for one token an image.
        assert counts["BiasAdd+Add"] >= 2 * depth - 1
    tanh = tiny_model(depth=1, gelu="tanh")
    counts = _fused_products(tf, graph.compile_graph(fuse.fold(tanh)), tmp_path / "tanh")
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


def test_fused_predicts_as_the_model_does():
    model = tiny_model("mean")
    x = images(model.config, count=5)
    predict = graph.fused(model)
    expected = run(model, x)
    np.testing.assert_allclose(predict(x, batch_size=2), expected, atol=1e-5)
    np.testing.assert_allclose(predict(keras.ops.convert_to_tensor(x)), expected, atol=1e-5)
    assert isinstance(predict(x[:1].tolist()), np.ndarray)
    randomise(model, seed=9)
    np.testing.assert_allclose(predict(x), expected, atol=1e-5)
    assert np.abs(predict(x) - run(model, x)).max() > 1e-2
    for wrong in (x[0], x[:, :-1], x[:0]):
        with pytest.raises(ValueError, match="images must have shape"):
            predict(wrong)
    with pytest.raises(ValueError, match="batch_size must be"):
        predict(x, batch_size=0)


def test_fused_without_tensorflow_says_what_to_install(monkeypatch):
    folded = fuse.fold(tiny_model())
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="pip install"):
        graph.compile_graph(folded)

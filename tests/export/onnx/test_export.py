"""The ONNX file: it is the model in two runtimes, says what it is, and is complete or absent."""

import dataclasses
import importlib
import json
import sys

import keras
import numpy as np
import pytest
from conformance import CONFIGS, images, quick_if_covering, run, tiny_model

from keras_vit import ViTConfig, preprocessing, runtime
from keras_vit.export.fold import fold
from keras_vit.export.onnx import export as export_module
from keras_vit.export.onnx.export import export_onnx
from keras_vit.export.onnx.operators import to_onnx
from keras_vit.model import head_logits
from keras_vit.runtime.onnx import OnnxRuntime

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
FLOAT32 = 1e-5  # of the range
FLOAT16 = 5e-3


def made(model, folded=None, **arguments):
    folded = folded or fold(model)
    return to_onnx(folded, **arguments)


def outputs(content, x):
    session = onnxruntime.InferenceSession(content.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": x}), strict=True))


def wanted(model, x):
    """What the model's own layers give, before any activation."""
    features = run(model.features(), x)
    if not model.config.num_classes:
        return {"features": features}
    logits = keras.ops.convert_to_numpy(head_logits(model, features))
    return {"logits": logits, "features": features}


def error(found, expected):
    assert found.shape == expected.shape and found.dtype == "float32"
    return np.abs(found - expected).max() / np.ptp(expected)


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def broken(folded):
    """The last block with another bias."""
    mlp_1 = folded.blocks[-1].mlp_1
    mlp_1 = dataclasses.replace(mlp_1, bias=mlp_1.bias + 0.5)
    last = dataclasses.replace(folded.blocks[-1], mlp_1=mlp_1)
    return dataclasses.replace(folded, blocks=(*folded.blocks[:-1], last))


@pytest.mark.sampled
@pytest.mark.parametrize("case", quick_if_covering(CONFIGS))  # test_program.py: all of them
def test_onnx_is_the_model(case):
    model = tiny_model(case, seed=3)
    x = images(model.config)
    folded = fold(model)
    for dtype, bound in (("float32", FLOAT32), ("float16", FLOAT16)):
        content = made(model, folded, dtype=dtype)
        onnx.checker.check_model(content, full_check=True)
        assert {item.domain for item in content.opset_import} == {""}
        found = outputs(content, x)
        expected = wanted(model, x)
        for name, value in expected.items():
            assert error(found[name], value) < bound
        assert set(found) == set(expected) | ({"probabilities"} if "logits" in expected else set())
        if "logits" in found:
            np.testing.assert_allclose(found["probabilities"], softmax(found["logits"]), atol=1e-6)
    # Negative controls: float16 rounds, and a bias counts.
    assert error(found["features"], expected["features"]) > 1e-5
    found = outputs(made(model, broken(folded)), x)
    assert all(error(found[name], value) > 1e-3 for name, value in expected.items())


@pytest.mark.backend_free
def test_onnx_takes_any_batch():
    model = tiny_model("registers")
    x = images(model.config, 7)
    content = made(model)
    (taken,) = content.graph.input
    for value in (taken, *content.graph.output):
        batch, *rest = value.type.tensor_type.shape.dim
        assert batch.dim_param == "batch" and all(axis.dim_value > 0 for axis in rest)
    together = outputs(content, x)["logits"]
    for count in (1, 3):
        np.testing.assert_allclose(
            outputs(content, x[:count])["logits"], together[:count], atol=1e-5
        )
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["registers", "wide_heads"])
def test_onnx_is_the_model_in_another_runtime_too(kind):
    """ONNX' own evaluator in NumPy: what is written is standard, not ONNX Runtime's own."""
    model = tiny_model(kind)
    x = images(model.config, 2)
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(made(model))
    names = [output.name for output in made(model).graph.output]
    found = dict(zip(names, evaluator.run(None, {"images": x}), strict=True))
    for name, value in wanted(model, x).items():
        assert error(found[name], value) < FLOAT32
    assert error(found["logits"], run(model, images(model.config, 2, seed=9))) > 1e-2


@pytest.mark.backend_free
def test_onnx_has_one_operator_for_each_thing_and_readable_names():
    model = tiny_model(depth=3)
    content = made(model)
    kinds = [node.op_type for node in content.graph.node]
    assert kinds.count("Gelu") == 3 and kinds.count("LayerNormalization") == 7
    assert kinds.count("Gemm") == 1 + 3 * 4 + 1 + 1  # the last block has a query of its own
    assert not {"Erf", "Expand", "Shape", "Einsum"} & set(kinds)
    weights = {item.name: tuple(item.dims) for item in content.graph.initializer}
    assert weights["encoder_block_1/attention/qkv/kernel"] == (20, 60)
    assert weights["encoder_block_2/mlp/dense_1/bias"] == (28,)
    assert all(node.name for node in content.graph.node)
    half = {item.name: item.data_type for item in made(model, dtype="float16").graph.initializer}
    assert half["patches/projection/kernel"] == onnx.TensorProto.FLOAT16
    assert half["head/kernel"] == onnx.TensorProto.FLOAT
    assert {n.attribute[0].s for n in content.graph.node if n.op_type == "Gelu"} == {b"none"}
    tanh = made(tiny_model("wide_heads")).graph.node
    assert {n.attribute[0].s for n in tanh if n.op_type == "Gelu"} == {b"tanh"}


@pytest.mark.backend_free
def test_onnx_in_float16_multiplies_in_it_and_takes_softmax_in_float32():
    graph = onnx.shape_inference.infer_shapes(made(tiny_model(), dtype="float16")).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
    for kind, wanted in (("Softmax", "FLOAT"), ("MatMul", "FLOAT16"), ("Gelu", "FLOAT16")):
        nodes = [node for node in graph.node if node.op_type == kind]
        found = {types[node.input[0]] for node in nodes}
        assert len(nodes) >= 2 and found == {onnx.TensorProto.DataType.Value(wanted)}
    products = {n.name: types[n.input[0]] for n in graph.node if n.op_type == "Gemm"}
    assert products.pop("head/Gemm") == onnx.TensorProto.FLOAT
    assert set(products.values()) == {onnx.TensorProto.FLOAT16}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = tiny_model(labels=("cat", "dog", "élan vital"), pixel_mean=(0.4, 0.5, 0.6))
    path = tmp_path_factory.mktemp("onnx") / "folder" / "tiny.onnx"
    return model, export_onnx(model, path)


def test_export_onnx_writes_a_verified_file(exported):
    model, export = exported
    x = images(model.config)
    assert export.path.stat().st_size == export.size and export.opset == 20
    assert [path.name for path in export.path.parent.iterdir()] == ["tiny.onnx"]
    assert export.verification.images == 16 and export.verification.same_top_class == 1
    seen = export.verification
    assert seen.difference < 1e-5 * seen.logits_range and seen.features_difference < 1e-5
    assert "ONNX Runtime" in seen.where
    assert 0 < export.latency and 0 < export.plain_latency
    opened = runtime.open(export.path)
    expected = wanted(model, x)
    assert error(opened.logits(x), expected["logits"]) < FLOAT32
    assert error(opened.features(x), expected["features"]) < FLOAT32
    assert error(opened.logits(x[::-1]), expected["logits"]) > 1e-2


@pytest.mark.backend_free
def test_export_onnx_says_what_the_file_is(exported):
    model, export = exported
    content = onnx.load(export.path)
    fields = {item.key: item.value for item in content.metadata_props}
    record = json.loads(fields["keras_vit"])
    assert ViTConfig.from_dict(record["config"]) == model.config
    assert record["labels"] == ["cat", "dog", "élan vital"] == fields["labels"].split("\n")
    assert (record["activation"], record["dtype"], record["images"]) == (
        "softmax",
        "float32",
        "float32",
    )
    assert set(record["versions"]) == {"keras_vit", "keras", "onnx", "onnxruntime"}
    assert "mean (0.4, 0.5, 0.6)" in fields["images"] and "24x16" in fields["resize"]
    assert "2 blocks of width 20" in content.doc_string and content.producer_name == "keras_vit"
    assert [item.version for item in content.opset_import] == [20]
    assert all(value.doc_string for value in (*content.graph.input, *content.graph.output))


@pytest.mark.backend_free
def test_export_onnx_of_pixels_a_sigmoid_and_lora(tmp_path):
    model = tiny_model(
        pixel_mean=(0.4, 0.5, 0.6), pixel_std=0.3, classifier_activation="sigmoid", num_classes=7
    )
    before = run(model, images(model.config))
    model.enable_lora(2)
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
    assert np.abs(run(model, images(model.config)) - before).max() > 1e-2
    path = tmp_path / "pixels.onnx"
    export = export_onnx(
        model, path, images="uint8", dtype="float16", labels=list("abcdefg"), opset=21
    )
    assert 0.01 > export.verification.difference / export.verification.logits_range > 1e-5
    opened = OnnxRuntime(path)
    assert opened.labels == tuple("abcdefg") and opened.activation == "sigmoid"
    pixels = np.random.default_rng(0).integers(0, 256, (3, 24, 16, 3), dtype=np.uint8)
    expected = run(model, preprocessing.preprocess(pixels, model.config))  # with the sigmoid
    np.testing.assert_allclose(opened.probabilities(pixels), expected, atol=0.01)
    assert np.abs(opened.probabilities(pixels[::-1]) - expected).max() > 0.02
    with pytest.raises(ValueError, match="uint8 pixels"):
        opened.logits(images(model.config))


@pytest.mark.backend_free
def test_export_onnx_replaces_a_file_only_when_told(tmp_path):
    model = tiny_model("features", depth=1)
    path = tmp_path / "tiny.onnx"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="overwrite"):
        export_onnx(model, path)
    assert path.read_bytes() == b"mine"
    export = export_onnx(model, path, overwrite=True)
    assert export.verification.same_top_class is None
    with pytest.raises(ValueError, match="within 1e-12 of their range"):
        export_onnx(model, path, overwrite=True, bound=1e-12)
    x = images(model.config, 2)
    assert export_onnx(model, path, overwrite=True, verify=x).verification.images == 2
    with pytest.raises(ValueError, match="must have a head"):
        OnnxRuntime(path).logits(images(model.config))


@pytest.mark.backend_free
def test_export_onnx_that_is_another_model_leaves_no_file(tmp_path, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(export_module, "fold", lambda model: broken(fold(model)))
    with pytest.raises(ValueError, match="logits must be the model's within 1e-05"):
        export_onnx(model, tmp_path / "made" / "tiny.onnx")
    (tmp_path / "there.onnx").write_bytes(b"mine")
    with pytest.raises(ValueError, match="must be the model's within"):
        export_onnx(model, tmp_path / "there.onnx", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"]
    assert (tmp_path / "there.onnx").read_bytes() == b"mine"


@pytest.mark.backend_free
def test_export_onnx_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    model = tiny_model()
    quantized = tiny_model()
    quantized.blocks[1].mlp.dense_2.quantize("int8")
    newest = onnx.defs.onnx_opset_version()
    for words, wrong in (
        ("must not be quantized", {"model": quantized}),
        ("must be a keras_vit.ViT", {"model": keras.Sequential()}),
        ("path must end in .onnx", {"path": tmp_path / "tiny.tflite"}),
        ("dtype must be one of", {"dtype": "bfloat16"}),
        ("images must be one of", {"images": "float16"}),
        ("activation must be one of", {"activation": "relu"}),
        ("labels must be num_classes=3", {"labels": ["a", "b"]}),
        ("labels must be printable", {"labels": ["a", "b", "c\n"]}),
        ("labels must be a sequence", {"labels": "abc"}),
        ("labels must be a sequence", {"labels": 3}),
        (f"opset must be an int from 20 to {newest}", {"opset": 19}),
        (f"opset must be an int from 20 to {newest}", {"opset": newest + 1}),
        ("bound must be", {"bound": 0}),
        ("bound must be", {"bound": True}),
        ("verify must be", {"verify": np.zeros((1, 8, 8, 3))}),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            export_onnx(**{"model": model, "path": tmp_path / "tiny.onnx", **wrong})
    monkeypatch.setattr(export_module, "MAX_BYTES", 2 * model.count_params())
    with pytest.raises(ValueError, match="2 GB, and dtype='float16' does. Received"):
        export_onnx(model, tmp_path / "tiny.onnx")
    monkeypatch.setattr(export_module, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="2 GB, and no dtype does. Received"):
        export_onnx(model, tmp_path / "tiny.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
def test_onnx_in_float16_refuses_weights_that_it_cannot_hold():
    model = tiny_model()
    model.blocks[0].mlp.dense_2.bias.assign(np.linspace(0, 1e6, 20))
    with pytest.raises(ValueError, match="float16 cannot hold.*encoder_block_0/mlp/dense_2/bias"):
        made(model, dtype="float16")
    assert made(model)


def test_export_onnx_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    for name in ("onnxruntime", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"{name} must be.*keras3-vit\\[onnx\\]"):
            export_onnx(tiny_model(depth=1), tmp_path / "tiny.onnx")
    assert not list(tmp_path.iterdir())

"""A TFLite file in LiteRT: any number of images, floats and pixels, and what it refuses."""

import functools
import json
import os
import sys

import flatbuffers
import numpy as np
import pytest
from conformance import TINY, images, run, tiny_model

from keras_vit import runtime
from keras_vit.export.fold import fold
from keras_vit.export.tflite.metadata import add_metadata
from keras_vit.export.tflite.operators import to_float32_tflite
from keras_vit.preprocessing import normalize
from keras_vit.runtime import tflite
from keras_vit.runtime.tflite import TFLiteRuntime
from keras_vit.runtime.tflite_file import litert

pytestmark = pytest.mark.backend_free


same_model = functools.cache(tiny_model)


@functools.cache
def converted(kind="paper", output="logits", takes="float32", batch_size=2):
    """A file without metadata."""
    return to_float32_tflite(
        fold(same_model(kind)),
        batch_size=batch_size,
        output=output,
        images=takes,
        activation="softmax",
    )


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tflite")

    def write(name, output="logits", takes="float32", batch_size=2, kind="paper", **changes):
        path = folder / f"{name}.tflite"
        model = same_model(kind)
        if not path.exists():
            content = converted(kind, output, takes, batch_size)
            record = {"format": 1, "config": model.config.to_dict(), "labels": None}
            record |= {"activation": "softmax", "output": output, "images": takes} | changes
            path.write_bytes(add_metadata(content, record, "tiny", "A tiny model"))
        return path, model

    return write


def test_fixed_batch_accepts_any_number_of_images(write):
    path, model = write("fixed")
    opened = runtime.open(path)
    assert isinstance(opened, TFLiteRuntime) and opened.kind == "tflite"
    assert opened.config == TINY and opened.batch_size == 2 and opened.outputs == ("logits",)
    assert opened.where.startswith("LiteRT ")
    x = images(TINY, 5)
    expected = run(model, x)
    for count in (5, 2, 1):
        np.testing.assert_allclose(opened.logits(x[:count]), expected[:count], atol=1e-5)
    assert opened.logits(x[:0]).shape == (0, 3)
    assert np.abs(opened.logits(x) - expected[::-1]).max() > 1e-2


def test_run_refuses_what_the_file_does_not_take(write):
    opened = TFLiteRuntime(write("fixed")[0])
    x = images(TINY, 2)
    for wrong in (x.astype("float64"), x[:, :-1]):
        with pytest.raises(ValueError, match="images must be float32 of shape.*Received"):
            opened.run(wrong)
    with pytest.raises(ValueError, match="images must hold pixels normalized for the model"):
        opened.run(np.full_like(x, 255))


def test_free_batch_accepts_any_number_of_images(write):
    path, model = write("free", batch_size=None)
    opened = TFLiteRuntime(path, num_threads=2)
    assert opened.batch_size is None
    x = images(TINY, 37)  # more than it runs at once
    expected = run(model, x)
    for count in (1, 37, 3):
        np.testing.assert_allclose(opened.logits(x[:count]), expected[:count], atol=1e-5)


def test_pixels_are_normalized_for_a_file_that_takes_floats(write):
    pixels = np.random.default_rng(2).integers(0, 256, (3, *TINY.input_shape), "uint8")
    floats, model = write("fixed")
    bytes_, _ = write("pixels", takes="uint8")
    expected = run(model, normalize(pixels, TINY))
    for path in (floats, bytes_):
        np.testing.assert_allclose(runtime.open(path).logits(pixels), expected, atol=1e-5)
    opened = runtime.open(bytes_)
    with pytest.raises(ValueError, match=r"images must be uint8 pixels.*Received: float32"):
        opened.logits(images(TINY))
    with pytest.raises(ValueError, match=r"images must be uint8 of shape.*Received: float32"):
        opened.run(images(TINY))


def test_logits_of_probabilities_are_their_logarithms(write):
    path, model = write("probabilities", output="probabilities")
    opened = runtime.open(path)
    x = images(TINY)
    logits = run(model, x).astype("float64")
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert opened.log_probabilities and opened.outputs == ("logits",)
    np.testing.assert_allclose(opened.logits(x), expected, atol=1e-5)
    np.testing.assert_allclose(opened.probabilities(x), np.exp(expected), atol=1e-6)
    np.testing.assert_array_equal(opened.run(x), opened.probabilities(x))
    plain = runtime.open(write("fixed")[0])
    np.testing.assert_allclose(plain.probabilities(x), np.exp(expected), atol=1e-6)
    assert not plain.log_probabilities


def test_features_need_a_file_of_features(write):
    path, model = write("features", output="features", kind="features")
    x = images(TINY)
    opened = runtime.open(path)
    np.testing.assert_allclose(opened.features(x), run(model, x), atol=1e-5)
    with pytest.raises(ValueError, match="must have a head"):
        opened.logits(x)
    with pytest.raises(ValueError, match=r"output='features'.*Received: output='logits'"):
        runtime.open(write("fixed")[0]).features(x)


def test_images_of_another_shape_are_refused(write):
    opened = runtime.open(write("fixed")[0])
    for wrong in (images(TINY)[0], images(TINY)[:, :-1], images(TINY).astype("int32")):
        with pytest.raises(ValueError, match="images must be"):
            opened.logits(wrong)


def test_other_tflite_files_are_refused(write, tmp_path):
    content = write("fixed")[0].read_bytes()
    path = tmp_path / "other.tflite"
    for wrong in (b"", b"PK", converted()):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"as keras_vit.export_tflite writes it.*other.tflite"):
            runtime.open(path)
    for wrong in (content[: len(content) // 2], content[:100]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"be a whole TFLite file.*other.tflite"):
            runtime.open(path)
    path.write_bytes(content.replace(b'{"format": 1', b'{"format": 2'))
    with pytest.raises(ValueError, match=r"format 1.*Received: format 2"):
        runtime.open(path)
    with pytest.raises(FileNotFoundError):
        runtime.open(tmp_path / "none.tflite")
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="num_threads must be"):
            TFLiteRuntime(write("fixed")[0], num_threads=wrong)


def test_record_describes_the_file(write):
    opened = TFLiteRuntime(write("labeled", labels=["a", "b", "c"], more=1)[0])
    assert opened.labels == ("a", "b", "c") and opened.record["more"] == 1
    assert json.dumps(opened.record)


def test_missing_litert_is_an_error(write, monkeypatch):
    path, _ = write("fixed")
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(ImportError, match="ai-edge-litert must be installed"):
        TFLiteRuntime(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"depth": 4096', '"depth": 9999', "depth must be at most 4096. Received: depth=9999"),
        ('"image_size": [24, 16]', '"image_size": [88, 16]', r"in its config, \(88, 16, 3\)"),
        ('"labels": null, "act', '"labels": 1234, "act', "state labels as a list of strings"),
        ('"images": "float32"', '"images": "floatXX"', "state images as one of"),
        ('"output": "logits"', '"output": "absurd"', "state output as one of"),
    ],
)
def test_tflite_file_with_an_absurd_record_is_refused(write, tmp_path, old, new, message):
    config = same_model("paper").config.replace(depth=4096).to_dict()
    path, _ = write("stated", config=config)
    content = path.read_bytes()
    assert runtime.open(path).config.depth == 4096  # no model is built from it
    assert content.count(old.encode()) == 1 and len(old) == len(new)
    changed = tmp_path / "x.tflite"
    changed.write_bytes(content.replace(old.encode(), new.encode()))
    with pytest.raises(ValueError, match=message):
        runtime.open(changed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2**20, None), "take batches of at most 268435456 bytes"),
        ((None, 2**28), "have tensors of at most 67108864 bytes, enough for its config"),
    ],
)
def test_tflite_file_that_asks_for_too_much_is_refused(
    write, tmp_path, monkeypatch, sizes, message
):
    """The memory is never asked for: LiteRT does not see the file."""
    schema = litert("schema_py_generated")
    content = bytearray(write("fixed")[0].read_bytes())
    graph = schema.Model.GetRootAs(content).Subgraphs(0)
    tensors = graph.Tensors(graph.Inputs(0)), graph.Tensors(graph.TensorsLength() // 2)
    for tensor, size in zip(tensors, sizes, strict=True):
        if size is not None:
            tensor.ShapeAsNumpy()[0] = size  # in `content`
    path = tmp_path / "x.tflite"
    path.write_bytes(content)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(ValueError, match=f"{message}.*x.tflite"):
        runtime.open(path)


@pytest.mark.parametrize(
    ("operator", "options"), [("SPLIT", "SplitOptions"), ("PACK", "PackOptions")]
)
def test_operator_without_its_options_is_refused(write, tmp_path, operator, options):
    """LiteRT reads options that are not there, which ends the process."""
    schema = litert("schema_py_generated")
    model = schema.ModelT.InitFromPackedBuf(write("fixed")[0].read_bytes())
    transpose, other = (getattr(schema.BuiltinOperator, n) for n in ("TRANSPOSE", operator))
    (code,) = (code for code in model.operatorCodes if code.builtinCode == transpose)
    code.builtinCode = code.deprecatedBuiltinCode = other
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path = tmp_path / "x.tflite"
    path.write_bytes(bytes(builder.Output()))
    with pytest.raises(ValueError, match=f"have {options} for {operator}.*x.tflite"):
        runtime.open(path)


def test_damaged_name_of_a_tensor_is_refused(write, tmp_path):
    content = write("fixed")[0].read_bytes()
    graph = litert("schema_py_generated").Model.GetRootAs(content).Subgraphs(0)
    path = tmp_path / "x.tflite"
    for tensor in (graph.Inputs(0), graph.Outputs(0)):
        name = graph.Tensors(tensor).Name()
        field = len(name).to_bytes(4, "little") + name
        assert field in content
        path.write_bytes(content.replace(field, field[:-1] + b"\xff"))  # no UTF-8
        with pytest.raises(ValueError, match=r"be a TFLite file that LiteRT runs.*x\.tflite"):
            runtime.open(path)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_all_cores_are_those_of_the_process(monkeypatch):
    taken = []
    monkeypatch.setattr(tflite, "TFLiteRuntime", lambda path, **given: taken.append(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 5})
    runtime.open("a.tflite")
    runtime.open("a.tflite", all_cores=True)
    assert taken == [{"num_threads": None}, {"num_threads": 3}]

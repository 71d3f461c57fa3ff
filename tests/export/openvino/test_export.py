"""OpenVINO's files: they are the model, say what they are, and are complete or absent."""

import ctypes
import gc
import json
import sys

import numpy as np
import pytest
from conformance import CONFIGS, TINY, images, quick_if_covering, run, tiny_model

import keras_vit
from keras_vit import preprocessing, runtime
from keras_vit.export.fold import fold
from keras_vit.export.onnx.operators import to_onnx
from keras_vit.export.openvino import export as export_module
from keras_vit.export.openvino.convert import PairedOperators, measure_channels, to_openvino
from keras_vit.export.openvino.export import export_openvino
from keras_vit.export.quantization import modes_of, product_names
from keras_vit.export.smoothing import whole_ranges
from keras_vit.runtime.openvino import OpenVINORuntime, compile_model, core

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")
pytestmark = pytest.mark.backend_free
CALIBRATION = images(TINY, 20, seed=3)
BFLOAT16 = 0.05  # of the range


def error(found, wanted):
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() / np.ptp(wanted)


def answers(made, x, dtype="float32"):
    return compile_model(made, dtype, num_threads=1)({"images": x})["features"]


@pytest.mark.parametrize("case", quick_if_covering(CONFIGS))  # test_program.py: all of them
def test_every_kind_is_the_model(case):
    model = tiny_model(case, seed=3)
    x, folded = images(model.config, 3), fold(model)
    made = to_openvino(folded, images="float32", activation="softmax")
    wanted = run(model.features(), x)
    assert error(answers(made, x), wanted) < 1e-5
    # Negative control: another image is another answer.
    assert error(answers(made, x[::-1]), wanted) > 1e-3


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=("cat", 'é <&"', "emu"), pixel_mean=(0.4, 0.5, 0.6))


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    return export_openvino(model, tmp_path_factory.mktemp("openvino") / "folder" / "tiny.xml")


def test_export_openvino_writes_two_verified_files(model, exported):
    seen = exported.verification
    assert sorted(path.name for path in exported.path.parent.iterdir()) == ["tiny.bin", "tiny.xml"]
    assert exported.size == sum(path.stat().st_size for path in exported.path.parent.iterdir())
    assert seen.images == 16 and seen.same_top_class == 1 and "OpenVINO" in seen.where
    assert seen.difference < 1e-5 * seen.logits_range and seen.features_difference < 1e-5
    opened, x = runtime.open(exported.path), images(model.config)
    assert isinstance(opened, OpenVINORuntime) and opened.kind == "openvino"
    assert opened.labels == ("cat", 'é <&"', "emu") and opened.config == model.config
    assert error(opened.logits(x), run(model, x)) < 1e-5
    assert error(opened.logits(x[::-1]), run(model, x)) > 1e-2
    assert error(opened.features(x), run(model.features(), x)) < 1e-5
    assert opened.logits(x[:0]).shape == (0, 3)
    np.testing.assert_allclose(opened.probabilities(x).sum(-1), 1, atol=1e-5)
    assert opened.record["dtype"] == "float32" and opened.record["quantize"] is None
    assert set(opened.record["versions"]) == {"keras_vit", "keras", "onnx", "openvino"}


def test_runtime_computes_in_the_dtype_of_the_export(model, tmp_path):
    export = export_openvino(model, tmp_path / "half.xml", dtype="bfloat16", images="uint8")
    hint = OpenVINORuntime(export.path)._compiled.get_property("INFERENCE_PRECISION_HINT")
    able = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert hint == (openvino.Type.bf16 if able else openvino.Type.f32)
    seen = export.verification
    assert 1e-5 < seen.difference / seen.logits_range < BFLOAT16  # the weights are rounded anyway
    pixels = np.random.default_rng(0).integers(0, 256, (3, 24, 16, 3), dtype=np.uint8)
    opened = runtime.open(export.path)
    wanted = run(model, preprocessing.preprocess(pixels, model.config))
    assert error(opened.logits(pixels), wanted) < BFLOAT16
    with pytest.raises(ValueError, match="uint8 pixels"):
        opened.logits(images(model.config))


def test_runtime_in_float32_does_not_round(exported):
    compiled = OpenVINORuntime(exported.path, num_threads=1)._compiled
    assert compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_int8_products_are_paired_and_near_the_model(model):
    folded = fold(model)
    wanted = answers(to_openvino(folded, images="float32", activation="softmax"), CALIBRATION)
    ranges = whole_ranges(measure_channels(folded, CALIBRATION))
    np.testing.assert_allclose(
        ranges["patches/projection"], (CALIBRATION.min(), CALIBRATION.max()), rtol=1e-6
    )
    how = modes_of("int8", product_names(folded), ["encoder_block_0/mlp/dense_1"])
    made = to_openvino(
        folded, images="float32", activation="softmax", ops=PairedOperators(how, ranges)
    )
    assert 1e-4 < error(answers(made, CALIBRATION), wanted) < 0.1
    found = to_onnx(folded, ops=PairedOperators(how, ranges))
    kernels = {t.name: t.data_type for t in found.graph.initializer if t.name.endswith("kernel")}
    floats = {name.removesuffix("/kernel") for name, kind in kernels.items() if kind == 1}
    assert floats == {"patches/projection", "head", "encoder_block_0/mlp/dense_1"}


def test_int8_with_more_tokens_than_columns(tmp_path):
    model = tiny_model(image_size=32, patch_size=4, width=16, num_heads=2)  # 64 patches, 3 * 16
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), "uint8")
    export = export_openvino(model, tmp_path / "x.xml", quantize="int8", calibration=pixels)
    seen = export.verification
    assert seen.difference < 0.1 * seen.logits_range


def test_int8_export_is_gated_and_described(model, tmp_path):
    right, path = run(model, CALIBRATION).argmax(-1), tmp_path / "tiny.xml"
    export = export_openvino(
        model,
        path,
        dtype="bfloat16",
        quantize="int8",
        calibration=CALIBRATION,
        accuracy_data=(CALIBRATION, right),
        max_drop=10,
    )
    assert export.accuracy.export.top_1 >= 0.9 and export.verification.images == 20
    record = runtime.open(path).record
    assert (record["dtype"], record["quantize"]) == ("bfloat16", "int8")
    sweep = keras_vit.quantization_sweep(model, CALIBRATION[:4], to="openvino", num_threads=1)
    assert {row.name for row in sweep.rows if row.what == "layer"} == {
        name for name in product_names(fold(model)) if name not in ("patches/projection", "head")
    }


def test_export_openvino_replaces_files_only_when_told(tmp_path, monkeypatch):
    model = tiny_model("features", depth=1)
    path = tmp_path / "tiny.xml"
    path.with_suffix(".bin").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="overwrite be True. Received: .*tiny.bin"):
        export_openvino(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.bin"]
    export_openvino(model, path, overwrite=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="within 1e-12 of their range"):
        export_openvino(model, path, overwrite=True, bound=1e-12)
    monkeypatch.setattr(export_module, "_state_hash", lambda path: None)
    with pytest.raises(ValueError, match="that was exported with it"):
        export_openvino(model, path, overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="must have a head"):
        runtime.open(path).logits(images(model.config))


def test_runtime_refuses_other_files(model, exported, tmp_path):
    with pytest.raises(FileNotFoundError, match="without none.xml"):
        OpenVINORuntime(tmp_path / "none.xml")
    text, weights = exported.path.read_bytes(), exported.path.with_suffix(".bin").read_bytes()
    path = tmp_path / "tiny.xml"
    path.write_bytes(text)
    with pytest.raises(FileNotFoundError, match="without tiny.bin"):
        OpenVINORuntime(path)
    path.with_suffix(".bin").write_bytes(weights[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="exported with it. Received: .*damaged"):
        OpenVINORuntime(path)
    path.with_suffix(".bin").write_bytes(weights)
    assert OpenVINORuntime(path).labels == model.config.labels
    path.write_bytes(text.replace(b"float32", b"float99"))
    with pytest.raises(ValueError, match="dtype"):
        OpenVINORuntime(path)
    path.write_bytes(b"<net/>")
    with pytest.raises(ValueError, match="that OpenVINO .* opens"):
        OpenVINORuntime(path)
    other = to_openvino(fold(model), images="float32", activation="softmax")
    openvino.save_model(other, path)
    with pytest.raises(ValueError, match="with metadata, as keras_vit.export_openvino writes it"):
        OpenVINORuntime(path)


def test_export_openvino_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    model = tiny_model()
    for words, wrong in (
        ("path must end in .xml", {"path": tmp_path / "tiny.onnx"}),
        ("dtype must be one of 'float32', 'bfloat16'", {"dtype": "float16"}),
        ("quantize must be one of None, 'int8'", {"quantize": "dynamic"}),
        ("calibration must be typical images", {"quantize": "int8"}),
        ("labels must be num_classes=3", {"labels": ["a", "b"]}),
        ("images must be one of", {"images": "float16"}),
        ("bound must be", {"bound": 0}),
        ("max_drop must be", {"max_drop": "a"}),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            export_openvino(**{"model": model, "path": tmp_path / "tiny.xml", **wrong})
    with monkeypatch.context() as small:
        small.setattr(export_module, "MAX_BYTES", 100)
        with pytest.raises(ValueError, match="at most 2 GB of weights.* Received"):
            export_openvino(model, tmp_path / "tiny.xml")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ImportError, match="pip install 'keras3-vit\\[openvino\\]'"):
        export_openvino(model, tmp_path / "tiny.xml")
    assert not list(tmp_path.iterdir())


def test_record_is_json_in_the_file(exported):
    read = core().read_model(exported.path)
    record = json.loads(read.get_rt_info(["keras_vit"]).astype(str))
    assert record["format"] == 1 and len(record["weights_sha256"]) == 64


class SignalStack(ctypes.Structure):
    """`stack_t` of Linux: where a signal is handled."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def on_mapped_memory(stack):
    with open("/proc/self/maps") as maps:
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= stack.start < end for start, end in ends)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_can_be_handled_after_files_were_closed(tmp_path):
    """OpenVINO replaces their stack, and took it along when files closed in this order."""
    path = export_openvino(tiny_model(), tmp_path / "a.xml").path
    first, second = OpenVINORuntime(path), OpenVINORuntime(path)
    del first
    gc.collect()
    del second
    gc.collect()
    stack = SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    assert stack.start is None or on_mapped_memory(stack)
    stack.start = 8  # negative control
    assert not on_mapped_memory(stack)

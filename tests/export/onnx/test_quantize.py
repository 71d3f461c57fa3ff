"""Quantized ONNX files: what became int8, what did not, and how far the answer moved."""

import json

import numpy as np
import pytest
from conformance import CONFIGS, TINY, images, quick_if_covering, run, tiny_model

import keras_vit
from keras_vit import runtime
from keras_vit.export.fold import fold
from keras_vit.export.onnx import export as export_module
from keras_vit.export.onnx.export import export_onnx
from keras_vit.export.onnx.operators import to_onnx
from keras_vit.export.onnx.quantize import QuantizedOperators, measure_channels
from keras_vit.export.quantization import mode_of, modes_of, product_names
from keras_vit.export.smoothing import smoothed, whole_ranges

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.backend_free
CALIBRATION = images(TINY, 20, seed=3)
BLOCK = ("attention/qkv", "attention/attention_output", "mlp/dense_1", "mlp/dense_2")


def quantized(folded, mode, x, float_layers=()):
    ranges = {}
    if mode == "int8":
        folded, seen = smoothed(folded, measure_channels(folded, x))
        ranges = whole_ranges(seen)
    how = modes_of(mode, product_names(folded), float_layers)
    return to_onnx(folded, ops=QuantizedOperators(how, ranges))


def features(content, x):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content.SerializeToString(), options)
    return session.run(["features"], {"images": x})[0]


def error(found, wanted):
    return np.abs(found - wanted).max() / np.ptp(wanted)


def weights(content):
    return {t.name: onnx.numpy_helper.to_array(t) for t in content.graph.initializer}


def kinds(content):
    return [node.op_type for node in content.graph.node]


@pytest.mark.parametrize("case", quick_if_covering(CONFIGS))  # test_program.py: all of them
def test_every_kind_is_near_the_model(case):
    model = tiny_model(case, seed=3)
    x, folded = images(model.config, 8), fold(model)
    wanted = features(to_onnx(folded), x)
    for mode in ("dynamic", "int8"):
        content = quantized(folded, mode, x)
        onnx.checker.check_model(content, full_check=True)
        assert kinds(content).count("Gemm") == 0
        # Negative control: int8 does round.
        assert 1e-4 < error(features(content, x), wanted) < 0.12


def test_kernels_are_int8_with_a_scale_an_output():
    folded = fold(tiny_model())
    for mode in ("dynamic", "int8"):
        same = folded
        if mode == "int8":
            same, _ = smoothed(folded, measure_channels(folded, CALIBRATION))
        full, found = weights(to_onnx(same)), weights(quantized(folded, mode, CALIBRATION))
        for name in product_names(folded):
            kernel, scale = found[f"{name}/kernel"], found[f"{name}/kernel_scale"]
            assert kernel.dtype == "int8" and len(np.unique(scale)) == kernel.shape[1] > 1
            wanted = full[f"{name}/kernel"]
            assert (np.abs(kernel * scale - wanted) <= 0.501 * scale).all()
            np.testing.assert_array_equal(found[f"{name}/bias"], full[f"{name}/bias"])


def test_only_products_are_int8_and_the_ends_are_dynamic():
    content = quantized(fold(tiny_model(depth=3)), "int8", CALIBRATION)
    found = kinds(content)
    assert found.count("MatMulIntegerToFloat") == 3 * 4 + 1  # the last query is a product itself
    assert found.count("MatMulInteger") == found.count("DynamicQuantizeLinear") == 2
    assert found.count("Softmax") == 3 + 1 and found.count("LayerNormalization") == 7
    assert found.count("MatMul") == 2 * 3  # of attention
    assert {item.domain for item in content.opset_import} == {"", "com.microsoft"}
    dynamic = quantized(fold(tiny_model(depth=3)), "dynamic", CALIBRATION)
    assert {item.domain for item in dynamic.opset_import} == {""}
    assert kinds(dynamic).count("MatMulInteger") == 3 * 4 + 1 + 2
    assert mode_of("head", "int8") == mode_of("patches/projection", "int8") == "dynamic"
    assert mode_of("encoder_block_0/mlp/dense_1", "int8") == "int8"


def test_scales_of_inputs_cover_what_was_seen():
    folded = fold(tiny_model())
    seen = measure_channels(folded, CALIBRATION)
    assert set(seen) == set(product_names(folded))
    low, high = seen["patches/projection"]
    assert low.shape == (8 * 8 * 3,)
    np.testing.assert_allclose((low.min(), high.max()), (CALIBRATION.min(), CALIBRATION.max()))
    found = weights(quantized(folded, "int8", CALIBRATION))
    ranges = whole_ranges(smoothed(folded, seen)[1])
    for name in (f"encoder_block_0/{part}" for part in BLOCK):
        step, zero = found[f"{name}/input_scale"], found[f"{name}/input_zero"]
        low, high = ranges[name]
        assert zero.dtype == "uint8" and low < 0 < high
        np.testing.assert_allclose((high - low) / 255, step, rtol=1e-5)
        assert abs(-int(zero) * step - low) <= 0.501 * step
    # Negative control: half of the images have another range.
    other = whole_ranges(measure_channels(folded, CALIBRATION[:10]))
    assert other["patches/projection"] != whole_ranges(seen)["patches/projection"]


def test_float_layers_stay_as_they_are():
    folded = fold(tiny_model())
    full = weights(to_onnx(smoothed(folded, measure_channels(folded, CALIBRATION))[0]))
    kept = ("encoder_block_0/mlp", "encoder_block_1/attention/query", "head")
    found = weights(quantized(folded, "int8", CALIBRATION, kept))
    for name in product_names(folded):
        stays = name.startswith(kept)
        assert (found[f"{name}/kernel"].dtype == "float32") == stays
        assert not stays or np.array_equal(found[f"{name}/kernel"], full[f"{name}/kernel"])
    with pytest.raises(ValueError, match="which are patches/.*qkv.*Received: 'heads'"):
        quantized(folded, "int8", CALIBRATION, ["heads"])


def test_unit_that_is_always_zero_stays_finite():
    model = tiny_model()
    dense = model.blocks[0].mlp.dense_2
    dense.kernel.assign(np.zeros(dense.kernel.shape))
    folded = fold(model)
    wanted = features(to_onnx(folded), CALIBRATION)
    for mode in ("dynamic", "int8"):
        assert error(features(quantized(folded, mode, CALIBRATION), CALIBRATION), wanted) < 0.1


@pytest.fixture(scope="module")
def lopsided():
    """One unit of one MLP is huge and unused: nothing changes but the range around it."""
    model = tiny_model(labels=("cat", "dog", "emu"))
    mlp = model.get_layer("encoder_block_1").mlp
    mlp.dense_1.bias.assign(np.where(np.arange(28) == 5, 3e3, np.asarray(mlp.dense_1.bias)))
    rows = (np.arange(28) == 5)[:, None]
    mlp.dense_2.kernel.assign(np.where(rows, 0.0, 10 * np.asarray(mlp.dense_2.kernel)))
    return model


def test_sweep_names_the_layer_that_hurts_and_its_advice_helps(lopsided):
    sweep = keras_vit.quantization_sweep(lopsided, CALIBRATION, to="onnx", num_threads=1)
    assert sweep.worst(1) == ("encoder_block_1/mlp/dense_2",)
    assert {row.name for row in sweep.rows if row.what == "file"} == {"dynamic", "int8"}
    layers = [row.name for row in sweep.rows if row.what == "layer"]
    assert layers == list(product_names(fold(lopsided)))
    folded = fold(lopsided)
    wanted = features(to_onnx(folded), CALIBRATION)
    errors = [
        error(features(quantized(folded, "int8", CALIBRATION, kept), CALIBRATION), wanted)
        for kept in ((), sweep.worst(1), sweep.worst(100)[-1:])
    ]
    assert 3 * errors[1] < errors[0] and errors[2] > 2 * errors[1]
    with pytest.raises(ValueError, match="to must be one of 'tflite', 'onnx'"):
        keras_vit.quantization_sweep(lopsided, CALIBRATION, to="saved_model")


def test_export_onnx_in_int8_is_verified_gated_and_described(lopsided, tmp_path):
    right = run(lopsided, CALIBRATION).argmax(-1)
    path = tmp_path / "pets.onnx"
    kept = ["encoder_block_1/mlp/dense_2"]
    export = export_onnx(
        lopsided,
        path,
        quantize="int8",
        calibration=CALIBRATION,
        float_layers=kept,
        accuracy_data=(CALIBRATION, right),
        max_drop=10,
    )
    assert export.quantize == "int8" and export.accuracy.reference.top_1 == 1
    assert export.accuracy.export.top_1 >= 0.9 and export.verification.images == 20
    opened = runtime.open(path)
    assert opened.labels == ("cat", "dog", "emu") and opened.record["quantize"] == "int8"
    assert error(opened.logits(CALIBRATION), run(lopsided, CALIBRATION)) < 0.1
    fields = {item.key: item.value for item in onnx.load(path).metadata_props}
    assert fields["weights"] == "int8" and json.loads(fields["keras_vit"])["dtype"] == "float32"
    before = path.read_bytes()
    arguments = {"quantize": "int8", "calibration": CALIBRATION, "overwrite": True, "bound": 5}
    arguments |= {"accuracy_data": (CALIBRATION, right), "max_drop": 0}
    with pytest.raises(ValueError, match="must lose at most max_drop=0 points.*100.00%"):
        export_onnx(lopsided, path, **arguments)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_export_onnx_for_pixels_is_calibrated_with_pixels(tmp_path):
    model = tiny_model("features", depth=1)
    pixels = np.random.default_rng(4).integers(0, 256, (12, *TINY.input_shape), "uint8")
    path = tmp_path / "eyes.onnx"
    export = export_onnx(model, path, quantize="int8", calibration=pixels, images="uint8")
    assert 1e-4 < export.verification.difference / export.verification.logits_range < 0.1
    with pytest.raises(ValueError, match="of uint8 pixels, for images='uint8'"):
        export_onnx(
            model,
            path,
            quantize="int8",
            calibration=CALIBRATION,
            images="uint8",
            overwrite=True,
        )


def test_export_onnx_refuses_what_it_cannot_quantize(tmp_path, monkeypatch):
    model = tiny_model()
    for words, wrong in (
        ("quantize must be one of None, 'dynamic', 'int8'", {"quantize": "float16"}),
        ("dtype must be 'float32' with", {"quantize": "dynamic", "dtype": "float16"}),
        ("calibration must be typical images", {"quantize": "int8"}),
        ("calibration must be None", {"calibration": CALIBRATION}),
        ("calibration must hold finite", {"quantize": "int8", "calibration": CALIBRATION * np.nan}),
        ("float_layers must be names", {"float_layers": ["head"]}),
        ("float_layers must be names", {"quantize": "dynamic", "float_layers": "head"}),
        ("float_layers must name layers", {"quantize": "dynamic", "float_layers": ["heads"]}),
        ("max_drop must be", {"quantize": "dynamic", "max_drop": -1}),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            export_onnx(model, tmp_path / "tiny.onnx", **wrong)
    with pytest.raises(ValueError, match="accuracy_data must be None"):
        export_onnx(
            tiny_model("features", depth=1), tmp_path / "tiny.onnx", accuracy_data=CALIBRATION
        )
    monkeypatch.setattr(export_module, "MAX_BYTES", 2 * model.count_params())
    assert export_onnx(model, tmp_path / "dynamic.onnx", quantize="dynamic")
    with pytest.raises(ValueError, match="2 GB, while it is calibrated, and dtype='float16'"):
        export_onnx(model, tmp_path / "tiny.onnx", quantize="int8", calibration=CALIBRATION)
    assert [path.name for path in tmp_path.iterdir()] == ["dynamic.onnx"]

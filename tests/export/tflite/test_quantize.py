"""Quantized TFLite files: what became int8, what did not, and how far the answer moved."""

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from conformance import TINY, images, run, tiny_model

from keras_vit.export import quantization
from keras_vit.export.fold import fold
from keras_vit.export.tflite import quantize
from keras_vit.export.tflite.operators import to_float32_tflite
from keras_vit.preprocessing import normalize

pytestmark = pytest.mark.backend_free
PRODUCTS = (
    *(f"attention/{name}" for name in ("query", "key", "value", "attention_output")),
    *(f"mlp/{name}" for name in ("dense_1", "dense_2")),
)
LAYERS = [f"encoder_block_{i}/{name}" for i in range(2) for name in PRODUCTS]
CALIBRATION = images(TINY, 20, seed=3)


def converted(model, batch_size=1, takes="float32"):
    return to_float32_tflite(
        fold(model), batch_size=batch_size, output="logits", images=takes, activation="softmax"
    )


@pytest.fixture(scope="module")
def model():
    return tiny_model("registers")


@pytest.fixture(scope="module")
def content(model):
    return converted(model)


def logits(content, x):
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    size, found = entry["shape"][0], []
    for i in range(0, len(x), size):
        interpreter.set_tensor(entry["index"], x[i : i + size])
        interpreter.invoke()
        found.append(interpreter.get_tensor(exit_["index"]))
    return np.concatenate(found)


def error(content, wanted, x=CALIBRATION):
    return np.abs(logits(content, x) - wanted).max() / np.ptp(wanted)


def kernels(content):
    """By the layer's name: the constant of a product, as it is in the file."""
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    graph, found = model.subgraphs[0], {}
    for tensor in graph.tensors:
        name = tensor.name.decode()
        if name.endswith(("/MatMul", "/Conv2D")) and model.buffers[tensor.buffer].data is not None:
            found[name.rpartition("/")[0]] = tensor, bytes(model.buffers[tensor.buffer].data)
    return found


def kinds_by_type(content):
    """Kinds of operators that read or write int8 activations."""
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    names = {v: k for k, v in vars(schema.BuiltinOperator).items() if k.isupper()}
    graph, found = model.subgraphs[0], set()
    for operator in graph.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        activations = [graph.tensors[i] for i in (operator.inputs[0], *operator.outputs)]
        if any(tensor.type == schema.TensorType.INT8 for tensor in activations):
            found.add(names[max(code.builtinCode, code.deprecatedBuiltinCode)])
    return found


def layers_by_type(content):
    """Layers by the type of what they read at run time."""
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    graph, found = model.subgraphs[0], {}
    for operator in graph.operators:
        if len(operator.inputs) < 2:
            continue
        read, weight = (graph.tensors[i] for i in operator.inputs[:2])
        name = weight.name.decode().rpartition("/")[0]
        if name in ("patches/projection", "head", *LAYERS):
            found.setdefault(read.type, set()).add(name)
    return found


def test_modes_give_the_model_and_smaller_files(model, content):
    wanted = run(model, CALIBRATION)
    assert error(content, wanted) < 1e-5
    sizes, errors = [len(content)], []
    for mode in quantize.MODES:
        calibration = CALIBRATION if mode == "int8" else None
        found = quantize.quantize_file(content, mode, calibration=calibration)
        errors.append(error(found, wanted))
        sizes.append(len(found))
    assert errors[0] < 2e-3 and errors[1] < 0.05 and errors[2] < 0.08
    # Negative control: each does change something, the more the less it keeps.
    assert 1e-5 < errors[0] < errors[1] < errors[2]
    assert sizes[2] < sizes[1] < sizes[0] and sizes[3] < sizes[0]


def test_quantized_convolutions_of_a_stem_are_near_the_model():
    model = tiny_model("resnet_stem", seed=3)
    content, wanted = converted(model), run(model, CALIBRATION)
    assert error(content, wanted) < 1e-5
    convolutions = {name for name in kernels(content) if name.startswith("stem/")}
    assert len(convolutions) == 1 + 4 + 3 + 4
    for mode, bound, size in (("float16", 2e-3, 0.6), ("dynamic", 0.05, 0.4), ("int8", 0.08, 0.5)):
        calibration = CALIBRATION if mode == "int8" else None
        found = quantize.quantize_file(content, mode, calibration=calibration)
        assert 1e-5 < error(found, wanted) < bound
        assert len(found) < size * len(content)
        if mode == "int8":  # the root reads pixels
            assert "CONV_2D" in kinds_by_type(found)
            assert quantization.mode_of("stem/root_conv", mode) == "dynamic"
            assert quantization.mode_of("stem/stage_0_unit_0/conv_1", mode) == "int8"


def test_kernels_are_what_the_mode_says(content):
    shapes = {name: tensor.shape for name, (tensor, _) in kernels(content).items()}
    assert set(shapes) == {"patches/projection", "head", *LAYERS}
    half = kernels(quantize.quantize_file(content, "float16"))
    full = kernels(content)
    for name, (tensor, data) in half.items():
        assert tensor.type == schema.TensorType.FLOAT16
        kernel = np.frombuffer(full[name][1], "float32")
        assert np.array_equal(np.frombuffer(data, "float16"), kernel.astype("float16"))
    for mode, calibration in (("dynamic", None), ("int8", CALIBRATION)):
        for name, (tensor, data) in kernels(
            quantize.quantize_file(content, mode, calibration=calibration)
        ).items():
            assert tensor.type == schema.TensorType.INT8
            # A scale for each output: with it the integers are the kernel, up to half a step.
            scale = np.asarray(tensor.quantization.scale)
            assert scale.shape == (shapes[name][0],) and len(np.unique(scale)) > 1
            kernel = np.frombuffer(full[name][1], "float32").reshape(len(scale), -1)
            found = np.frombuffer(data, "int8").reshape(len(scale), -1) * scale[:, None]
            assert (np.abs(found - kernel) <= 0.501 * scale[:, None]).all()


def test_int8_leaves_what_is_between_the_products_in_float(content):
    found = quantize.quantize_file(content, "int8", calibration=CALIBRATION)
    assert kinds_by_type(found) == {"FULLY_CONNECTED", "QUANTIZE", "DEQUANTIZE"}
    assert not kinds_by_type(quantize.quantize_file(content, "dynamic"))
    assert layers_by_type(found) == {
        schema.TensorType.INT8: set(LAYERS),
        schema.TensorType.FLOAT32: {"patches/projection", "head"},
    }
    # Negative control: int8 everywhere.
    ranges = quantize.measure_ranges(content, CALIBRATION)
    how = dict.fromkeys(quantize.layer_names(content), "int8")
    naive = quantize.quantize_layers(content, how, ranges, quantize.BETWEEN)
    assert {"SOFTMAX", "ADD", "GELU", "MEAN"} <= kinds_by_type(naive)


def test_int8_everywhere_is_worse():
    """With a token that is far larger than the others in the stream, as trained models have."""
    model = tiny_model("no_class_token")
    (table,) = model.get_layer("position_embedding").weights
    table.assign(np.asarray(table) * np.where(np.arange(6) == 4, 200.0, 1.0)[:, None])
    content, wanted = converted(model), run(model, CALIBRATION)
    ranges = quantize.measure_ranges(content, CALIBRATION)
    how = dict.fromkeys(quantize.layer_names(content), "int8")
    naive = quantize.quantize_layers(content, how, ranges, quantize.BETWEEN)
    ours = quantize.quantize_file(content, "int8", calibration=CALIBRATION)
    assert 3 * error(ours, wanted) < error(naive, wanted)


def test_int8_has_every_operator_of_rotary_positions():
    content = converted(tiny_model("rope"))
    ranges = quantize.measure_ranges(content, CALIBRATION)
    found = kinds_by_type(quantize.quantize_layers(content, {}, ranges, quantize.BETWEEN))
    assert {"SPLIT", "CONCATENATION", "BATCH_MATMUL"} <= found


def test_float_layers_stay_as_they_are(content):
    full = kernels(content)
    for kept in (["encoder_block_0/mlp"], ("encoder_block_1/attention/query", "head", "patches")):
        found = kernels(
            quantize.quantize_file(content, "int8", calibration=CALIBRATION, float_layers=kept)
        )
        for name, (tensor, data) in found.items():
            if name.startswith(tuple(kept)):
                assert data == full[name][1] and tensor.type == schema.TensorType.FLOAT32
            else:
                assert tensor.type == schema.TensorType.INT8
    everything = ("patches", "encoder_block_0", "encoder_block_1", "head")
    assert quantize.quantize_file(content, "float16", float_layers=everything) == content
    assert quantization.kept_layers(["block_1"], ("block_1/mlp", "block_10/mlp")) == {"block_1/mlp"}


def test_bias_behind_a_dead_unit_is_kept(monkeypatch):
    """Of which int8 would have 2**31 steps, each of them next to nothing."""
    model = tiny_model()
    dense = model.get_layer("encoder_block_1").mlp.dense_1
    dense.kernel.assign(np.asarray(dense.kernel) * np.where(np.arange(28) == 5, 1e-9, 1.0))
    dense.bias.assign(np.where(np.arange(28) == 5, 2.0, np.asarray(dense.bias)))
    content, wanted = converted(model), run(model, CALIBRATION)
    assert error(quantize.quantize_file(content, "int8", calibration=CALIBRATION), wanted) < 0.04
    monkeypatch.setattr(quantize, "_bias_fits", lambda *_: True)
    assert error(quantize.quantize_file(content, "int8", calibration=CALIBRATION), wanted) > 0.06


def test_layers_with_the_same_kernel_have_their_own_names():
    model = tiny_model()
    for i in range(2):
        kernel = model.get_layer(f"encoder_block_{i}").mlp.dense_2.kernel
        kernel.assign(np.zeros(kernel.shape))
    content, wanted = converted(model), run(model, CALIBRATION)
    assert set(quantize.layer_names(content)) == {"patches/projection", "head", *LAYERS}
    found = quantize.quantize_file(
        content, "int8", calibration=CALIBRATION, float_layers=["encoder_block_0/mlp/dense_2"]
    )
    assert error(found, wanted) < 0.04


def test_kernels_of_the_same_bytes_and_another_shape_have_their_own_scales():
    """As a block has that does nothing: the converter keeps its zeros once."""
    model = tiny_model()
    for dense in (model.blocks[0].mlp.dense_1, model.blocks[0].mlp.dense_2):
        dense.kernel.assign(np.zeros(dense.kernel.shape))
    content, wanted = converted(model), run(model, CALIBRATION)
    for mode, calibration in (("dynamic", None), ("int8", CALIBRATION)):
        found = quantize.quantize_file(content, mode, calibration=calibration)
        assert error(found, wanted) < 0.05
        for tensor, _ in kernels(found).values():
            assert len(tensor.quantization.scale) == tensor.shape[0]
    assert quantize._with_own_buffers(content) != content
    assert quantize._with_own_buffers(converted(tiny_model())) == converted(tiny_model())


def test_activations_that_are_not_finite_are_refused():
    model = tiny_model()
    bias = model.blocks[0].mlp.dense_1.bias
    bias.assign(np.full(bias.shape, np.nan))
    with pytest.raises(
        ValueError, match="finite activations for .* Received: NaN .*_0/mlp/dense_1"
    ):
        quantize.quantize_file(converted(model), "int8", calibration=CALIBRATION)


def test_ranges_are_those_of_the_images(model, content):
    ranges = quantize.measure_ranges(content, CALIBRATION)
    wanted = run(model, CALIBRATION)
    read = quantize.read_operators(content)
    entering = next(iter(read[0].activations.values()))
    leaving = read[-1].scope.removesuffix(";")
    assert ranges[entering] == (CALIBRATION.min(), CALIBRATION.max())
    np.testing.assert_allclose(ranges[leaving], (wanted.min(), wanted.max()), rtol=1e-4)
    # Negative control: half of the images have another range.
    assert quantize.measure_ranges(content, CALIBRATION[:10])[entering] != ranges[entering]


def test_batch_of_the_file_does_not_matter(model, content):
    """Nor whether the number of images is a multiple of it."""
    x = CALIBRATION[:6]
    wanted = logits(quantize.quantize_file(content, "int8", calibration=x[:4]), x)
    for batch_size in (3, None):
        other = converted(model, batch_size)
        found = logits(quantize.quantize_file(other, "int8", calibration=x[:4]), x)
        np.testing.assert_allclose(found, wanted, atol=0.02 * np.ptp(wanted))
    # Negative control: other images, other ranges.
    found = logits(quantize.quantize_file(content, "int8", calibration=x[4:] / 3), x)
    assert np.abs(found - wanted).max() > 0.02 * np.ptp(wanted)


def test_file_for_pixels_is_calibrated_with_pixels(model):
    content = converted(model, takes="uint8")
    pixels = np.random.default_rng(4).integers(0, 256, (20, *TINY.input_shape), "uint8")
    wanted = run(model, normalize(pixels, model.config))
    found = quantize.quantize_file(content, "int8", calibration=pixels)
    assert error(found, wanted, pixels) < 0.08
    with pytest.raises(ValueError, match="uint8, as the file takes them. Received: .*float32"):
        quantize.quantize_file(content, "int8", calibration=CALIBRATION)


def test_quantizing_says_nothing(content, capsys):
    quantize.quantize_file(content, "int8", calibration=CALIBRATION)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        ("int4", {}, "mode must be one of 'float16', 'dynamic', 'int8'. Received: mode='int4'"),
        ("int8", {}, "calibration must be images for mode='int8'.*None"),
        ("dynamic", {"calibration": CALIBRATION}, "and None for another. Received: mode='dynamic'"),
        ("int8", {"calibration": CALIBRATION[:, :8]}, r"at least one image \(count, 24, 16, 3\)"),
        ("int8", {"calibration": CALIBRATION[:0]}, "at least one image"),
        ("int8", {"calibration": CALIBRATION.astype("float64")}, "Received: .*float64"),
        ("int8", {"calibration": CALIBRATION * np.nan}, "finite numbers"),
        ("dynamic", {"float_layers": "head"}, "must be a list of names. Received: .*'head'"),
        (
            "dynamic",
            {"float_layers": ["heads"]},
            "which are patches/.*Received: 'heads'",
        ),
    ],
)
def test_bad_arguments_are_refused(content, mode, arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize.quantize_file(content, mode, **arguments)


def test_content_that_cannot_be_quantized_is_refused(content):
    with pytest.raises(ValueError, match="content must be a TFLite file. Received: 9 bytes"):
        quantize.quantize_file(b"not a one", "dynamic")
    with pytest.raises(ValueError, match="content must be a float32 file, not a quantized one"):
        quantize.quantize_file(quantize.quantize_file(content, "dynamic"), "dynamic")
    model = tiny_model()
    kernel = model.get_layer("head").kernel
    kernel.assign(np.asarray(kernel) * 1e6)
    with pytest.raises(ValueError, match="float16 can hold.*Received: .* in 'head'"):
        quantize.quantize_file(converted(model), "float16")


def test_calibration_images_are_what_the_file_takes():
    pixels = np.random.default_rng(4).integers(0, 256, (5, *TINY.input_shape), "uint8")
    assert quantization.calibration_images(pixels, TINY, "uint8") is pixels
    found = quantization.calibration_images(pixels, TINY, "float32")
    assert found.dtype == "float32" and np.array_equal(found, normalize(pixels, TINY))
    half = CALIBRATION.astype("float16")
    assert np.array_equal(quantization.calibration_images(half, TINY, "float32"), half)
    for bad, takes, message in (
        (CALIBRATION, "uint8", "of uint8 pixels, for images='uint8'. Received: .*float32"),
        (CALIBRATION[0], "float32", r"Received: shape \(24, 16, 3\)"),
        (pixels.astype("int64"), "float32", "Received: .*int64"),
        (pixels[:0], "uint8", "at least one image"),
        (CALIBRATION * np.inf, "float32", "finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            quantization.calibration_images(bad, TINY, takes)

"""The sweep over layers: it finds the one that int8 hurts, and its advice helps."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from conformance import TINY, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.sensitivity import quantization_sweep
from keras_vit.export.tflite import quantize
from keras_vit.export.tflite.operators import to_float32_tflite
from keras_vit.preprocessing import normalize

pytestmark = pytest.mark.backend_free
PIXELS = np.random.default_rng(4).integers(0, 256, (12, *TINY.input_shape), "uint8")
PLANTED = ("encoder_block_1/mlp/dense_1", "encoder_block_1/mlp/dense_2")


@pytest.fixture(scope="module")
def model():
    """One unit of one MLP is huge and unused: nothing changes but the range around it."""
    model = tiny_model()
    mlp = model.get_layer("encoder_block_1").mlp
    mlp.dense_1.bias.assign(np.where(np.arange(28) == 5, 3e3, np.asarray(mlp.dense_1.bias)))
    rows = (np.arange(28) == 5)[:, None]
    mlp.dense_2.kernel.assign(np.where(rows, 0.0, np.asarray(mlp.dense_2.kernel)))
    return model


@pytest.fixture(scope="module")
def labels(model):
    """What the model says, but for one image."""
    labels = run(model, normalize(PIXELS, model.config)).argmax(-1)
    labels[3] = (labels[3] + 1) % 3
    return labels


@pytest.fixture(scope="module")
def sweep(model, labels):
    return quantization_sweep(model, PIXELS, [(PIXELS[:5], labels[:5]), (PIXELS[5:], labels[5:])])


def test_sweep_names_the_layer_that_hurts(sweep):
    assert set(sweep.worst(2)) == set(PLANTED)
    cost = {row.name: row.difference for row in sweep.rows if row.what == "layer"}
    assert list(sweep.worst(100)) == sorted(cost, key=lambda name: -cost[name])
    others = [value for name, value in cost.items() if name not in PLANTED]
    assert len(cost) == 14 and min(others) > 0
    assert min(cost[name] for name in PLANTED) > 3 * max(others)


def test_its_advice_helps(model, sweep):
    x = normalize(PIXELS, model.config)
    content = to_float32_tflite(
        fold(model), batch_size=12, output="logits", images="float32", activation="softmax"
    )
    wanted = run(model, x)

    def error(float_layers):
        file = quantize.quantize_file(content, "int8", calibration=x, float_layers=float_layers)
        return np.sqrt(np.mean((outputs(file, x) - wanted) ** 2)) / wanted.std()

    assert 3 * error(sweep.worst(2)) < error(())
    # Negative control: the two that hurt least.
    assert 2 * error(sweep.worst(2)) < error(sweep.worst(100)[-2:])
    (row,) = (row for row in sweep.rows if (row.what, row.name) == ("file", "int8"))
    np.testing.assert_allclose(row.difference, error(()), rtol=1e-3)


def outputs(content, x):
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def test_rows_are_the_file_the_kinds_the_operators_and_the_layers(sweep):
    names = {what: [r.name for r in sweep.rows if r.what == what] for what in ("file", "kind")}
    assert names["file"] == ["dynamic", "int8", "int8 everywhere"]
    assert set(names["kind"]) == {
        *(f"attention/{name}" for name in ("query", "key", "value", "attention_output")),
        *("mlp/dense_1", "mlp/dense_2"),
    }
    operators = {row.name for row in sweep.rows if row.what == "operator"}
    assert {"SOFTMAX", "GELU", "ADD", "BATCH_MATMUL"} <= operators <= set(quantize.BETWEEN)
    assert sweep.images == 12 and sweep.accuracy == 11 / 12
    for row in sweep.rows:
        assert 0 <= row.difference and 0 <= row.other_top_class <= 1
        # Each top class that is another moves the accuracy by an image at most.
        assert abs(row.accuracy - 11 / 12) <= row.other_top_class + 1e-9


def test_sweep_is_a_table_with_the_worst_first(sweep):
    lines = str(sweep).splitlines()
    assert "int8 on 12 images; float32 is right on 91.67%" in lines[0]
    layers = [line.split()[0] for line in lines if line.split()[1:2] == ["layer"]]
    assert layers == list(sweep.worst(100))
    worst = next(row for row in sweep.rows if row.name == layers[0])
    assert f"{worst.difference:.2%}" in next(line for line in lines if layers[0] in line)
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="count must be a positive int"):
            sweep.worst(bad)


def test_model_without_a_head_is_compared_by_its_features():
    model = tiny_model("features", depth=1)
    sweep = quantization_sweep(model, images(model.config, 3))
    assert sweep.accuracy is None and sweep.images == 3
    assert {(row.other_top_class, row.accuracy) for row in sweep.rows} == {(None, None)}
    assert "other top class" in str(sweep) and "right" not in str(sweep)


def test_bad_arguments_are_refused_before_any_work(model, labels):
    for arguments, message in (
        ((keras.Sequential(), PIXELS), "model must be a keras_vit.ViT"),
        ((model, PIXELS[:, :8]), "calibration must be at least one image"),
        ((model, PIXELS[:0]), "calibration must be at least one image"),
        ((model, PIXELS * np.nan), "calibration must hold finite"),
        ((model, PIXELS, (PIXELS, labels[1:])), "data must have a label for each image"),
        ((model, PIXELS, (PIXELS, labels + 9)), "data must hold labels from 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            quantization_sweep(*arguments)
    with pytest.raises(ValueError, match="num_threads must be a positive int. Received"):
        quantization_sweep(model, PIXELS, num_threads=0)

"""Every kind of file on its engine, with the model's numbers."""

import numpy as np
import pytest
from conformance import tiny_model

import keras_vit
from keras_vit.runtime import KerasRuntime
from keras_vit.serve.engines import open_engine

pytestmark = pytest.mark.only_on("tensorflow")


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=("cat", "dog", "emu"))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model.save(folder / "m.keras")
    keras_vit.export_onnx(model, folder / "m.onnx")
    keras_vit.export_tflite(model, folder / "m.tflite", images="uint8")
    return folder


@pytest.mark.parametrize(
    ("file", "engine", "kind", "signatures"),
    [
        ("m.keras", "auto", "folded", 4),
        ("m.keras", "keras", "keras", 4),
        ("m.keras", "onnx", "onnx", 4),
        ("m.onnx", "auto", "onnx", 4),
        ("m.tflite", "keras", "tflite", 3),  # an export has its own engine, this one no features
    ],
)
def test_engine_gives_what_the_model_gives(model, folder, file, engine, kind, signatures):
    opened = open_engine(folder / file, engine)
    assert opened.runtime.kind == kind and len(opened.signatures) == signatures
    assert (opened.model is not None) == (file == "m.keras")
    assert open_engine(folder / file, engine, explain=False).model is None
    images = np.random.default_rng(0).integers(0, 256, (3, *model.config.input_shape), "uint8")
    expected = KerasRuntime(model).scores(images)
    found = opened.run(images, "scores")
    for count in (1, 3):
        found = opened.run(images[:count], "scores")["probabilities"]
        np.testing.assert_allclose(found, expected["probabilities"][:count], rtol=0, atol=1e-5)
    assert abs(found - expected["probabilities"][::-1]).max() > 1e-3
    if "features" in opened.signatures:
        found = opened.run(images, "features")["features"]
        np.testing.assert_allclose(found, KerasRuntime(model).features(images), atol=1e-4)
    assert opened.signatures["classify"].outputs["scores"].shape == (-1, 3)


def test_models_without_a_head_or_pooling_have_fewer_signatures(tmp_path):
    for changes, names in (
        ({"num_classes": 0}, {"serving_default", "serve_bytes", "features"}),
        ({"pooling": None, "class_token": False}, {"serving_default", "serve_bytes", "features"}),
        ({"in_channels": 4}, {"serving_default", "features"}),
    ):
        tiny_model(**changes).save(tmp_path / "m.keras")
        engine = open_engine(tmp_path / "m.keras")
        assert set(engine.signatures) == names
        default = engine.signatures["serving_default"]
        computed = engine.run(np.zeros((2, *default.input.shape[1:]), "float32"), default.wanted)
        shapes = {name: (-1, *array.shape[1:]) for name, array in computed.items()}
        assert {name: tensor.shape for name, tensor in default.outputs.items()} == shapes


def test_quantized_model_runs_on_keras_alone(tmp_path):
    model = tiny_model()
    model.quantize("int8")
    model.save(tmp_path / "m.keras")
    assert open_engine(tmp_path / "m.keras").runtime.kind == "keras"
    with pytest.raises(ValueError, match="must not be quantized"):
        open_engine(tmp_path / "m.keras", "tensorflow")


def test_engine_must_be_a_known_one(folder):
    with pytest.raises(ValueError, match="engine must be one of 'auto'"):
        open_engine(folder / "m.keras", "fast")

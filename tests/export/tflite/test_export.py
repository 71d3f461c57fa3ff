"""`export_tflite`: a file that is verified, that says what it is, or that is not there."""

import functools
import importlib.util

import keras
import numpy as np
import pytest
from conformance import TINY, images, run, tiny_model

from keras_vit import runtime
from keras_vit.export import file_export
from keras_vit.export.fold import fold
from keras_vit.export.tflite import export as tflite
from keras_vit.export.tflite.export import export_tflite

LABELS = ["rose", "tulip, red", "Gänseblümchen"]


def untimed_once(test):
    """Runs a test on one backend, and leaves out the latency, which is the first test's."""
    return pytest.mark.backend_free(pytest.mark.usefixtures("untimed")(test))


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(file_export, "latencies_of_both", lambda *_: [1.0, 1.0])


# A model that was run is not traced again: for tests that leave it as it is.
same_model = functools.cache(tiny_model)


def pixels(config=TINY, count=5, seed=4):
    return np.random.default_rng(seed).integers(0, 256, (count, *config.input_shape), "uint8")


def converts_to(monkeypatch, model):
    """Has every export write this model's probabilities in place of its own."""
    content = tflite.to_float32_tflite(
        fold(model),
        batch_size=1,
        output="probabilities",
        images="float32",
        activation="softmax",
    )
    monkeypatch.setattr(tflite, "to_float32_tflite", lambda *_, **how: content)


def test_export_writes_the_model_on_every_backend(tmp_path):
    model = tiny_model("registers")
    export = export_tflite(model, tmp_path / "new" / "flowers.tflite", labels=LABELS)
    path = tmp_path / "new" / "flowers.tflite"
    assert export.path == path and export.size == path.stat().st_size
    assert list(path.parent.iterdir()) == [path]
    assert export.latency > 0 and export.plain_latency > 0
    assert export.quantize is export.accuracy is None
    checked = export.verification
    assert checked.difference <= 1e-5 * checked.logits_range and checked.same_top_class == 1
    assert checked.where.startswith("LiteRT ")
    opened = runtime.open(path)
    assert opened.config == model.config and opened.labels == tuple(LABELS)
    x = images(model.config)
    logits = run(model, x).astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(opened.probabilities(x), expected, rtol=1e-4)
    assert np.abs(opened.probabilities(x) - expected[::-1]).max() > 1e-2


@pytest.mark.sampled(cases=0)  # the file is written from NumPy, and one is on every backend
@pytest.mark.usefixtures("untimed")
def test_export_gives_logits_or_features(tmp_path):
    model = tiny_model(dtype="mixed_bfloat16")  # its weights are in float32
    full = same_model()
    x = images(TINY)
    logits = export_tflite(model, tmp_path / "logits.tflite", output="logits", batch_size=2)
    np.testing.assert_allclose(runtime.open(logits.path).logits(x), run(full, x), atol=1e-5)
    assert logits.verification.features_difference is None
    features = export_tflite(model, tmp_path / "features.tflite", output="features")
    expected = run(full.features(), x)
    np.testing.assert_allclose(runtime.open(features.path).features(x), expected, atol=1e-5)
    assert features.verification.same_top_class is None
    assert features.verification.features_difference < 1e-5
    for kind in ("pre_logits", "features"):
        model = same_model(kind)
        export = export_tflite(model, features.path, output="features", overwrite=True)
        assert export.verification.features_difference < 1e-5


@untimed_once
def test_export_takes_the_activation_of_the_model(tmp_path):
    model = tiny_model(classifier_activation="sigmoid")
    x = images(TINY)
    for activation, total in ((None, run(model, x).sum()), ("softmax", len(x))):
        export = export_tflite(
            model, tmp_path / "a.tflite", activation=activation, overwrite=activation is not None
        )
        found = runtime.open(export.path).probabilities(x)
        np.testing.assert_allclose(found.sum(), total, rtol=1e-5)


@untimed_once
def test_quantized_exports_are_smaller_and_near(tmp_path):
    model = tiny_model(width=40, mlp_dim=56)
    x = pixels()
    logits = runtime.KerasRuntime(model).logits(x)
    sizes, errors = [], []
    for mode in (None, "float16", "dynamic", "int8"):
        export = export_tflite(
            model,
            tmp_path / f"{mode}.tflite",
            quantize=mode,
            output="logits",
            images="uint8",
            calibration=pixels(count=9, seed=1) if mode == "int8" else None,
        )
        assert export.quantize == mode
        assert export.verification.bound == tflite.BOUNDS[mode]
        opened = runtime.open(export.path)
        assert opened.record["quantize"] == mode and opened.images == "uint8"
        sizes.append(export.size)
        errors.append(np.abs(opened.logits(x) - logits).max() / np.ptp(logits))
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * sizes[2]
    assert errors[0] < 1e-5 < errors[1] < 5e-3 < errors[2] < 0.1
    assert 5e-3 < errors[3] < 0.3


@untimed_once
def test_layers_stay_in_float32_on_request(tmp_path):
    model = same_model()
    sizes = [
        export_tflite(model, tmp_path / f"{i}.tflite", quantize="dynamic", float_layers=names).size
        for i, names in enumerate([(), ["encoder_block_1"]])
    ]
    assert sizes[1] > sizes[0] + 3 * TINY.width**2  # a byte in place of four


@untimed_once
def test_int8_is_compared_on_what_it_was_calibrated_on(tmp_path):
    model = same_model()
    arguments = {"quantize": "int8", "calibration": pixels(count=70)}
    assert export_tflite(model, tmp_path / "a.tflite", **arguments).verification.images == 64
    export = export_tflite(model, tmp_path / "b.tflite", **arguments, verify=pixels(count=3))
    assert export.verification.images == 3


@untimed_once
def test_file_that_is_not_the_model_gets_no_name(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.tflite"
    converts_to(monkeypatch, same_model(seed=9))
    with pytest.raises(ValueError, match="must be the model's within 1e-05"):
        export_tflite(same_model(), path)
    assert not list(tmp_path.iterdir())
    export_tflite(same_model(seed=9), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="must be the model's within"):
        export_tflite(same_model(), path, overwrite=True)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    export_tflite(same_model(), path, overwrite=True, bound=1e3)  # the bound is what refuses
    with pytest.raises(ValueError, match="must be the model's within 0.3"):
        converts_to(monkeypatch, same_model(seed=9))
        export_tflite(same_model(), tmp_path / "b.tflite", quantize="int8", calibration=pixels())


@untimed_once
def test_file_that_is_less_accurate_gets_no_name(tmp_path, monkeypatch):
    model = same_model(seed=2)
    x = pixels(count=40)
    top = runtime.KerasRuntime(model).logits(x).argmax(-1)
    assert len(set(top)) > 1
    export = export_tflite(model, tmp_path / "a.tflite", accuracy_data=(x, top), max_drop=0)
    assert export.accuracy.export.top_1 == export.accuracy.same_top_class == 1
    converts_to(monkeypatch, same_model(seed=9))
    arguments = {"accuracy_data": (x, top), "bound": 1e3}
    with pytest.raises(ValueError, match="must lose at most max_drop=1 points"):
        export_tflite(model, tmp_path / "b.tflite", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tflite"]
    export = export_tflite(model, tmp_path / "b.tflite", **arguments, max_drop=100)
    assert export.accuracy.points > 1


@untimed_once
def test_lora_is_merged(tmp_path):
    model = tiny_model()
    plain = run(model, images(TINY))
    model.blocks[0].mlp.dense_1.enable_lora(2)
    dense = model.blocks[0].mlp.dense_1
    for v in (dense.lora_kernel_a, dense.lora_kernel_b):
        v.assign(np.random.default_rng(0).normal(size=v.shape))
    export = export_tflite(model, tmp_path / "a.tflite", output="logits")
    found = runtime.open(export.path).logits(images(TINY))
    np.testing.assert_allclose(found, run(model, images(TINY)), atol=1e-5)
    assert np.abs(found - plain).max() > 1e-2
    export_tflite(model, tmp_path / "b.tflite", output="features")  # which compares them


BAD = {
    "quantize must be one of": {"quantize": "int4"},
    "output must be one of": {"output": "labels"},
    "images must be one of": {"images": "int8"},
    "activation must be one of": {"activation": "relu"},
    "batch_size must be": {"batch_size": 0},
    "bound must be": {"bound": 0},
    "max_drop must be": {"max_drop": -1},
    "description must be": {"description": " "},
    "labels must be num_classes=3 names": {"labels": ["a", "b"]},
    "labels must be a sequence": {"labels": "abc"},
    "labels must be printable": {"labels": ["a", "b", "c\n"]},
    "verify must be at least one": {"verify": np.zeros((1, 16, 24, 3), "float32")},
    "calibration must be typical": {"quantize": "int8"},
    "calibration must be None": {"calibration": pixels()},
    "calibration must be at least one": {"quantize": "int8", "calibration": pixels()[:, :-1]},
    "calibration must hold finite": {
        "quantize": "int8",
        "calibration": np.full((2, *TINY.input_shape), np.nan, "float32"),
    },
    "float_layers must be names": {"float_layers": ["head"]},
    "float_layers must name layers": {"quantize": "dynamic", "float_layers": ["encoder_block_7"]},
    "accuracy_data must be None": {"accuracy_data": (pixels(), [0]), "output": "features"},
}


@untimed_once
@pytest.mark.parametrize("words", BAD)
def test_bad_argument_is_named_and_leaves_no_file(words, tmp_path):
    with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
        export_tflite(same_model(), tmp_path / "a.tflite", **BAD[words])
    assert not list(tmp_path.iterdir())


@untimed_once
def test_bad_model_or_path_is_named(tmp_path):
    (tmp_path / "folder.tflite").mkdir()
    (tmp_path / "there.tflite").write_text("mine")
    quantized = tiny_model()
    quantized.blocks[0].mlp.dense_1.quantize("int8")
    for model, name, words in (
        (keras.Sequential(), "a.tflite", "model must be a keras_vit.ViT"),
        (quantized, "a.tflite", "model must not be quantized"),
        (same_model("features"), "a.tflite", "output must be 'features' for a model without"),
        (same_model(), "a.onnx", "path must end in .tflite"),
        (same_model(), "folder.tflite", "path must not be a folder"),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            export_tflite(model, tmp_path / name)
    with pytest.raises(FileExistsError, match="path must not exist"):
        export_tflite(same_model(), tmp_path / "there.tflite")
    broken = tiny_model()
    broken.get_layer("head").bias.assign([0, np.nan, 0])
    with pytest.raises(ValueError, match="model must give finite logits"):
        export_tflite(broken, tmp_path / "a.tflite")
    assert (tmp_path / "there.tflite").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@untimed_once
def test_missing_tensorflow_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tensorflow must be installed to export"):
        export_tflite(same_model(), tmp_path / "a.tflite")
    assert not list(tmp_path.iterdir())

"""A model opens in whatever form it was saved, and gives the same logits."""

import json
import shutil

import keras
import numpy as np
import pytest
from conformance import images, run, tiny_model

import keras_vit
from keras_vit import preprocessing, runtime

LABELS = ("cat", "dog", "emu")


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=LABELS, pixel_mean=(0.4, 0.5, 0.6), pixel_std=0.3)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A run folder, and a checkpoint of another library."""
    folder = tmp_path_factory.mktemp("runs")
    model.save(folder / "model.keras")
    keras_vit.save_pretrained(model, folder / "timm", "timm")
    return folder


@pytest.mark.parametrize("name", [".", "model.keras", "timm"])
def test_open_runs_saved_models(model, folder, name):
    opened = runtime.open(folder / name)
    assert opened.kind == "keras" and opened.labels == LABELS
    assert opened.activation == "softmax"
    x = images(model.config)
    wanted = run(model, x)
    logits, probabilities = opened.logits(x), opened.probabilities(x)
    assert logits.dtype == probabilities.dtype == np.float32
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert np.abs(logits - wanted[::-1]).max() > 0.1
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(np.log(probabilities), wanted - _log_sum(wanted), atol=1e-4)
    np.testing.assert_allclose(opened.features(x), run(model.features(), x), atol=1e-5)


def _log_sum(logits):
    return np.log(np.exp(logits).sum(-1, keepdims=True))


def test_uint8_images_are_pixels(model):
    opened = runtime.KerasRuntime(model)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 16, 3), dtype=np.uint8)
    x = preprocessing.preprocess(pixels, model.config)
    np.testing.assert_allclose(preprocessing.normalize(pixels, model.config), x, atol=1e-6)
    np.testing.assert_allclose(opened.logits(pixels), opened.logits(x), atol=1e-5)
    assert np.abs(opened.logits(pixels) - opened.logits(-x)).max() > 0.1


def test_logits_are_taken_before_the_models_activation():
    x = images(tiny_model().config)
    wanted = run(tiny_model(), x)
    for activation, kind in (("softmax", "softmax"), ("sigmoid", "sigmoid"), ("linear", "softmax")):
        model = tiny_model(classifier_activation=activation)
        opened = runtime.KerasRuntime(model)
        assert opened.activation == kind
        np.testing.assert_allclose(opened.logits(x), wanted, atol=1e-5)
        if activation != "linear":
            np.testing.assert_allclose(opened.probabilities(x), run(model, x), atol=1e-5)
            assert np.abs(run(model, x) - wanted).max() > 0.1


def test_images_of_another_shape_are_refused(model):
    opened = runtime.KerasRuntime(model)
    for wrong in (np.zeros((24, 16, 3)), np.zeros((1, 16, 24, 3)), np.full((1, 24, 16, 3), "a")):
        with pytest.raises(ValueError, match=r"shape \(batch, 24, 16, 3\). Received"):
            opened.logits(wrong)
    assert opened.logits(np.zeros((0, 24, 16, 3))).shape == (0, 3)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "bool"])
def test_integers_other_than_uint8_are_refused(model, dtype):
    opened = runtime.KerasRuntime(model)
    pixels = np.ones((1, 24, 16, 3), dtype)
    said = f"must be floats as the model takes them, or uint8 pixels, .* Received: .*, {dtype}$"
    for method in (opened.logits, opened.probabilities, opened.features):
        with pytest.raises(ValueError, match=said):
            method(pixels)
    assert opened.logits(pixels.astype("uint8")).shape == (1, 3)
    assert opened.logits(pixels.astype("float64")).shape == (1, 3)


@pytest.mark.parametrize("source", ["https://host/model.keras", "hf://org/name/model.keras"])
def test_open_fetches_a_url_before_it_looks_at_the_suffix(model, folder, monkeypatch, source):
    from keras_vit.weights import fetch

    asked = []
    monkeypatch.setattr(
        fetch, "fetch_weights", lambda name: asked.append(name) or folder / "model.keras"
    )
    opened = runtime.open(source)
    assert asked == [source] and opened.path == folder / "model.keras"
    x = images(model.config)
    np.testing.assert_allclose(opened.logits(x), run(model, x), atol=1e-5)
    monkeypatch.setattr(
        fetch, "fetch_weights", lambda name: folder / "timm"
    )  # a checkpoint, as before
    np.testing.assert_allclose(runtime.open(source[:-12]).logits(x), run(model, x), atol=1e-5)


def test_model_without_a_head_has_only_features():
    model = tiny_model("features")
    opened = runtime.KerasRuntime(model)
    x = images(model.config)
    np.testing.assert_allclose(opened.features(x), run(model, x), atol=1e-5)
    for method in (opened.logits, opened.probabilities):
        with pytest.raises(ValueError, match="must have a head"):
            method(x)


def test_other_models_are_refused(tmp_path):
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    other.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="path must hold a ViT. Received: .* Sequential model"):
        runtime.open(tmp_path)
    with pytest.raises((OSError, ValueError)):
        runtime.open(tmp_path / "none")


@pytest.mark.only_on("tensorflow")
def test_open_uses_the_highest_version_of_an_export(model, tmp_path):
    from keras_vit.export.saved_model.export import export_saved_model

    export = export_saved_model(model, tmp_path, version=10)
    shutil.copytree(export.path, tmp_path / "9")
    (tmp_path / ".tmp-1-ab").mkdir()
    opened = runtime.open(tmp_path)
    assert (opened.kind, opened.path, opened.labels) == ("saved_model", tmp_path / "10", LABELS)
    assert opened.config == model.config
    assert runtime.open(tmp_path / "9").path == tmp_path / "9"
    x = images(model.config)
    ours = runtime.KerasRuntime(model)
    for name in ("logits", "probabilities", "features"):
        np.testing.assert_allclose(getattr(opened, name)(x), getattr(ours, name)(x), atol=1e-4)
    assert opened.logits(x[:0]).shape == (0, 3)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 16, 3), dtype=np.uint8)
    np.testing.assert_allclose(opened.logits(pixels), ours.logits(pixels), atol=1e-4)
    with pytest.raises(ValueError, match="signature must be one of classify, features, "):
        opened.run("nonsense", images=x)

    manifest = tmp_path / "9" / "MANIFEST.json"
    content = json.loads(manifest.read_text("utf-8"))
    manifest.write_text(json.dumps({k: v for k, v in content.items() if k != "config"}))
    with pytest.raises(ValueError, match="path must be an export with a MANIFEST.json"):
        runtime.open(tmp_path / "9")

    for changes, message in (
        ({"config": {**content["config"], "depth": 10**9}}, "depth must be at most 4096"),
        ({"config": {**content["config"], "image_size": [48, 16]}}, "take images of the size in"),
        ({"max_batch_size": "9"}, "state max_batch_size as a positive int"),
        ({"labels": ["cat"]}, "state labels as 3 strings"),
        ({"files": [1]}, "MANIFEST.json', files="),
        ({"files": {"a": 5}}, "MANIFEST.json', files.a=5"),
        ({"files": {}}, "state the sha256 of every file"),
        ({"files": {**content["files"], "../x": {"sha256": ""}}}, "name files in "),
    ):
        manifest.write_text(json.dumps({**content, **changes}))
        with pytest.raises(ValueError, match=message):
            runtime.open(tmp_path / "9")

    manifest.write_text(json.dumps(content))
    labels = tmp_path / "9" / "assets" / "labels.txt"
    labels.write_text(labels.read_text("utf-8").replace("cat", "dog"), "utf-8")
    with pytest.raises(ValueError, match="Received: assets/labels.txt with sha256 "):
        runtime.open(tmp_path / "9")
    (tmp_path / "9" / "assets.extra" / "tf_serving_warmup_requests").unlink()
    labels.write_text(labels.read_text("utf-8").replace("dog\ndog", "cat\ndog"), "utf-8")
    with pytest.raises(ValueError, match="tf_serving_warmup_requests is missing"):
        runtime.open(tmp_path / "9")

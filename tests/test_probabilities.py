"""From logits to probabilities: which function, and its values, through every door."""

import numpy as np
import pytest
from conformance import TINY, images, run, tiny_model

import keras_vit
from keras_vit import explain, preprocessing, runtime
from keras_vit.export.accuracy import measure
from keras_vit.images import labeled_images
from keras_vit.probabilities import chosen_function, probabilities_of, probability_function
from keras_vit.serve.signatures import outputs_of, signatures_of

pytestmark = pytest.mark.backend_free
ONE = TINY.replace(num_classes=1, labels=("cat",))


def test_function_follows_the_config():
    for changes, expected in (
        ({}, "softmax"),
        ({"classifier_activation": "softmax"}, "softmax"),
        ({"classifier_activation": "sigmoid"}, "sigmoid"),
        ({"num_classes": 1}, "sigmoid"),
    ):
        config = TINY.replace(**changes)
        assert probability_function(config) == chosen_function(config, None) == expected
    assert chosen_function(TINY, "sigmoid") == "sigmoid"
    for activation, message in (("softmax", "for num_classes=1"), ("relu", "one of None")):
        with pytest.raises(ValueError, match=f"activation must be .*{message}.*Received"):
            chosen_function(ONE, activation)
    for name in ("softmax", "log_softmax"):
        with pytest.raises(ValueError, match="classifier_activation must be 'sigmoid' or None for"):
            ONE.replace(classifier_activation=name)


def test_probabilities_by_hand():
    logits = np.log([[1.0, 3.0], [1.0, 1.0]])
    np.testing.assert_allclose(probabilities_of(logits, "softmax"), [[0.25, 0.75], [0.5, 0.5]])
    np.testing.assert_allclose(probabilities_of(logits, "sigmoid"), [[0.5, 0.75], [0.5, 0.5]])
    np.testing.assert_array_equal(probabilities_of([[-1e4], [1e4]], "sigmoid"), [[0], [1]])


def test_one_logit_is_a_sigmoid_through_every_door(tmp_path):
    model = tiny_model(num_classes=1, labels=("cat",))
    pixels = np.random.default_rng(0).integers(0, 256, (4, *ONE.input_shape), "uint8")
    x = preprocessing.preprocess(pixels, model.config)
    expected = 1 / (1 + np.exp(-run(model, x)))
    assert expected.shape == (4, 1) and np.ptp(expected) > 0.1
    keras_vit.export_onnx(model, tmp_path / "m.onnx")
    for opened in (runtime.KerasRuntime(model), runtime.open(tmp_path / "m.onnx")):
        assert opened.activation == "sigmoid"
        np.testing.assert_allclose(opened.probabilities(x), expected, atol=1e-5)
    scores = opened.scores(x)
    classify = signatures_of(opened, {"scores": scores})["classify"]
    found = outputs_of(classify, scores, np.array(["cat"], object))
    np.testing.assert_allclose(found["scores"], expected, atol=1e-5)
    named = keras_vit.Classifier(model).classify(pixels)
    assert [[label for label, _ in row] for row in named] == [["cat"]] * 4
    np.testing.assert_allclose([row[0][1] for row in named], expected[:, 0], atol=1e-5)
    source = explain.panels.open_image(pixels[0], model.config)
    (best,) = explain.report.report_data(model, source)["prediction"]
    np.testing.assert_allclose(best["score"], expected[0, 0], atol=1e-5)
    assert (best["class"], best["label"]) == (0, "cat")
    with pytest.raises(ValueError, match="activation must be 'sigmoid' or None for num_classes=1"):
        keras_vit.export_onnx(model, tmp_path / "s.onnx", activation="softmax")
    with pytest.raises(ValueError, match="activation must be 'sigmoid' or None for num_classes=1"):
        keras_vit.export_saved_model(model, tmp_path / "s", activation="softmax")


def test_accuracy_of_one_logit_is_refused(tmp_path):
    model = tiny_model(num_classes=1)
    data = images(model.config, 2), np.array([0, 0])
    with pytest.raises(ValueError, match="accuracy_data must be None for a model of one logit"):
        keras_vit.export_onnx(model, tmp_path / "m.onnx", accuracy_data=data)
    with pytest.raises(ValueError, match="data must be None for a model of one logit"):
        measure(runtime.KerasRuntime(model), data)
    with pytest.raises(ValueError, match="left out for a model of one logit"):
        labeled_images(tmp_path, model.config)


def test_file_that_states_a_softmax_of_one_logit_is_refused(tmp_path):
    record = {"config": ONE.to_dict(), "labels": None, "images": "float32", "activation": "sigmoid"}
    assert runtime.base.described("m.onnx", record)["activation"] == "sigmoid"
    with pytest.raises(ValueError, match="state activation as sigmoid.*for one class.*m.onnx"):
        runtime.base.described("m.onnx", {**record, "activation": "softmax"})

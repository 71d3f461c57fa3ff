"""Classifier: raw pixels in, the logits of the ViT out, and no preprocessing twice."""

import keras
import numpy as np
import pytest
from conformance import images, tiny_model
from PIL import Image

import keras_vit
from keras_vit import Classifier, ViT
from keras_vit.preprocessing import Preprocessing, preprocess

LABELS = ("cat", "dog", "emu")


def new_classifier():
    return Classifier(tiny_model(labels=LABELS, num_classes=3))


def logits(vit, samples):
    return vit.predict(samples, verbose=0)


def pixels(count=4, height=30, width=40):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def classifier():
    return new_classifier()


CONFIG = tiny_model(labels=LABELS, num_classes=3).config


def test_classifier_is_preprocessing_and_the_vit(classifier):
    """Of the model's size; others differ by the rounding of the layer's resize."""
    height, width = CONFIG.image_size
    for raw in (pixels(4, height, width), pixels(4, height, width).astype("float32")):
        expected = logits(classifier.vit, preprocess(raw, CONFIG))
        np.testing.assert_allclose(classifier.predict(raw, verbose=0), expected, atol=1e-5)
    other = classifier.predict(pixels(), verbose=0)
    expected = logits(classifier.vit, preprocess(pixels(), CONFIG))
    np.testing.assert_allclose(other, expected, atol=0.1)
    assert np.ptp(expected) > 2


def test_classifier_trains_the_vit_from_arrays_datasets_and_generators():
    classifier = new_classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile("adam", loss)
    before = keras.ops.convert_to_numpy(classifier.vit.get_layer("head").kernel).copy()
    x, y = pixels(), np.array([0, 1, 2, 0])
    seen = []

    def batches():
        while True:
            seen.append(1)
            yield x[:2], y[:2]

    classifier.fit(x, y, validation_data=(x, y), batch_size=2, verbose=0)
    classifier.fit(batches(), steps_per_epoch=3, verbose=0)
    assert len(seen) >= 3
    assert np.isfinite(classifier.evaluate(x, y, verbose=0))
    after = keras.ops.convert_to_numpy(classifier.vit.get_layer("head").kernel)
    assert not np.array_equal(before, after)


class Normalized(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return preprocess(pixels(2), CONFIG), np.zeros(2)


def test_classifier_refuses_pixels_that_are_normalized(classifier):
    bad = preprocess(pixels(), CONFIG)
    classifier.compile(loss="mse")
    for call in (
        lambda: classifier.fit(bad, np.zeros(4)),
        lambda: classifier.fit(Normalized()),
        lambda: classifier.fit(iter([(bad, np.zeros(4))])),
        lambda: classifier.fit(pixels(), np.zeros(4), validation_data=(bad, np.zeros(4))),
        lambda: classifier.fit(pixels(), np.zeros(4), validation_data=Normalized()),
        lambda: classifier.evaluate(bad, np.zeros(4)),
        lambda: classifier.predict(bad),
        lambda: classifier.predict(keras.ops.convert_to_tensor(bad)),
        lambda: classifier.train_on_batch(bad, np.zeros(4)),
        lambda: classifier.test_on_batch(bad, np.zeros(4)),
        lambda: classifier.predict_on_batch(bad),
        lambda: classifier(bad),
        lambda: classifier.classify(list(bad)),
    ):
        with pytest.raises(ValueError, match="must have pixels from 0 to 255"):
            call()
    with pytest.warns(UserWarning, match="seem to be scaled already"):
        classifier.predict(pixels() / 255.0, verbose=0)


def test_classifier_names_classes(classifier, tmp_path):
    sizes = [Image.fromarray(pixels(1, h, 20)[0]) for h in (20, 50)]
    sizes[1].save(tmp_path / "1.png")
    found = classifier.classify([sizes[0], tmp_path / "1.png"], top_k=3)
    expected = keras.ops.softmax(logits(classifier.vit, preprocess(sizes, CONFIG)))
    expected = keras.ops.convert_to_numpy(expected)
    for row, scores in zip(found, expected, strict=True):
        assert [label for label, _ in row] == [CONFIG.labels[k] for k in np.argsort(-scores)]
        np.testing.assert_allclose([p for _, p in row], np.sort(scores)[::-1], rtol=1e-4)
    with pytest.raises(ValueError, match="a model with a head"):
        Classifier(ViT(CONFIG.replace(num_classes=0, labels=None))).classify(sizes)


def test_classifier_file_opens_as_itself_and_as_its_vit(classifier, tmp_path):
    path = tmp_path / "model.keras"
    classifier.save(path)
    again = keras.saving.load_model(path)
    raw = pixels()
    assert isinstance(again, Classifier) and again.config == CONFIG
    np.testing.assert_array_equal(again.predict(raw, verbose=0), classifier.predict(raw, verbose=0))
    opened = keras_vit.runtime.open(tmp_path)
    assert isinstance(opened.model, ViT) and opened.labels == CONFIG.labels
    expected = logits(classifier.vit, samples := images(CONFIG))
    np.testing.assert_allclose(opened.logits(samples), expected, atol=1e-6)
    new = keras_vit.from_pretrained(path, num_classes=5)
    assert isinstance(new, ViT) and new.output_shape == (None, 5)


def test_functions_of_a_vit_take_a_classifier_or_a_sequential(classifier, tmp_path):
    vit = classifier.vit
    wrapped = keras.Sequential([Preprocessing(CONFIG), vit])
    samples = images(CONFIG)
    expected = keras_vit.explain.attention_rollout(vit, samples)
    for model in (classifier, wrapped):
        np.testing.assert_array_equal(keras_vit.explain.attention_rollout(model, samples), expected)
        found = keras_vit.explain.attention_rollout(model=model, images=samples)
        np.testing.assert_array_equal(found, expected)
        folder = keras_vit.save_pretrained(model, tmp_path / model.name)
        assert keras_vit.from_pretrained(folder).config.num_classes == 3
    other = keras.Sequential([Preprocessing(CONFIG.replace(pixel_mean=0.4)), vit])
    with pytest.raises(ValueError, match="must preprocess by the config .* with pixel_mean=.0.4"):
        keras_vit.explain.attention_rollout(other, samples)
    with pytest.raises(ValueError, match="model must be a ViT"):
        Classifier(classifier)


@pytest.mark.only_on("tensorflow")
def test_classifier_exports_as_its_vit(classifier, tmp_path):
    export = keras_vit.export_saved_model(classifier, tmp_path / "served")
    opened = keras_vit.runtime.open(export.path)
    raw = pixels(2, *CONFIG.image_size)
    expected = classifier.predict(raw, verbose=0)
    np.testing.assert_allclose(opened.logits(raw), expected, atol=1e-4)


@pytest.mark.only_on("tensorflow")
def test_classifier_checks_a_tf_dataset(classifier):
    import tensorflow as tf

    bad = preprocess(pixels(), CONFIG)
    classifier.compile(loss="mse")
    with pytest.raises(ValueError, match="x must have pixels from 0 to 255"):
        classifier.fit(tf.data.Dataset.from_tensor_slices((bad, np.zeros(4))).batch(2))
    good = tf.data.Dataset.from_tensor_slices((pixels(), np.zeros((4, 3)))).batch(2)
    assert np.isfinite(classifier.evaluate(good, verbose=0))

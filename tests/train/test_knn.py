"""Weighted k-nearest-neighbor classification, compared with scikit-learn."""

import math

import keras
import numpy as np
import pytest
from conformance import tiny_model, to_numpy
from feature_cases import CLASSES, WIDTH, batches, clusters
from sklearn.neighbors import KNeighborsClassifier

from keras_vit.train import KNNAccuracy, evaluate_knn, knn

free = pytest.mark.backend_free


@free
def test_votes_worked_out_by_hand():
    """Cosines 1, 0.8 and 0 with T = 1/2; the lengths of the features do not matter."""
    features = np.array([[2.0, 0.0], [4.0, 3.0], [0.0, 5.0], [-1.0, 0.0]])
    labels = np.array([7, 3, 3, 3])
    classes, votes = knn.knn_votes(features, labels, np.array([[9.0, 0.0]]), k=3, temperature=0.5)
    np.testing.assert_array_equal(classes, [3, 7])
    # Of class 3: exp(2 (0.8 - 1)) + exp(2 (0 - 1)) = 0.6703 + 0.1353; of class 7: exp(0).
    np.testing.assert_allclose(votes, [[0.80565533, 1.0]], rtol=1e-6)
    # A high temperature counts heads, and two are of class 3.
    _, votes = knn.knn_votes(features, labels, np.array([[9.0, 0.0]]), k=3, temperature=100.0)
    assert votes.argmax() == 0
    # The fourth one is not among three.
    _, votes = knn.knn_votes(features, labels, np.array([[9.0, 0.0]]), k=4, temperature=0.5)
    np.testing.assert_allclose(votes[0, 0], 0.80565533 + math.exp(-4), rtol=1e-6)


@free
@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0), (200, 0.3)])
def test_agrees_with_scikit_learn(k, temperature, monkeypatch):
    (x, y), (test_x, test_y) = clusters(400, seed=0), clusters(90, seed=1)
    monkeypatch.setattr(knn, "SCORES", 400 * 7)  # chunks of 7 rows, the last one partial
    classes, votes = knn.knn_votes(x, y, test_x, k, temperature)

    def classifier(temperature):
        """Its metric is 1 - cosine."""
        return KNeighborsClassifier(
            k, metric="cosine", weights=lambda distance: np.exp(-distance / temperature)
        ).fit(x, y)

    shares = votes / votes.sum(-1, keepdims=True)
    wanted = classifier(temperature).predict_proba(test_x)
    np.testing.assert_allclose(shares, wanted, atol=2e-5)
    np.testing.assert_array_equal(classes, range(CLASSES))
    accuracy = knn.knn_accuracy(x, y, test_x, test_y, k, temperature)
    assert accuracy == pytest.approx(classifier(temperature).score(test_x, test_y))
    # The negative control: another temperature, which one neighbor does not see.
    other = classifier(2 * temperature).predict_proba(test_x)
    assert (np.abs(shares - other).max() > 1e-3) == (k > 1)


@free
def test_neighbors_are_sorted_and_do_not_depend_on_the_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    x, queries = rng.normal(size=(50, WIDTH)), rng.normal(size=(13, WIDTH))
    indices, similar = knn.nearest_neighbors(x, queries, 5)
    unit = [a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (queries, x)]
    cosines = unit[0] @ unit[1].T
    np.testing.assert_array_equal(indices, np.argsort(-cosines, axis=-1)[:, :5])
    np.testing.assert_allclose(similar, -np.sort(-cosines, axis=-1)[:, :5], atol=1e-6)
    monkeypatch.setattr(knn, "SCORES", 1)  # one query at a time
    np.testing.assert_array_equal(knn.nearest_neighbors(x, queries, 5)[0], indices)
    assert knn.nearest_neighbors(x, queries, 99)[0].shape == (13, 50)
    # Features of zeros are similar to nothing, and no error.
    assert np.isfinite(knn.nearest_neighbors(0 * x, queries, 3)[1]).all()


@free
def test_low_temperature_is_the_nearest_neighbor():
    (x, y), (test_x, test_y) = clusters(60, seed=0), clusters(30, seed=1)
    nearest = knn.knn_accuracy(x, y, test_x, test_y, 1)
    assert knn.knn_accuracy(x, y, test_x, test_y, 20, 1e-4) == pytest.approx(nearest)


@free
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 0}, "k must be a positive int. Received: k=0"),
        ({"k": True}, "k must be a positive int"),
        ({"temperature": 0.0}, "temperature must be above 0. Received: temperature=0.0"),
        ({"labels": np.zeros(3)}, r"labels must be one for each of the 4 .* shape \(3,\)"),
        ({"features": np.zeros((0, 2)), "labels": []}, "features must have at least one row"),
    ],
)
def test_bad_arguments_are_errors(changes, words):
    fields = {"features": np.ones((4, 2)), "labels": np.zeros(4), "queries": np.ones((1, 2))}
    with pytest.raises(ValueError, match=words):
        knn.knn_votes(**fields | changes)


@free
@pytest.mark.parametrize("name", ["train_size", "test_size", "every"])
def test_callback_refuses_sizes_of_zero(name):
    words = f"{name} must be None or a positive int. Received: {name}=0"
    with pytest.raises(ValueError, match=words):
        KNNAccuracy([], [], **{name: 0})


def arrays(data):
    x, y = (np.concatenate(part) for part in zip(*data.as_numpy_iterator(), strict=True))
    return x, y.argmax(-1)


def test_evaluate_reads_the_features_before_the_head():
    model = tiny_model(depth=1, pooling="mean", final_norm="after_pooling")
    train, test = batches(model.config, 24, seed=0), batches(model.config, 14, seed=1)
    (x, y), (test_x, test_y) = arrays(train), arrays(test)
    features = [to_numpy(model.features()(images)) for images in (x, test_x)]
    wanted = knn.knn_accuracy(features[0], y, features[1], test_y, 5)
    assert evaluate_knn(model, train, test, k=5) == pytest.approx(wanted)
    assert wanted > 0.8
    # The negative control: features that are all equal.
    model.get_layer("encoder_norm").gamma.assign(0 * model.get_layer("encoder_norm").gamma)
    assert evaluate_knn(model, train, test, k=5) < 0.5


class Around(keras.Model):
    """An objective's shape: a model around a ViT, without labels."""

    def __init__(self, vit):
        super().__init__()
        self.vit = vit
        self.built = True

    def call(self, images, training=None):
        return self.vit(images, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred))


def test_callback_reports_what_evaluate_finds_at_the_end_of_an_epoch():
    vit = tiny_model(depth=1, pooling="mean", final_norm="after_pooling")
    train, test = batches(vit.config, 24, seed=0), batches(vit.config, 14, seed=1)
    model = Around(vit)
    model.compile(keras.optimizers.SGD(0.05))
    seen = []

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            part = train.unbatch().take(9).batch(4), test.unbatch().take(5).batch(5)
            seen.append((logs.get("val_knn"), evaluate_knn(self.model, *part, k=3)))

    callbacks = [KNNAccuracy(train, test, train_size=9, test_size=5, k=3, every=2), Later()]
    model.fit(train.map(lambda x, y: x), epochs=4, callbacks=callbacks, verbose=0)
    assert [value is None for value, _ in seen] == [True, False, True, False]
    assert all(value == pytest.approx(wanted) for value, wanted in seen[1::2])


def test_callback_sees_the_weights_that_fit_evaluates():
    """Here a callback replaces them for the evaluation, as one that averages weights does."""
    vit = tiny_model(depth=1, pooling="mean", final_norm="after_pooling")
    train, test = batches(vit.config, 24, seed=0), batches(vit.config, 14, seed=1)
    gamma = vit.get_layer("encoder_norm").gamma
    model = Around(vit)
    model.compile(keras.optimizers.SGD(0.0))

    class Swap(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.kept = keras.ops.copy(gamma)
            gamma.assign(0 * gamma)  # all features are equal

        def on_test_end(self, logs=None):
            gamma.assign(self.kept)

    images = test.map(lambda x, y: x)
    logs = {}
    for every in (None, 1):
        knn_ = KNNAccuracy(train, test, k=3, every=every)
        fit = model.fit(images, validation_data=images, callbacks=[knn_, Swap()], verbose=0)
        logs[every] = fit.history["val_knn"]
    assert logs[None][0] < 0.5 < logs[1][0]
    assert logs[1][0] == pytest.approx(evaluate_knn(model, train, test, k=3))

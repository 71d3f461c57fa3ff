"""Weighted k-nearest-neighbor classification of frozen features, as DINO reports it.

What a ViT has learned without labels, measured without training anything: each test image gets the
class that its nearest training images vote for.
"""

from collections.abc import Iterable

import keras
import numpy as np

from keras_vit.train.few_shot import extract_features, feature_model

SCORES = 2**24
"""Similarities that are held in memory at once: 64 MB of them."""


def nearest_neighbors(
    features: np.ndarray, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The most similar features by cosine, most similar first.

    Shapes: n features, m queries, D width.

    Args:
        features: `(n, D)`.
        queries: `(m, D)`.
        k: Neighbors of each query; all features if there are fewer.

    Returns:
        Their indices `(m, min(k, n))`, and their similarities, from -1 to 1, of that shape.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive int. Received: k={k!r}")
    if not len(features):
        raise ValueError("features must have at least one row. Received: none")
    count, k = len(features), min(k, len(features))
    keys, queries = _unit(features), _unit(queries)
    indices = np.empty((len(queries), k), "int64")
    similar = np.empty((len(queries), k), "float32")
    rows = max(1, SCORES // count)
    for start in range(0, len(queries), rows):
        part = slice(start, start + rows)
        scores = queries[part] @ keys.T  # (rows, n)
        # Sorting all of them would take ten times as long as the product.
        best = np.argpartition(scores, count - k, axis=-1)[:, count - k :]  # (rows, k)
        values = np.take_along_axis(scores, best, -1)
        order = np.argsort(-values, axis=-1, kind="stable")
        indices[part] = np.take_along_axis(best, order, -1)
        similar[part] = np.take_along_axis(values, order, -1)
    return indices, similar


def knn_votes(
    features: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    k: int = 20,
    temperature: float = 0.07,
) -> tuple[np.ndarray, np.ndarray]:
    """The votes for each class: v_c = sum of exp(cos / T) over the k neighbors of class c.

    They are divided by the vote of the nearest one, so that no temperature makes all of them 0.

    Args:
        features: `(n, D)`.
        labels: Whole numbers, `(n,)`.
        queries: `(m, D)`.
        k: Neighbors that vote.
        temperature: T. The smaller, the less a distant neighbor counts.

    Returns:
        The classes that occur, in order, `(K,)`, and the votes `(m, K)`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0. Received: temperature={temperature!r}")
    labels = np.asarray(labels)
    if labels.shape != (len(features),):
        raise ValueError(
            f"labels must be one for each of the {len(features)} features. "
            f"Received: labels of shape {labels.shape}"
        )
    indices, similar = nearest_neighbors(features, queries, k)
    classes, numbers = np.unique(labels, return_inverse=True)
    weights = np.exp((similar - similar[:, :1]).astype("float64") / temperature)
    votes = np.zeros((len(indices), len(classes)))
    np.add.at(votes, (np.arange(len(indices))[:, None], numbers[indices]), weights)
    return classes, votes


def knn_accuracy(
    features: np.ndarray,
    labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Share of the test examples whose neighbors vote for the right class; see `knn_votes`."""
    classes, votes = knn_votes(features, labels, test_features, k, temperature)
    return float(np.mean(classes[votes.argmax(-1)] == np.asarray(test_labels)))


def evaluate_knn(
    model: keras.Model,
    train: Iterable,
    test: Iterable,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Accuracy of k-nearest-neighbor classification by a ViT's features, those before the head.

    Args:
        model: A `ViT`, or an objective around one.
        train: Batches of (images, one-hot targets), as for evaluation: each image once, not
            augmented, normalized as the model takes it. The features of all are held in memory.
        test: The same of the test set.
        k: Neighbors that vote; DINO reports 20.
        temperature: The vote of a neighbor is exp(cosine similarity / temperature).

    Returns:
        Share of the test images whose class is right.

    Reference:
        arXiv 2104.14294, Section 4.1; the weights are those of arXiv 1805.01978.

    Example:

    >>> keras_vit.train.evaluate_knn(mae.vit, train_batches, test_batches)
    """
    vit = vit_of(model)
    return _accuracy(vit, feature_model(vit), (train, None), (test, None), k, temperature)


class KNNAccuracy(keras.callbacks.Callback):
    """Adds `val_knn`, the accuracy of `evaluate_knn`, to the logs of `fit`.

    It shows how training without labels goes. Place it before the callbacks that should see the
    value. Several thousand images make it cheap; take them at random, not the first classes of
    ordered data.

    Args:
        train: Batches of (images, one-hot targets), as for `evaluate_knn`. They are read again
            each time.
        test: The same of the test set.
        train_size: How many of the first training images are read; None is all of them.
        test_size: The same of the test images.
        k: Neighbors that vote.
        temperature: See `evaluate_knn`.
        every: Epochs between two values. None means after each evaluation that `fit` makes, with
            the weights that are evaluated.

    Example:

    >>> knn = keras_vit.train.KNNAccuracy(train_batches, test_batches, train_size=5000)
    >>> mae.fit(images, epochs=100, callbacks=[knn])
    """

    def __init__(
        self,
        train: Iterable,
        test: Iterable,
        *,
        train_size: int | None = None,
        test_size: int | None = None,
        k: int = 20,
        temperature: float = 0.07,
        every: int | None = 1,
    ):
        super().__init__()
        for name, value in (("train_size", train_size), ("test_size", test_size), ("every", every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be None or a positive int. Received: {name}={value}")
        self.train = train
        self.test = test
        self.train_size = train_size
        self.test_size = test_size
        self.k = k
        self.temperature = temperature
        self.every = every
        self._backbone: keras.Model | None = None
        self._found: float | None = None

    def on_test_end(self, logs=None):
        if self.every is None:
            self._found = self._accuracy()

    def on_epoch_end(self, epoch, logs=None):
        if self.every and (epoch + 1) % self.every == 0:
            self._found = self._accuracy()
        if self._found is not None and logs is not None:
            logs["val_knn"] = self._found
        self._found = None

    def set_model(self, model):
        super().set_model(model)
        self._backbone = None

    def _accuracy(self) -> float:
        vit = vit_of(self.model)
        if self._backbone is None:  # kept: it is compiled once
            self._backbone = feature_model(vit)
        train, test = (self.train, self.train_size), (self.test, self.test_size)
        return _accuracy(vit, self._backbone, train, test, self.k, self.temperature)


def vit_of(model: keras.Model) -> keras.Model:
    """The ViT that an objective trains, or the model itself."""
    return getattr(model, "trained_vit", getattr(model, "vit", model))


def _accuracy(vit, backbone, train, test, k, temperature) -> float:
    """`knn_accuracy` of two pairs of batches and how many images of them are read."""
    examples = (extract_features(vit, backbone, batches, count) for batches, count in (train, test))
    (x, y), (test_x, test_y) = examples
    return knn_accuracy(x, y, test_x, test_y, k, temperature)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1; a row of zeros stays one."""
    rows = np.asarray(rows, "float32")
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)

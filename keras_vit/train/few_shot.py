"""The paper's few-shot linear evaluation (arXiv 2010.11929, Section 4.1), in closed form.

Least squares from the features of a few images of each class to targets of +1 and -1. What the
paper leaves open is as in big_vision: features whitened by the mean and deviation of the few
images, L2 regularization of 2^10, three draws of images, and more shots extend fewer.
"""

import math
from collections.abc import Iterable, Sequence

import keras
import numpy as np

from keras_vit.preprocessing import MAKE, check_normalized
from keras_vit.train.distribution.devices import jit_compile

L2 = 2.0**10
BIAS = 100.0  # large, so that the constant feature is hardly regularized


def few_shot_accuracy(
    features: np.ndarray,
    labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    shots: int,
    seed: int = 0,
    l2: float = L2,
) -> float:
    """Accuracy on the test set of a linear classifier of `shots` examples a class.

    Shapes: n examples, m test examples, D width.

    Args:
        features: `(n, D)`, of which the examples are drawn.
        labels: Integers, `(n,)`.
        test_features: `(m, D)`.
        test_labels: Integers, `(m,)`.
        shots: Examples a class; all of them for a class that has fewer.
        seed: Decides which are drawn.
        l2: Strength of the regularization.

    Returns:
        Share of the test examples whose class is right.
    """
    if shots < 1:
        raise ValueError(f"shots must be a positive int. Received: shots={shots!r}")
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    # The whole order is drawn, so that ten shots contain the five.
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:shots] for c in classes]
    few = np.concatenate(drawn)
    x = np.asarray(features[few], "float64")
    mean, std = x.mean(0), x.std(0) + 1e-5
    targets = np.where(labels[few, None] == classes, 1.0, -1.0)  # (n, K)
    weights = solve(_whiten(x, mean, std), targets, l2)  # (D + 1, K)
    scores = _whiten(np.asarray(test_features, "float64"), mean, std) @ weights  # (m, K)
    return float(np.mean(classes[scores.argmax(-1)] == test_labels))


def evaluate_few_shot(
    model: keras.Model,
    train: Iterable,
    test: Iterable,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    l2: float = L2,
) -> dict[str, float]:
    """Few-shot accuracy of a ViT's features, the mean over the draws.

    Args:
        model: A `ViT`.
        train: Batches of (images, one-hot targets), as for evaluation: each image once, not
            augmented, normalized as the model takes it. The features of all are held in memory.
        test: The same of the test set.
        shots: Examples a class.
        seeds: Draws.
        l2: Strength of the regularization.

    Returns:
        "few_shot_5" -> accuracy, for each of `shots`.
    """
    return few_shot_accuracies(*features_of_both(model, train, test), shots, seeds, l2)


def few_shot_accuracies(
    features: np.ndarray,
    labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    shots: Sequence[int],
    seeds: int = 3,
    l2: float = L2,
) -> dict[str, float]:
    """`evaluate_few_shot` for features that were extracted before."""
    data = (features, labels, test_features, test_labels)
    return {
        f"few_shot_{n}": float(np.mean([few_shot_accuracy(*data, n, s, l2) for s in range(seeds)]))
        for n in shots
    }


def solve(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    """Least squares with L2 regularization: the w that minimizes |x w - y|^2 + l2 |w|^2.

    Args:
        x: `(n, D)`.
        y: `(n, K)`.
        l2: Above 0.

    Returns:
        `(D, K)`.
    """
    n, width = x.shape
    if n >= width:
        return np.linalg.solve(x.T @ x + l2 * np.eye(width), x.T @ y)
    return x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(n), y)  # the same, from a smaller system


def feature_model(model: keras.Model) -> keras.Model:
    """A model of what a ViT's head reads, one vector an image; it shares the ViT's weights."""
    backbone = model.features()
    if len(backbone.output_shape) != 2:
        raise ValueError(
            "model must have one feature vector an image. "
            f"Received: a model with features of shape {backbone.output_shape}"
        )
    if not jit_compile():
        backbone.jit_compile = False
    return backbone


def features_of_both(
    model: keras.Model, train: Iterable, test: Iterable
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features and labels of training images, then those of test images."""
    backbone = feature_model(model)
    return (*extract_features(model, backbone, train), *extract_features(model, backbone, test))


def extract_features(
    model: keras.Model, backbone: keras.Model, batches: Iterable, count: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Features and integer labels of images.

    Args:
        model: A `ViT`.
        backbone: What `feature_model` returns for it.
        batches: Batches of (images, one-hot targets), normalized as the model takes them.
        count: How many images are read; None is all of them.

    Returns:
        float32 `(n, D)` and whole numbers `(n,)`.
    """
    features, labels, left = [], [], math.inf if count is None else count
    for images, targets in batches:
        images = np.asarray(images)
        check_normalized(images, model.config, advice=f"{MAKE}.")
        out = keras.ops.convert_to_numpy(backbone.predict_on_batch(images))
        targets = np.asarray(targets)
        if not targets.shape[-1]:
            raise ValueError("batches must have labels. Received: targets without classes")
        rows = int(min(len(out), left))
        features.append(np.asarray(out[:rows], "float32"))
        labels.append(targets[:rows].argmax(-1))
        left -= rows
        if left <= 0:
            break
    if not features:
        raise ValueError("batches must hold at least one image. Received: none")
    return np.concatenate(features), np.concatenate(labels)


def _whiten(x, mean, std):
    return np.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=BIAS)  # (n, D + 1)

"""Features and images that are easy to classify, for the evaluations of frozen features."""

import numpy as np
import tensorflow as tf

CLASSES, WIDTH = 3, 6


def clusters(count, seed, noise=1.5):
    """Features around one center for each class; the centers are the same for every seed."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % CLASSES)
    centers = np.random.default_rng(5).normal(size=(CLASSES, WIDTH))
    return centers[labels] + noise * rng.normal(size=(count, WIDTH)), labels


def batches(config, count, seed):
    """Random images whose brightness is their class, as batches of unequal size."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % config.num_classes
    x = 0.1 * rng.normal(size=(count, *config.input_shape)) + labels[:, None, None, None] - 1.0
    y = np.eye(config.num_classes, dtype="float32")[labels]
    return tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).batch(8)

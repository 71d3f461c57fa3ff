"""The accuracy of a model and of its export on labeled images, and the most that may be lost."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.preprocessing import check_normalized
from keras_vit.runtime import Runtime

AT_A_TIME = 256  # images of an array


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How often the top class was the label."""

    images: int
    correct: int

    @property
    def top_1(self) -> float:
        """As a share."""
        return self.correct / self.images


@dataclasses.dataclass(frozen=True)
class Drop:
    """What an export costs, from running the model and the export on the same images."""

    reference: Accuracy
    export: Accuracy
    same_top_class: float
    """Share of the images."""

    @property
    def points(self) -> float:
        """Percentage points that the export loses; negative where it is better."""
        return 100 * (self.reference.correct - self.export.correct) / self.export.images


def measure(runtime: Runtime, data: Any) -> Accuracy:
    """Measures a model on labeled images.

    Args:
        runtime: What `keras_vit.runtime.open` returns.
        data: `(images, labels)`, or an iterable of such batches, such as a `tf.data.Dataset`.
            Images `(B, H, W, C)` are floats as the model takes them or uint8 pixels of its size;
            labels `(B,)` are the numbers of the classes.

    Returns:
        An `Accuracy`.

    Example:

    >>> measure(keras_vit.runtime.open("flowers.tflite"), (images, labels)).top_1
    """
    images = correct = 0
    for pixels, labels in batches(runtime, data):
        images += len(labels)
        correct += int((_top_class(runtime, pixels) == labels).sum())
    return Accuracy(images, correct)


def check_drop(reference: Runtime, export: Runtime, data: Any, max_drop: float) -> Drop:
    """Measures a model and its export; raises `ValueError` if the export loses too much.

    Args:
        reference: The model.
        export: What was exported.
        data: As for `measure`; it is iterated over once.
        max_drop: The most percentage points of accuracy that the export may lose.

    Returns:
        A `Drop`.
    """
    check_max_drop(max_drop)
    count = right = found_right = same = 0
    for pixels, labels in batches(reference, data):
        wanted, found = _top_class(reference, pixels), _top_class(export, pixels)
        count += len(labels)
        right += int((wanted == labels).sum())
        found_right += int((found == labels).sum())
        same += int((wanted == found).sum())
    drop = Drop(Accuracy(count, right), Accuracy(count, found_right), same / count)
    if drop.points > max_drop + 1e-9:
        raise ValueError(
            f"The export must lose at most max_drop={max_drop:g} points of accuracy. Received: "
            f"{drop.export.top_1:.2%} on {count} images, where the model has "
            f"{drop.reference.top_1:.2%}: {drop.points:.2f} points less; "
            f"{drop.same_top_class:.2%} of the top classes are the model's"
        )
    return drop


def check_accuracy_data(config: ViTConfig, accuracy_data: Any, max_drop: Any) -> None:
    """Raises `ValueError` for these arguments of an export whose outputs include any logits."""
    if accuracy_data is not None:
        _check_classes("accuracy_data", config)
    check_max_drop(max_drop)


def check_max_drop(max_drop: Any) -> None:
    """Raises `ValueError` for a `max_drop` that is not a number of at least 0."""
    if not isinstance(max_drop, int | float) or not max_drop >= 0:
        raise ValueError(
            f"max_drop must be a number of at least 0. Received: max_drop={max_drop!r}"
        )


def batches(runtime: Runtime, data: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The images and labels of `data` as checked arrays, a batch at a time."""
    config = runtime.config
    _check_classes("data", config)
    empty = True
    for images, labels in _pairs(data):
        empty = False
        _check_images(images, config)
        yield images, _checked_labels(labels, len(images), config.num_classes)
    if empty:
        raise ValueError("data must hold at least one labeled image. Received: none")


def _check_classes(name: str, config: ViTConfig) -> None:
    """Raises `ValueError` for an argument if a model does not choose among classes."""
    if not config.num_classes or config.pooling is None:
        raise ValueError(
            f"{name} must be None for a model that gives no classes of an image. "
            f"Received: num_classes={config.num_classes}, pooling={config.pooling!r}"
        )
    if config.num_classes == 1:
        raise ValueError(
            f"{name} must be None for a model of one logit, whose top class is the same for every "
            "image: compare its probabilities yourself. Received: num_classes=1"
        )


def _pairs(data: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list):
        images, labels = (np.asarray(part) for part in data)
        if images.ndim and labels.ndim and len(images) != len(labels):
            raise ValueError(
                "data must have a label for each image. "
                f"Received: {len(images)} images and {len(labels)} labels"
            )
        starts = range(0, len(images) if images.ndim else 1, AT_A_TIME)
        for part in starts:
            yield images[part : part + AT_A_TIME], labels[part : part + AT_A_TIME]
        return
    if isinstance(data, str | bytes | dict | np.ndarray) or not hasattr(data, "__iter__"):
        raise ValueError(
            "data must be (images, labels) or an iterable of such batches. "
            f"Received: {type(data).__name__}"
        )
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                "data must be (images, labels) or an iterable of such batches. "
                f"Received: a batch that is a {type(batch).__name__}"
            )
        yield np.asarray(batch[0]), np.asarray(batch[1])


def _check_images(images: np.ndarray, config: ViTConfig) -> None:
    shape = config.input_shape
    known = images.dtype.kind == "f" or images.dtype == np.uint8
    if images.ndim != 4 or images.shape[1:] != shape or not len(images) or not known:
        raise ValueError(
            "data must hold images that are floats as the model takes them, or uint8 pixels, of "
            f"shape (batch, {', '.join(map(str, shape))}). "
            f"Received: shape {images.shape}, {images.dtype}"
        )
    if images.dtype != np.uint8:
        check_normalized(images, config, "data")


def _checked_labels(labels: np.ndarray, count: int, num_classes: int) -> np.ndarray:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"data must hold labels that are integers of shape ({count},), one for each image. "
            f"Received: shape {labels.shape}, {labels.dtype}"
        )
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(
            f"data must hold labels from 0 to {num_classes - 1}, for num_classes={num_classes}. "
            f"Received: {int(outside[0])}"
        )
    return labels


def _top_class(runtime: Runtime, images: np.ndarray) -> np.ndarray:
    logits = runtime.logits(images)
    if not np.isfinite(logits).all():
        raise ValueError(
            f"data must give finite logits. Received: NaN or infinite ones from {runtime.kind}"
        )
    return logits.argmax(-1)

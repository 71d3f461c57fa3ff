"""Accuracy of models and exports on labeled images, and the refusal of a bad one."""

import numpy as np
import pytest
from conformance import TINY

from keras_vit.export.accuracy import AT_A_TIME, check_drop, measure
from keras_vit.runtime import Runtime

pytestmark = pytest.mark.backend_free


PIXELS = TINY.replace(pixel_mean=0.0, pixel_std=1 / 255)  # takes them from 0 to 255


class Reader(Runtime):
    """Says the class that is written in an image's first value, but for some of them."""

    kind = "reader"

    def __init__(self, wrong=(), config=PIXELS, value=1.0):
        super().__init__("", config)
        self.wrong, self.value, self.seen = wrong, value, []

    def _run(self, images, wanted="logits"):
        first = np.rint(images[:, 0, 0, :2]).astype(int)  # the class, and the image's number
        self.seen.append(len(images))
        classes = (first[:, 0] + np.isin(first[:, 1], self.wrong)) % 3
        return {"logits": self.value * np.eye(3, dtype="float32")[classes]}


def made(count=10):
    labels = np.arange(count) % 3
    images = np.zeros((count, *TINY.input_shape), "float32")
    images[:, 0, 0, 0], images[:, 0, 0, 1] = labels, np.arange(count)
    return images, labels


def test_accuracy_is_the_share_of_right_top_classes():
    found = measure(Reader(wrong=(1, 4, 5)), made())
    assert (found.images, found.correct, found.top_1) == (10, 7, 0.7)
    assert measure(Reader(), made()).top_1 == 1.0


def test_data_may_be_arrays_or_batches():
    import tensorflow as tf

    images, labels = made(AT_A_TIME + 40)
    wrong = (3, AT_A_TIME + 1)
    wanted = measure(Reader(wrong), (images, labels))
    assert wanted.correct == AT_A_TIME + 38
    reader = Reader(wrong)
    parts = [(images[:9], labels[:9]), [images[9:], labels[9:].astype("int32")]]
    for data in (parts, iter(parts), tf.data.Dataset.from_tensor_slices(made()).batch(4)):
        found = measure(reader, data)
        assert found in (wanted, measure(Reader(wrong), made()))
    assert reader.seen[-3:] == [4, 4, 2]
    two = [(images[:5], labels[:5]), (images[5:9], labels[5:9])]
    assert measure(Reader(), tuple(two)).images == 9  # a tuple of two batches, not of two arrays


def test_drop_counts_both_on_the_same_images():
    drop = check_drop(Reader((0,)), Reader((0, 1)), iter([made()]), 10)
    assert (drop.reference.correct, drop.export.correct) == (9, 8)
    assert drop.points == 10.0 and drop.same_top_class == 0.9
    # Another wrong one each: as accurate, but not the same.
    drop = check_drop(Reader((0,)), Reader((1,)), made(), 0)
    assert drop.points == 0.0 and drop.same_top_class == 0.8
    assert check_drop(Reader((0, 1)), Reader(), made(), 0).points == -20.0


def test_drop_counts_every_batch():
    images, labels = made(AT_A_TIME + 40)
    last = AT_A_TIME + 39
    parts = [(images[:9], labels[:9]), (images[9:100], labels[9:100]), (images[100:], labels[100:])]
    for data in ((images, labels), iter(parts)):
        drop = check_drop(Reader((0,)), Reader((0, 50, last)), data, 1)
        assert (drop.reference.images, drop.export.images) == (len(labels), len(labels))
        assert (drop.reference.correct, drop.export.correct) == (last, last - 2)
        assert drop.same_top_class == (last - 1) / len(labels)


def test_drop_above_the_limit_is_refused_with_the_figures():
    message = (
        r"at most max_drop=9.9 points of accuracy. Received: 80.00% on 10 images, where the "
        r"model has 90.00%: 10.00 points less; 90.00% of the top classes are the model's"
    )
    with pytest.raises(ValueError, match=message):
        check_drop(Reader((0,)), Reader((0, 1)), made(), 9.9)
    for bad in (-1, float("nan"), "1"):
        with pytest.raises(ValueError, match="max_drop must be a number of at least 0"):
            check_drop(Reader(), Reader(), made(), bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:, :8], y), r"shape \(batch, 24, 16, 3\). Received: shape \(10, 8, 16, 3"),
        (lambda x, y: (x.astype("int64"), y), "uint8 pixels, of shape .*int64"),
        (lambda x, y: (x[0], y), "a label for each image. Received: 24 images and 10 labels"),
        (lambda x, y: zip(x, y, strict=True), r"Received: shape \(24, 16, 3\)"),
        (lambda x, y: (x, y[:9]), "Received: 10 images and 9 labels"),
        (lambda x, y: [(x, y[:9])], r"integers of shape \(10,\).*Received: shape \(9,\)"),
        (lambda x, y: (x, np.eye(3)[y]), r"integers of shape \(10,\).*\(10, 3\), float64"),
        (lambda x, y: (x, y + 1), "labels from 0 to 2, for num_classes=3. Received: 3"),
        (lambda x, y: (x, y - 1), "Received: -1"),
        (lambda x, y: (x[:0], y[:0]), "at least one labeled image. Received: none"),
        (lambda x, y: [], "at least one labeled image. Received: none"),
        (lambda x, y: x, "or an iterable of such batches. Received: ndarray"),
        (lambda x, y: 3, "Received: int"),
        (lambda x, y: [{"image": x}], "Received: a batch that is a dict"),
    ],
)
def test_bad_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        measure(Reader(), change(*made()))


def test_model_without_classes_of_an_image_is_refused():
    for changes in ({"num_classes": 0}, {"pooling": None}):
        with pytest.raises(ValueError, match="gives no classes of an image. Received: num_classes"):
            measure(Reader(config=TINY.replace(**changes)), made())


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite logits. Received: NaN .* from reader"):
        check_drop(Reader(), Reader(value=np.nan), made(), 100)

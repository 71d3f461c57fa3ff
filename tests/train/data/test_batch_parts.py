"""Several processes: their parts together are the batches of one process."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.train.data import batching
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import IndexedSplit, Part, StreamedSplit
from keras_vit.train.recipe import Augment

pytestmark = pytest.mark.backend_free

SHAPE, CLASSES, COUNT = (24, 16, 3), 3, 22
CONFIG = ViTConfig(image_size=SHAPE[:2], patch_size=8, width=20, num_heads=5, num_classes=CLASSES)
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, *SHAPE), dtype=np.uint8)
LABELS = np.arange(COUNT) % CLASSES


FILES = [tf.io.encode_png(image).numpy() for image in IMAGES]


def stream(seed):
    del seed  # the files have only one order
    return tf.data.Dataset.from_tensor_slices({"image": FILES, "label": LABELS})


SPLITS = {
    "arrays": lambda: IndexedSplit(IMAGES, LABELS),
    "files": lambda: IndexedSplit(np.arange(COUNT), LABELS, lambda i: tf.constant(FILES)[i]),
    "stream": lambda: StreamedSplit(COUNT, stream),
}
AUGMENTS = {
    "nothing": Augment(),
    "images": Augment(crop="pad", flip=True, repeats=2),
    "mixed": Augment(flip=True, mixup=0.8, cutmix=1.0),
    "keras_cv": Augment(keras_cv=[["RandomHue", {"factor": 0.5}], ["MixUp", {"alpha": 1.0}]]),
}


def batches(split, augment, count=5, **arguments):
    source = Source("made up", None, CLASSES, (None, None, 3), split, split)
    run = batching.train_batches(source, CONFIG, augment, 6, seed=7, **arguments)
    return list(run.take(count).as_numpy_iterator())


def together(parts):
    """Each batch, put together from the parts of the processes."""
    return [
        tuple(np.concatenate(values) for values in zip(*pieces, strict=True))
        for pieces in zip(*parts, strict=True)
    ]


def same(a, b):
    """Whether batches are equal, up to the last bit of a mixed image."""
    return len(a) == len(b) and all(
        np.allclose(x, y, rtol=0, atol=1e-6)
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


def pairs():
    """Of every kind of split, and of every augmentation; all pairs among the slow tests."""
    for split in SPLITS:
        for augment in AUGMENTS:
            quick = split == "arrays" or augment == "mixed"
            yield pytest.param(split, augment, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("split", "augment"), pairs())
@pytest.mark.parametrize("processes", [3])
def test_train_batches_are_split_into_parts(split, augment, processes):
    split, augment = SPLITS[split](), AUGMENTS[augment]
    whole = batches(split, augment)
    parts = [batches(split, augment, process=i, processes=processes) for i in range(processes)]
    assert {x.shape[0] for part in parts for pair in part for x in pair} == {6 // processes}
    assert same(together(parts), whole)
    assert not same(together(parts[::-1]), whole)
    late = batches(split, augment, 2, start_step=3, process=1, processes=processes)
    assert same(late, parts[1][3:])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("processes", [1, 4])
def test_test_batches_count_every_sample_once(split, processes):
    split = SPLITS[split]()
    plain = together([list(batching.test_batches(split, CONFIG, 8, CLASSES).as_numpy_iterator())])
    runs = [
        batching.test_batches(split, CONFIG, 8, CLASSES, Part.of(8, i, processes))
        for i in range(processes)
    ]
    assert {int(run.cardinality()) for run in runs} == {3}
    triples = together([list(run.as_numpy_iterator()) for run in runs])
    images, targets, weights = (np.concatenate(v) for v in zip(*triples, strict=True))
    assert len(weights) == 24 and np.count_nonzero(weights) == COUNT
    wanted = [np.concatenate(values) for values in zip(*plain, strict=True)]
    assert np.array_equal(images[:COUNT], wanted[0]) and np.array_equal(targets[:COUNT], wanted[1])
    losses = np.random.default_rng(1).random(COUNT)
    mean = np.sum(np.append(losses, [9, 9]) * weights) / 24  # what Keras does with them
    np.testing.assert_allclose(mean, losses.mean(), rtol=1e-6)


def test_parts_are_equal():
    assert Part.of(6, 1, 3).positions == (2, 3)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 4 processes.*=6"):
        Part.of(6, 1, 4)
    with pytest.raises(ValueError, match="part must be of batches of 8. Received: part of 6"):
        batching.test_batches(SPLITS["arrays"](), CONFIG, 8, CLASSES, Part.of(6, 0, 1))

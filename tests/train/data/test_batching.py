"""The order of samples and the batches are functions of (seed, step), on every backend."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit import ViTConfig
from keras_vit.preprocessing import preprocess
from keras_vit.train.data import batching
from keras_vit.train.data.sources import Source, leave_accelerators
from keras_vit.train.data.splits import IndexedSplit, StreamedSplit, subset
from keras_vit.train.recipe import Augment

HEIGHT, WIDTH, CLASSES = 24, 16, 3
CONFIG = ViTConfig(
    image_size=(HEIGHT, WIDTH),
    patch_size=8,
    width=20,
    num_heads=5,
    num_classes=CLASSES,
    pixel_mean=(0.5, 0.4, 0.3),
    pixel_std=(0.2, 0.3, 0.4),
)
BUSY = Augment(crop="pad", flip=True, mixup=0.5, cutmix=0.5)


def arrays(count, shape=(HEIGHT, WIDTH, 3)):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % CLASSES


def encoded(count, suffix):
    """Images of many sizes, as encoded files and as PIL images."""
    rng = np.random.default_rng(1)
    files = []
    for i in range(count):
        coarse = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((WIDTH + 7 * i, HEIGHT + 3 * i)).save(file, suffix)
        files.append(file.getvalue())
    return files, [Image.open(io.BytesIO(file)) for file in files]


def source_of(split):
    return Source("made up", None, CLASSES, (None, None, 3), split, split)


@pytest.fixture(scope="module")
def source():
    return source_of(IndexedSplit(*arrays(11)))


def numbers(split, count, **arguments):
    examples = split.shuffled(**arguments).take(count)
    return [(int(e["number"]), int(e["image"])) for e in examples]


def equal(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def read(dataset, count=-1):
    return list(dataset.take(count).as_numpy_iterator())


# -- order


@pytest.mark.backend_free
@pytest.mark.parametrize("count", [1, 2, 11, 100])
def test_order_has_every_image_once_an_epoch(count):
    split = IndexedSplit(np.arange(count), np.zeros(count, int))
    run = numbers(split, 3 * count, seed=5)
    assert [n for n, _ in run] == list(range(3 * count))
    epochs = [[i for _, i in run[k * count : (k + 1) * count]] for k in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count > 10:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
        assert numbers(split, count, seed=6) != run[:count]


@pytest.mark.backend_free
def test_order_resumes_at_any_sample():
    split = IndexedSplit(np.arange(100), np.zeros(100, int))
    run = numbers(split, 400, seed=5)
    for start in (1, 64, 99, 100, 301):
        assert numbers(split, 400 - start, seed=5, start=start) == run[start:]
    far = 10**12 + 3  # without computing the epochs before
    assert [n for n, _ in numbers(split, 2, seed=5, start=far)] == [far, far + 1]


@pytest.mark.backend_free
def test_order_repeats_each_image_in_a_row():
    split = IndexedSplit(np.arange(10), np.zeros(10, int))
    once = numbers(split, 20, seed=5)
    run = numbers(split, 60, seed=5, repeats=3)
    assert [n for n, _ in run] == list(range(60))
    assert [i for _, i in run] == [i for _, i in once for _ in range(3)]
    assert numbers(split, 53, seed=5, start=7, repeats=3) == run[7:]


@pytest.mark.backend_free
def test_order_is_random():
    """Each image appears at each place equally often: chi-squared over 2,000 epochs."""
    count, epochs = 7, 2000
    split = IndexedSplit(np.arange(count), np.zeros(count, int))
    batches = split.shuffled(seed=0, batch_size=count).take(epochs)
    order = np.array([batch["image"] for batch in batches.as_numpy_iterator()])
    seen = np.array([np.bincount(order[:, place], minlength=count) for place in range(count)])
    expected = epochs / count
    assert ((seen - expected) ** 2 / expected).sum() < 75  # 36 degrees of freedom, p = 1e-4


@pytest.mark.backend_free
def test_ordered_keeps_the_stored_order():
    split = IndexedSplit(np.arange(130), np.arange(130) % 3)
    run = read(split.ordered())
    assert [e["image"].item() for e in run] == list(range(130))
    assert [int(e["label"]) for e in run] == [i % 3 for i in range(130)]


@pytest.mark.backend_free
def test_images_without_labels_are_refused():
    with pytest.raises(ValueError, match="a label for every image"):
        IndexedSplit(np.arange(3), [0, -1, 2])


# -- training batches


@pytest.mark.backend_free
@pytest.mark.parametrize("augment", [Augment(), BUSY, Augment(flip=True, repeats=2)])
def test_train_batches(source, augment):
    batches = batching.train_batches(source, CONFIG, augment, 4, seed=0)
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    images, targets = batches.element_spec
    assert images == tf.TensorSpec((4, HEIGHT, WIDTH, 3), tf.float32)
    assert targets == tf.TensorSpec((4, CLASSES), tf.float32)
    run = read(batches, 9)
    assert all(np.allclose(targets.sum(-1), 1) for _, targets in run)
    assert equal(run, read(batching.train_batches(source, CONFIG, augment, 4, seed=0), 9))
    assert not equal(run, read(batching.train_batches(source, CONFIG, augment, 4, seed=1), 9))
    rest = read(batching.train_batches(source, CONFIG, augment, 4, seed=0, start_step=5), 4)
    assert equal(run[5:], rest)
    assert not equal(run[4:8], rest)


@pytest.mark.backend_free
def test_train_batches_without_augmentation_are_the_images(source):
    """An epoch has the images as `preprocess` makes them."""
    pictures, labels = arrays(11)
    wanted = preprocess(pictures, CONFIG)
    (images, targets), *_ = read(batching.train_batches(source, CONFIG, Augment(), 11, seed=0), 1)
    for image, target in zip(images, targets, strict=True):
        (index,) = [i for i in range(11) if np.allclose(image, wanted[i], atol=1e-5)]
        assert target.argmax() == labels[index]


@pytest.mark.backend_free
def test_train_batches_gathered_at_once_equal_those_of_single_images(source, monkeypatch):
    augment = Augment(mixup=0.5, repeats=2)
    assert batching._whole_batches(source.train, CONFIG, augment)
    run = read(batching.train_batches(source, CONFIG, augment, 4, seed=0), 6)
    monkeypatch.setattr(batching, "_whole_batches", lambda *args: False)
    assert equal(run, read(batching.train_batches(source, CONFIG, augment, 4, seed=0), 6))


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "config, augment",
    [
        (CONFIG, Augment(flip=True)),
        (CONFIG, Augment(cutout=3)),
        (CONFIG.replace(image_size=(16, 16)), Augment()),
        (CONFIG.replace(crop_fraction=0.875), Augment()),
    ],
)
def test_train_batches_are_gathered_at_once_only_without_augmentation(source, config, augment):
    assert not batching._whole_batches(source.train, config, augment)


@pytest.mark.backend_free
def test_train_batches_are_mixed_differently_in_each_batch(source):
    """The same two images get other shares in each batch of the run."""
    one = source_of(IndexedSplit(*arrays(2)))
    shares = {
        round(float(np.sort(targets[0])[-1]), 5)
        for _, targets in read(batching.train_batches(one, CONFIG, Augment(mixup=1.0), 2, 0), 8)
    }
    assert len(shares) > 4


@pytest.mark.backend_free
def test_train_batches_of_encoded_images():
    files, _ = encoded(5, "jpeg")
    source = source_of(IndexedSplit(files, np.arange(5) % CLASSES))
    augment = Augment(crop="inception", flip=True)
    run = read(batching.train_batches(source, CONFIG, augment, 3, seed=0), 4)
    assert run[0][0].shape == (3, HEIGHT, WIDTH, 3)
    rest = read(batching.train_batches(source, CONFIG, augment, 3, seed=0, start_step=1), 3)
    assert equal(run[1:], rest)


@pytest.mark.backend_free
def test_batch_larger_than_the_data_is_refused(source):
    with pytest.raises(ValueError, match="from 1 to the 11 training .* batch_size=12"):
        batching.train_batches(source, CONFIG, Augment(), 12, seed=0)
    with pytest.raises(ValueError, match="at least 1.*batch_size=0"):
        batching.test_batches(source.test, CONFIG, 0, CLASSES)


# -- test batches


def stack(batches):
    return [np.concatenate(part) for part in zip(*batches, strict=True)]


@pytest.mark.backend_free
@pytest.mark.parametrize("shape", [(HEIGHT, WIDTH, 3), (9, 31, 3), (9, 31, 1)])
def test_test_batches_of_arrays_equal_preprocess(shape):
    pictures, labels = arrays(7, shape)
    batches = batching.test_batches(IndexedSplit(pictures, labels), CONFIG, 3, CLASSES)
    assert batches.cardinality() == 3
    assert [len(images) for images, _ in batches] == [3, 3, 1]
    images, targets = stack(read(batches))
    assert targets.argmax(-1).tolist() == labels.tolist() and targets.dtype == np.float32
    _assert_within_a_pixel_value(images, preprocess(pictures, CONFIG))


@pytest.mark.backend_free
@pytest.mark.parametrize("suffix", ["png", "jpeg", "bmp", "gif"])
@pytest.mark.parametrize("crop_fraction", [None, 0.875])
def test_test_batches_of_files_equal_preprocess(suffix, crop_fraction):
    config = CONFIG.replace(crop_fraction=crop_fraction)
    files, pictures = encoded(5, suffix)
    batches = batching.test_batches(IndexedSplit(files, np.arange(5) % 3), config, 2, CLASSES)
    images, targets = stack(read(batches))
    assert targets.argmax(-1).tolist() == [0, 1, 2, 0, 1]
    _assert_within_a_pixel_value(images, preprocess(pictures, config))


def test_test_batches_are_float32_under_any_dtype_policy():
    split = IndexedSplit(*arrays(3, (9, 31, 3)))
    plain = read(batching.test_batches(split, CONFIG, 3, CLASSES))
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert equal(plain, read(batching.test_batches(split, CONFIG, 3, CLASSES)))
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.backend_free
def test_test_batches_must_have_the_channels_of_the_model():
    split = IndexedSplit(*arrays(3, (9, 31, 2)))
    with pytest.raises(ValueError, match="which have 2 channels.*in_channels=3"):
        batching.test_batches(split, CONFIG, 3, CLASSES)


def _assert_within_a_pixel_value(images, wanted):
    std = np.asarray(CONFIG.pixel_std, "float32")
    apart = np.abs(images - wanted) * 255 * std
    assert apart.max() < 1.01 and apart.mean() < 0.3
    assert np.abs(images[::-1] - wanted).max() > 0.5  # the negative control: other images


# -- with Keras


def test_fit_and_evaluate(source):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    batches = batching.train_batches(source, CONFIG, BUSY, 4, seed=0)
    tests = batching.test_batches(source.test, CONFIG, 4, CLASSES)
    history = model.fit(batches, steps_per_epoch=3, epochs=2, validation_data=tests, verbose=0)
    assert len(history.history["val_accuracy"]) == 2
    right = model.predict(tests, verbose=0).argmax(-1) == arrays(11)[1]
    assert history.history["val_accuracy"][-1] == pytest.approx(right.mean())  # 11 images count


@pytest.mark.parametrize("backend, hidden", [("jax", True), ("torch", True), ("tensorflow", False)])
def test_tensorflow_leaves_accelerators_to_other_backends(monkeypatch, backend, hidden):
    calls = []
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *args: calls.append(args))
    leave_accelerators()
    assert calls == ([([], "GPU")] if hidden else [])


def test_tensorflow_that_is_initialized_already_is_a_warning(monkeypatch, caplog):
    def too_late(*args):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(tf.config, "set_visible_devices", too_late)
    leave_accelerators()
    assert "cannot be modified" in caplog.text


@pytest.mark.backend_free
def test_batches_of_images_without_labels():
    images = np.arange(5 * 4 * 4, dtype="uint8").reshape(5, 4, 4, 1)
    split = IndexedSplit(images, np.zeros(5, int))
    source = Source("folder", None, 0, (4, 4, 1), split, split)
    config = ViTConfig(image_size=4, patch_size=2, in_channels=1, width=4, depth=1, num_heads=1)
    augment = Augment(flip=True)
    made = [
        next(iter(batching.train_batches(source, config, augment, 3, seed=0))),
        next(iter(batching.test_batches(split, config, 3, 0))),
    ]
    for x, y in made:
        assert x.shape == (3, 4, 4, 1) and y.shape == (3, 0)


@pytest.mark.backend_free
def test_subset_of_a_split_is_random_or_the_first_of_a_stream():
    images = np.arange(20, dtype="uint8")[:, None, None, None]
    split = IndexedSplit(images, np.repeat([0, 1], 10))
    part = subset(split, 6)
    found = [e["image"].item() for e in part.ordered().as_numpy_iterator()]
    assert part.num_examples == len(set(found)) == 6 and found == sorted(found)
    assert {int(e["label"]) for e in part.ordered().as_numpy_iterator()} == {0, 1}
    np.testing.assert_array_equal(subset(split, 6).images, part.images)
    assert subset(split, 20) is split
    stream = StreamedSplit(20, lambda seed: tf.data.Dataset.from_tensor_slices({"image": images}))
    found = [e["image"].item() for e in subset(stream, 6).ordered().as_numpy_iterator()]
    assert found == list(range(6))

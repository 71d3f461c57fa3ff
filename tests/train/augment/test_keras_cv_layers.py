"""keras-cv's layers draw from seeds alone, and do what they do elsewhere."""

import logging

import keras_cv
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.train.augment import keras_cv_layers
from keras_vit.train.augment.image import augment_image
from keras_vit.train.data import batching
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import IndexedSplit
from keras_vit.train.recipe import Augment

pytestmark = pytest.mark.backend_free

SIDE = 16
CONFIG = ViTConfig(image_size=SIDE, patch_size=8, width=20, num_heads=5, num_classes=3)
ARGUMENTS = {
    "ChannelShuffle": {},
    "GridMask": {},
    "JitteredResize": {"target_size": (SIDE, SIDE), "scale_factor": (0.8, 1.25)},
    "RandAugment": {"magnitude": 0.5},
    "RandomAugmentationPipeline": {
        "layers": [["RandomHue", {"factor": 0.5}], ["RandomShear", {"x_factor": 0.5}]],
        "augmentations_per_image": 1,
    },
    "RandomBrightness": {"factor": 0.5},
    "RandomChannelShift": {"factor": 0.5},
    "RandomChoice": {
        "layers": [["RandomContrast", {"factor": 0.5}], ["RandomBrightness", {"factor": 0.5}]]
    },
    "RandomColorDegeneration": {"factor": 0.9},
    "RandomColorJitter": {
        "brightness_factor": 0.2,
        "contrast_factor": 0.2,
        "saturation_factor": 0.2,
        "hue_factor": 0.2,
    },
    "RandomContrast": {"factor": 0.5},
    "RandomCropAndResize": {
        "target_size": (SIDE, SIDE),
        "crop_area_factor": (0.3, 1.0),
        "aspect_ratio_factor": (0.8, 1.2),
    },
    "RandomCutout": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomFlip": {},
    "RandomGaussianBlur": {"kernel_size": 5, "factor": (0.2, 2.0)},
    "RandomHue": {"factor": 0.5},
    "RandomJpegQuality": {"factor": (5, 95)},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": (0.1, 0.9)},
    "RandomSharpness": {"factor": 0.9},
    "RandomShear": {"x_factor": 0.5, "y_factor": 0.5},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": (-0.5, 0.5)},
}
FIXED = {
    "AutoContrast": {},
    "Equalization": {},
    "Grayscale": {"output_channels": 3},
    "Posterization": {"bits": 3},
    "Rescaling": {"scale": 0.5},
    "Resizing": {"height": SIDE, "width": SIDE},
    "Solarization": {"threshold_factor": 0.5},
}
NO_SIZE = {"RandomAspectRatio", "RandomCrop"}
"""They make images of other sizes, or cut from larger ones."""


@pytest.fixture(scope="module")
def image():
    rows = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype("float32")
    return np.round(tf.image.resize(rows, (SIDE, SIDE)).numpy()).astype("uint8")


def augmented(image, layers, seeds=(1,), count=8):
    """One image as the samples `0 ... count - 1` of a run of each seed."""
    pairs = np.array([(seed, number) for seed in seeds for number in range(count)])
    dataset = tf.data.Dataset.from_tensor_slices(pairs).map(
        lambda pair: keras_cv_layers.augment_with_layers(tf.constant(image), layers, pair)
    )
    return np.stack(list(dataset.as_numpy_iterator())).reshape(len(seeds), count, *image.shape)


def test_every_layer_is_known_to_these_tests():
    names = {
        n for n in dir(keras_cv.layers) if keras_cv_layers._augments(getattr(keras_cv.layers, n))
    }
    others = {*keras_cv_layers.BATCH_LAYERS, *keras_cv_layers.STATEFUL, *keras_cv_layers.INSTEAD}
    assert names == {*ARGUMENTS, *FIXED, *others, *NO_SIZE}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_random_layers_depend_on_the_seed_alone(name, image):
    layers = ((name, ARGUMENTS[name]),)
    first, again, other = augmented(image, layers, (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(np.unique(first.reshape(len(first), -1), axis=0)) > 1
    distance = np.abs(first.astype("float32") - image).mean()
    assert 0.1 < distance < 120  # a wrong range of values turns images white or black


@pytest.mark.parametrize("name", FIXED)
def test_layers_do_what_they_do_elsewhere(name, image):
    cls, arguments = getattr(keras_cv.layers, name), dict(FIXED[name])
    if name in ("AutoContrast", "Equalization", "Posterization", "Solarization"):
        arguments["value_range"] = (0, 255)
    with tf.device("CPU"):
        expected = np.asarray(cls(**arguments, dtype="float32")(tf.constant(image, tf.float32)))
    ours = augmented(image, ((name, FIXED[name]),), count=1)[0, 0]
    np.testing.assert_array_equal(ours, np.round(np.clip(expected, 0, 255)))
    assert name == "Resizing" or not np.array_equal(ours, image)


def test_random_images_are_as_many_and_as_strong_as_elsewhere(image):
    """The share of flipped images, and the mean and spread of a random brightness."""
    flipped = augmented(image, (("RandomFlip", {"mode": "horizontal"}),), (3,), 400)[0]
    share = np.mean([np.array_equal(x, image[:, ::-1]) for x in flipped])
    assert abs(share - 0.5) < 0.08
    gray = np.full_like(image, 128)
    bright = augmented(gray, (("RandomBrightness", {"factor": 0.2}),), (3,), 400)[0, :, 0, 0, 0]
    assert abs(bright.mean() - 128) < 5  # uniform in +-51
    assert abs(bright.std() - 51 / np.sqrt(3)) < 3


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_mixed_images_have_their_shares_in_the_targets(name):
    images = np.random.default_rng(0).uniform(0, 255, (6, SIDE, SIDE, 3)).astype("float32")
    mix = tf.function(keras_cv_layers.mix_with_layers)
    seed = tf.constant([1, 2], tf.int64)
    mixed, targets = (x.numpy() for x in mix(images, np.eye(6, dtype="f"), ((name, {}),), seed))
    np.testing.assert_allclose(targets.sum(1), 1, atol=1e-5)
    assert (targets > 0.02).sum(1).max() == 2
    for number, (picture, target) in enumerate(zip(mixed, targets, strict=True)):
        if name == "MixUp":
            np.testing.assert_allclose(picture, np.tensordot(target, images, 1), atol=1e-2)
        else:
            own = (picture == images[number]).all(-1)
            # keras-cv counts the part of a box that is beyond the edge, too.
            assert own.mean() > target[number] - 1e-5
            partner = np.argmax(target - np.eye(6)[number] * 2)
            assert own.all() or (picture == images[partner]).all(-1)[~own].all()
    again, other = (
        mix(images, np.eye(6, dtype="f"), ((name, {}),), s)[0] for s in (seed, seed + 1)
    )
    np.testing.assert_array_equal(again, mixed)
    assert not np.array_equal(other, mixed)


def test_draws_of_one_seed_differ_from_each_other():
    def draws(seed):
        with keras_cv_layers.seeded(tf.constant([seed, 2], tf.int64)):
            generator = tf.random.get_global_generator()
            pieces = [tf.random.uniform([4]), tf.random.uniform([4]), generator.uniform([4])]
            return np.concatenate([*pieces, tf.random.normal([4]), tf.random.gamma([4], 0.5)])

    first = draws(1)
    assert len(np.unique(first)) == len(first) == 20
    np.testing.assert_array_equal(draws(1), first)
    assert not np.isin(draws(2), first).any()


def test_two_layers_of_one_kind_draw_by_themselves(image):
    gray = np.full_like(image, 128)
    bright = ("RandomBrightness", {"factor": 0.2})
    once, twice = augmented(gray, (bright,)), augmented(gray, (bright, bright))
    steps = [x[0, :, 0, 0, 0].astype(int) - 128 for x in (once, twice)]
    assert np.abs(steps[1] - 2 * steps[0]).max() > 5


def test_layers_follow_our_own_operations(image):
    seed = tf.constant([1, 2], tf.int64)
    flip = Augment(flip=True, keras_cv=["Posterization", {"bits": 2}])
    ours = augment_image(tf.constant(image), CONFIG, Augment(flip=True), seed)
    both = augment_image(tf.constant(image), CONFIG, flip, seed)
    expected = keras_cv_layers.augment_with_layers(ours, (("Posterization", {"bits": 2}),), seed)
    np.testing.assert_array_equal(both, expected)
    assert not np.array_equal(both, ours)


def test_batches_resume_bit_for_bit(image):
    split = IndexedSplit(np.stack([image] * 9), np.arange(9) % 3)
    source = Source("made up", None, 3, (SIDE, SIDE, 3), split, split)
    layers = (["RandomHue", {"factor": 0.5}], ["CutMix", {}])

    def run(layers, count, **arguments):
        augment = Augment(keras_cv=layers)
        batches = batching.train_batches(source, CONFIG, augment, 4, 7, **arguments)
        return list(batches.take(count).as_numpy_iterator())

    whole, late = run(layers, 5), run(layers, 2, start_step=3)
    for (x, y), (u, v) in zip(whole[3:], late, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)
    assert not np.array_equal(whole[0][0], run(layers[:1], 1)[0][0])
    only_mixed = run(layers[1:], 1)[0]  # whole batches are gathered, then mixed
    np.testing.assert_array_equal(only_mixed[1], whole[0][1])


def test_tensorflow_is_left_as_it_was(image):
    before = [getattr(tf.random, name) for name in keras_cv_layers.REPLACED]
    augmented(image, (("RandomHue", {"factor": 0.5}),), count=1)
    with pytest.raises(ValueError, match="factor"):
        augmented(image, (("RandomHue", {"factor": "red"}),), count=1)
    assert before == [getattr(tf.random, name) for name in keras_cv_layers.REPLACED]


@pytest.mark.parametrize("name", keras_cv_layers.STATEFUL)
def test_layers_that_keep_a_state_say_so(name, image, caplog):
    seed = tf.constant([1, 2], tf.int64)
    with caplog.at_level(logging.WARNING):
        if name in keras_cv_layers.BATCH_LAYERS:
            images = np.stack([image] * 4)
            mix = tf.function(keras_cv_layers.mix_with_layers)
            mix(images, np.eye(4, dtype="float32"), ((name, {}),), seed)
        else:
            augmented(image, ((name, {}),), count=1)
    assert f"{name} draws random numbers of its own" in caplog.text


def test_other_layers_may_follow_one_with_a_state(image):
    layers = (("AugMix", {}), ("RandomHue", {"factor": 0.5}))
    assert augmented(image, layers, count=1).shape == (1, 1, SIDE, SIDE, 3)


class Stateful(keras_cv.layers.BaseImageAugmentationLayer):
    def augment_image(self, image, transformation, **kwargs):
        return image + tf.raw_ops.RandomUniform(shape=tf.shape(image), dtype=tf.float32)


class Loops(keras_cv.layers.BaseImageAugmentationLayer):
    def augment_image(self, image, transformation, **kwargs):
        return tf.map_fn(lambda row: row + tf.random.uniform(()), image)


@pytest.mark.parametrize(
    ("cls", "words"),
    [(Stateful, "Bad, which runs RandomUniform"), (Loops, "random numbers in a loop")],
)
def test_randomness_without_a_seed_is_refused(cls, words, image, monkeypatch):
    monkeypatch.setattr(keras_cv.layers, "Bad", cls, raising=False)
    with pytest.raises(ValueError, match=words):
        augmented(image, (("Bad", {}),), count=1)
    # With one, no tf.distribute.Strategy can be entered any more.
    assert tf.compat.v1.get_variable_scope().caching_device is None


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([["RandAugmnt", {}]], "near: RandAugment"),
        ([["Conv2D", {}]], "must name augmentation layers"),
        ([["RandomHue", {"strength": 1}]], "RandomHue cannot be made of"),
        ([["RandomApply", {}]], "RandomAugmentationPipeline with `rate` instead of RandomApply"),
        ([["Grayscale", {"output_channels": 1}]], "keep the size and the channels of images"),
        ([["Resizing", {"height": 8, "width": 8}]], "keep the size and the channels of images"),
        ([["MixUp", {}], ["RandomHue", {"factor": 0.5}]], "must have layers for a batch"),
    ],
)
def test_bad_layers_are_refused(layers, words, image):
    with pytest.raises(ValueError, match=words):
        augment = Augment(keras_cv=layers)
        augment_image(tf.constant(image), CONFIG, augment, tf.constant([1, 2], tf.int64))


@pytest.mark.parametrize("layers", ["RandomHue", [["RandomHue"]], [["RandomHue", 0.5]], [3]])
def test_layers_must_be_pairs(layers):
    with pytest.raises(ValueError, match="augment.keras_cv must be pairs"):
        Augment(keras_cv=layers)


def test_one_pair_is_enough():
    pair = ["RandomHue", {"factor": 0.5}]
    assert Augment(keras_cv=pair) == Augment(keras_cv=[pair])

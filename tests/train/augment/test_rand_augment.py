"""RandAugment: every operation compared with PIL's, and which operations are drawn."""

import collections

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit.train.augment import rand_augment

pytestmark = pytest.mark.backend_free
HEIGHT, WIDTH = 37, 29
M = 7  # the magnitude
EXACT = (0, 0.0)  # largest difference of a value, share of values that differ
CUT = (1, 0.02)  # where PIL's float64 falls just below a whole number
ROUNDED = (1, 0.5)  # the gray or smoothed image is not rounded before it is mixed in


def _image(channels=3, height=HEIGHT, width=WIDTH):
    """Waves with noise, away from 0 and 255, so that each operation changes something."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 5 + c) + np.cos(y / (4 + c)) for c in range(channels)], -1)
    return np.clip(120 + 45 * waves + rng.normal(0, 8, waves.shape), 9, 236).astype("uint8")


def _pil(array):
    return PIL.Image.fromarray(array if array.shape[-1] == 3 else array[..., 0])


def _affine(image, *matrix):
    gray = (128,) * len(image.getbands())
    return image.transform(
        image.size, PIL.Image.Transform.AFFINE, matrix, fillcolor=gray if len(gray) > 1 else 128
    )


def _solarize_add(image):
    return image.point(
        [min(255, i + 77) if i < 128 else i for i in range(256)] * len(image.getbands())
    )


ENHANCE = 1.8 * 0.7 + 0.1
# With a sign of 0 (plus) and, where it counts, of 1 (minus).
REFERENCE = {
    "AutoContrast": (PIL.ImageOps.autocontrast, CUT),
    "Equalize": (PIL.ImageOps.equalize, EXACT),
    "Invert": (PIL.ImageOps.invert, EXACT),
    "Posterize": (lambda i: PIL.ImageOps.posterize(i, 2), EXACT),
    "Solarize": (lambda i: PIL.ImageOps.solarize(i, 179), EXACT),
    "SolarizeAdd": (_solarize_add, EXACT),
    "Color": (lambda i: PIL.ImageEnhance.Color(i).enhance(ENHANCE), ROUNDED),
    "Contrast": (lambda i: PIL.ImageEnhance.Contrast(i).enhance(ENHANCE), EXACT),
    "Brightness": (lambda i: PIL.ImageEnhance.Brightness(i).enhance(ENHANCE), EXACT),
    "Sharpness": (lambda i: PIL.ImageEnhance.Sharpness(i).enhance(ENHANCE), ROUNDED),
    "Rotate": (lambda i: i.rotate(21, fillcolor="#808080"), EXACT),
    "ShearX": (lambda i: _affine(i, 1, 0.21, 0, 0, 1, 0), EXACT),
    "ShearY": (lambda i: _affine(i, 1, 0, 0, 0.21, 1, 0), EXACT),
    "TranslateX": (lambda i: _affine(i, 1, 0, 0.315 * WIDTH, 0, 1, 0), EXACT),
    "TranslateY": (lambda i: _affine(i, 1, 0, 0, 0, 1, 0.315 * HEIGHT), EXACT),
}
NEGATIVE = {
    "Rotate": lambda i: i.rotate(-21, fillcolor="#808080"),
    "ShearX": lambda i: _affine(i, 1, -0.21, 0, 0, 1, 0),
    "ShearY": lambda i: _affine(i, 1, 0, 0, -0.21, 1, 0),
    "TranslateX": lambda i: _affine(i, 1, 0, -0.315 * WIDTH, 0, 1, 0),
    "TranslateY": lambda i: _affine(i, 1, 0, 0, 0, 1, -0.315 * HEIGHT),
}


def _apply(name, array, sign=0, magnitude=M):
    operation = rand_augment.operations(*array.shape, magnitude)[name]
    return operation(tf.constant(array), sign).numpy()


def _difference(array, image):
    distance = np.abs(array.astype(int) - np.asarray(image).reshape(array.shape))
    return distance.max(), (distance > 0).mean()


def test_there_are_fifteen_operations():
    assert set(rand_augment.operations(8, 8, 3, M)) == set(REFERENCE)


@pytest.mark.parametrize("channels", (3, 1))
@pytest.mark.parametrize("name", REFERENCE)
def test_operation_agrees_with_pil(name, channels):
    array = _image(channels)
    reference, (largest, share) = REFERENCE[name]
    result = _apply(name, array)
    assert result.dtype == "uint8" and result.shape == array.shape
    found = _difference(result, reference(_pil(array)))
    assert found[0] <= largest and found[1] <= share, found
    if (name, channels) != ("Color", 1):  # it has no color to change
        assert _difference(result, array)[1] > 0.1  # the operation does something


@pytest.mark.parametrize("name", NEGATIVE)
def test_operation_with_the_other_sign_agrees_with_pil(name):
    array = _image()
    result = _apply(name, array, sign=1)
    assert _difference(result, NEGATIVE[name](_pil(array))) == EXACT
    assert _difference(result, REFERENCE[name][0](_pil(array)))[1] > 0.3


@pytest.mark.parametrize("magnitude", (0, 10, 17.5, 30))
@pytest.mark.parametrize("name", ("Color", "Contrast", "Brightness", "Sharpness"))
def test_enhancement_agrees_with_pil_at_other_magnitudes(name, magnitude):
    array = _image()
    enhance = getattr(PIL.ImageEnhance, name)(_pil(array)).enhance
    factor = magnitude / 10 * 1.8 + 0.1
    # An unrounded half counts |1 - factor| times, and truncation adds one: 1 up to magnitude 10,
    # 3 at 30.
    bound = 1 + int(abs(1 - factor) / 2)
    result = _apply(name, array, magnitude=magnitude)
    assert _difference(result, enhance(factor))[0] <= bound
    assert _difference(result, enhance(factor + 0.2))[0] > bound


@pytest.mark.parametrize("magnitude", (0, 10, 20))
def test_posterize_and_solarize_at_other_magnitudes(magnitude):
    array, image = _image(), _pil(_image())
    bits, threshold = int(magnitude / 10 * 4), min(256, int(magnitude / 10 * 256))
    # PIL refuses 0 bits; timm, and the TensorFlow code it follows, make the image black.
    kept = PIL.ImageOps.posterize(image, bits) if bits else 0 * array
    assert _difference(_apply("Posterize", array, magnitude=magnitude), kept) == EXACT
    solarized = PIL.ImageOps.solarize(image, threshold)
    assert _difference(_apply("Solarize", array, magnitude=magnitude), solarized) == EXACT


@pytest.mark.parametrize("name", ("AutoContrast", "Equalize"))
def test_flat_channel_stays_unchanged(name):
    array = _image()
    array[..., 1] = 77
    result = _apply(name, array)
    reference, (largest, share) = REFERENCE[name]
    found = _difference(result, reference(_pil(array)))
    assert found[0] <= largest and found[1] <= share
    assert (result[..., 1] == 77).all() and (result[..., 0] != array[..., 0]).any()


def test_gray_agrees_with_pil():
    array = _image()
    result = rand_augment.gray(tf.constant(array)).numpy()
    image = _pil(array).convert("L")
    assert _difference(result, image.convert("RGB")) == EXACT
    assert _difference(result, array)[1] > 0.3


def test_rotation_of_an_image_with_even_sides_agrees_with_pil():
    array = _image(height=30, width=44)
    assert _difference(_apply("Rotate", array), REFERENCE["Rotate"][0](_pil(array))) == EXACT


def test_rand_augment_applies_the_drawn_operations_in_order():
    array = _image()
    names = list(rand_augment.operations(*array.shape, M))
    for first, second, sign in (("Rotate", "Color", 1), ("Invert", "ShearY", 0)):
        draws = [[(names.index(n) + 0.5) / len(names), 0.25 + sign / 2] for n in (first, second)]
        result = rand_augment.rand_augment(tf.constant(array), 2, M, tf.constant(draws))
        expected = _apply(second, _apply(first, array, sign), sign)
        np.testing.assert_array_equal(result, expected)
        other_order = _apply(first, _apply(second, array, sign), sign)
        assert (result != other_order).numpy().any()


def test_rand_augment_draws_each_operation_equally_often():
    array = _image(height=9, width=11)
    made = {_apply(name, array, sign).tobytes(): name for name in REFERENCE for sign in (0, 1)}
    dataset = tf.data.Dataset.range(600).map(
        lambda i: rand_augment.rand_augment(
            tf.constant(array), 1, M, tf.random.stateless_uniform((1, 2), [5, i])
        )
    )
    counts = collections.Counter(made[image.tobytes()] for image in dataset.as_numpy_iterator())
    assert set(counts) == set(REFERENCE)
    assert 20 <= min(counts.values()) and max(counts.values()) <= 65  # 40 and four deviations


def test_rand_augment_with_no_layers_changes_nothing():
    array = _image()
    result = rand_augment.rand_augment(tf.constant(array), 0, M, tf.zeros((0, 2)))
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(
    ("layers", "magnitude", "channels", "name"),
    ((-1, M, 3, "layers"), (2, 31, 3, "magnitude"), (2, -1, 3, "magnitude"), (2, M, 4, "image")),
)
def test_rand_augment_refuses_wrong_arguments(layers, magnitude, channels, name):
    image = tf.zeros((8, 8, channels), tf.uint8)
    with pytest.raises(ValueError, match=rf"{name} must .*Received: "):
        rand_augment.rand_augment(image, layers, magnitude, tf.zeros((2, 2)))

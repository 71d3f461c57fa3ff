"""Augmentation of images: each step follows its definition and depends only on the seed."""

import io

import numpy as np
import PIL.Image
import PIL.ImageFilter
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.preprocessing import preprocess
from keras_vit.train.augment import image as augment
from keras_vit.train.recipe import Augment

pytestmark = pytest.mark.backend_free
CONFIG = ViTConfig(image_size=(24, 16), patch_size=8, width=20, num_heads=5, mlp_dim=28, depth=1)
MEAN_STD = {"pixel_mean": (0.4, 0.5, 0.6), "pixel_std": (0.2, 0.3, 0.4)}
ALL = Augment(
    crop="inception",
    flip=True,
    rand_augment_layers=2,
    three_augment=True,
    color_jitter=0.3,
    erasing=0.5,
    cutout=6,
)


def _config(**fields):
    return ViTConfig.from_dict({**CONFIG.to_dict(), **fields})


def _image(height=24, width=16, channels=3):
    rng = np.random.default_rng(2)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + c) + np.cos(y / (7 + c)) for c in range(channels)], -1)
    return np.clip(125 + 50 * waves + rng.normal(0, 5, waves.shape), 1, 250).astype("uint8")


def _encode(array, kind):
    buffer = io.BytesIO()
    PIL.Image.fromarray(array).save(buffer, kind, quality=95)
    return buffer.getvalue()


def _run(image, settings, config=CONFIG, seeds=20):
    dataset = tf.data.Dataset.range(seeds).map(
        lambda i: augment.augment_image(tf.constant(image), config, settings, tf.stack([7, i]))
    )
    return list(dataset.as_numpy_iterator())


@pytest.mark.parametrize(
    ("kind", "channels", "crop"),
    ((None, 3, "pad"), (None, 1, "inception"), ("JPEG", 3, "inception"), ("PNG", 1, "none")),
)
def test_all_augmentations_are_a_function_of_the_seed(kind, channels, crop):
    config = _config(in_channels=channels)
    settings = Augment(**{**vars(ALL), "crop": crop})
    image = _image(61, 47)
    image = image if kind is None else _encode(image, kind)
    dataset = tf.data.Dataset.from_tensor_slices([0, 1, 2, 0, 1, 2]).map(
        lambda i: augment.augment_image(tf.constant(image), config, settings, tf.stack([7, i]))
    )
    made = list(dataset.as_numpy_iterator())
    assert all(a.shape == (24, 16, channels) and a.dtype == np.uint8 for a in made)
    np.testing.assert_array_equal(made[:3], made[3:])
    assert len({a.tobytes() for a in made}) == 3


def test_crop_none_equals_preprocessing_for_evaluation():
    for fields in ({}, {"crop_fraction": 0.875}, {"resize_method": "bicubic"}):
        config = _config(pixel_mean=0.0, pixel_std=1 / 255, **fields)
        image = _image(61, 47)
        (result,) = _run(image, Augment(), config, seeds=1)
        expected = preprocess(image, config)[0]
        assert np.abs(result - expected).max() <= 1.01
        assert np.abs(result[:, ::-1] - expected).max() > 10
    (same,) = _run(_image(), Augment(), seeds=1)
    np.testing.assert_array_equal(same, _image())


def test_crop_pad_draws_every_window_of_the_padded_image():
    image = _image()
    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)])
    windows = {padded[y : y + 24, x : x + 16].tobytes() for y in range(5) for x in range(5)}
    found = {a.tobytes() for a in _run(image, Augment(crop="pad", crop_padding=2), seeds=300)}
    assert found == windows and len(windows) == 25


def test_flip_mirrors_half_of_the_images():
    image = _image()
    results = _run(image, Augment(flip=True), seeds=200)
    mirrored = [np.array_equal(a, image[:, ::-1]) for a in results]
    assert all(m or np.array_equal(a, image) for m, a in zip(mirrored, results, strict=True))
    assert 70 <= sum(mirrored) <= 130


def test_inception_windows_have_the_requested_areas_and_ratios():
    draws = tf.random.stateless_uniform([200, 22], [1, 2])
    for shape in ((300, 400), (90, 50)):
        boxes = []
        for draw in draws:
            (top, left, _), (height, width, _) = (
                v.numpy() for v in augment._window(shape, (0.2, 0.6), draw)
            )
            assert 0 <= top <= shape[0] - height and 0 <= left <= shape[1] - width
            boxes.append((height * width / (shape[0] * shape[1]), width / height, top))
        areas, ratios, tops = np.array(boxes).T
        assert 0.18 < areas.min() < 0.25 and 0.55 < areas.max() < 0.62
        assert 0.73 < ratios.min() < 0.79 and 1.25 < ratios.max() < 1.37
        assert len(set(tops)) > 20


def test_inception_falls_back_to_the_center():
    draws = tf.random.stateless_uniform([22], [1, 2])
    begin, size = augment._window((10, 400), (0.9, 1.0), draws)  # no ratio fits
    assert size.numpy().tolist() == [10, 13, -1] and begin.numpy().tolist() == [0, 194, 0]


@pytest.mark.parametrize("factor", (1, 2, 4))
def test_inception_crop_of_a_jpeg_agrees_with_its_pixels(factor):
    # At these sizes the JPEG is decoded at a half, a quarter and an eighth. The box is the whole
    # image and starts at a multiple of all of them, so only the decoding differs.
    encoded = _encode(_image(80, 64).repeat(factor, 0).repeat(factor, 1), "JPEG")
    pixels = tf.io.decode_jpeg(encoded, 3).numpy()
    settings = Augment(crop="inception", crop_area=(1.0, 1.0))
    result, expected, other = (
        _run(image, settings, seeds=1)[0].astype(float) for image in (encoded, pixels, pixels[::-1])
    )
    assert np.abs(result - expected).mean() < 2
    assert np.abs(result - other).mean() > 15


def test_inception_crop_of_a_small_jpeg_agrees_with_its_pixels():
    encoded = _encode(_image(40, 30), "JPEG")  # less than twice the model's size
    pixels = tf.io.decode_jpeg(encoded, 3).numpy()
    settings = Augment(crop="inception", crop_area=(0.3, 1.0))
    results, expected, other = (
        np.array(_run(i, settings), int) for i in (encoded, pixels, pixels[::-1])
    )
    # At the sides of a box the decoder has no neighbor to smooth colors with.
    np.testing.assert_array_equal(results[:, :, 2:-2], expected[:, :, 2:-2])
    assert np.abs(results - expected).max() <= 8
    assert np.abs(results - other).max() > 50


@pytest.mark.parametrize("crop", ("none", "pad", "inception"))
@pytest.mark.parametrize("how", (3, 6))
def test_every_crop_turns_a_photograph_as_its_camera_was_held(crop, how):
    picture = np.zeros((160, 240, 3), "uint8")
    picture[:80] += 100
    picture[:, :120] += 100  # four quarters of four grays
    exif = PIL.Image.Exif()
    exif[0x0112] = how
    buffer = io.BytesIO()
    PIL.Image.fromarray(picture).save(buffer, "JPEG", quality=95, exif=exif)
    upright = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(buffer.getvalue())))
    # At this size an inception crop is decoded at an eighth.
    config = _config(image_size=(16, 24) if how == 3 else (24, 16), crop_fraction=None)
    settings = Augment(crop=crop, crop_padding=0, crop_area=(1.0, 1.0))

    def quarters(image):
        height, width = np.array(image).shape[0] // 4, np.array(image).shape[1] // 4
        return np.array(image)[height :: 2 * height, width :: 2 * width, 0].astype(int)

    (result,) = _run(buffer.getvalue(), settings, config, seeds=1)
    assert np.abs(quarters(result) - quarters(upright)).max() < 3
    assert np.abs(quarters(result) - quarters(picture)[: len(quarters(result))]).max() > 50


@pytest.mark.parametrize(("size", "bound"), (((15, 11), 0.3), ((30, 20), 2), ((90, 70), 2)))
def test_resize_is_close_to_pils_antialiased_bilinear(size, bound):
    image = _image(*size)
    result = augment._resize(tf.constant(image), CONFIG).numpy().astype(float)
    expected = np.asarray(PIL.Image.fromarray(image).resize((16, 24), PIL.Image.BILINEAR), float)
    assert np.abs(result - expected).mean() < bound
    assert np.abs(result[::-1] - expected).mean() > 5 * bound


def test_blur_is_close_to_pils():
    image = _image(40, 30)
    for sigma in (0.5, 1.2, 2.0):
        blurred, half = (
            np.array(PIL.Image.fromarray(image).filter(PIL.ImageFilter.GaussianBlur(s)), float)
            for s in (sigma, sigma / 2)
        )
        result = augment.blur(tf.constant(image), sigma).numpy()
        assert np.abs(result - blurred).mean() < 1
        assert np.abs(result - half).mean() > np.abs(result - blurred).mean()


def test_three_augment_draws_each_operation():
    image = _image()
    gray = solarized = 0
    results = _run(image, Augment(three_augment=True), seeds=90)
    for a in results:
        gray += (a == a[..., :1]).all()
        solarized += np.array_equal(a, np.where(image < 128, image, 255 - image))
    assert 15 <= gray <= 45 and 15 <= solarized <= 45 and 15 <= 90 - gray - solarized <= 45


def test_erasing_fills_one_box_with_noise_around_the_models_mean():
    config = _config(image_size=(48, 40), **MEAN_STD)
    image = np.full((48, 40, 3), 255, "uint8")
    image[::2] = 0
    results = _run(image, Augment(erasing=0.5), config, seeds=200)
    changed = [(a != image).any(-1) for a in results]
    boxes = [c for c in changed if c.any()]
    assert 70 <= len(boxes) <= 130
    shares, noise = [], []
    for a, c in zip(results, changed, strict=True):
        if c.any():
            rows, columns = np.where(c.any(1))[0], np.where(c.any(0))[0]
            box = a[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            shares.append(box.shape[0] * box.shape[1] / c.size)
            noise.append(box.reshape(-1, 3))
    assert min(shares) < 0.06 and 0.28 < max(shares) <= 0.36
    noise = np.concatenate(noise) / 255
    np.testing.assert_allclose(noise.mean(0)[:2], MEAN_STD["pixel_mean"][:2], atol=0.02)
    assert noise.std(0)[0] < noise.std(0)[1]


def test_cutout_is_a_gray_square():
    image = np.full((24, 16, 3), 7, "uint8")
    sizes = set()
    for a in _run(image, Augment(cutout=6), seeds=60):
        gray = (a == 128).all(-1)
        assert ((a == 7).all(-1) | gray).all()
        height, width = gray.any(1).sum(), gray.any(0).sum()
        assert gray.sum() == height * width
        sizes.add((height, width))
    assert (6, 6) in sizes and all(3 <= min(s) and max(s) <= 6 for s in sizes)


def test_normalize_follows_the_pixel_contract():
    config = _config(**MEAN_STD)
    batch = np.stack([_image(), 255 - _image()])
    expected = preprocess(batch, config)
    np.testing.assert_allclose(
        augment.normalize_batch(tf.constant(batch), config), expected, atol=1e-6
    )
    one = augment.normalize_batch(tf.constant(batch[0]), config)
    np.testing.assert_allclose(one, expected[0], atol=1e-6)
    assert np.abs(augment.normalize_batch(tf.constant(batch), CONFIG) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("image", "fields", "settings", "match"),
    (
        (np.zeros((24, 16, 3), "float32"), {}, Augment(), "image must be"),
        (np.zeros((24, 16, 4), "uint8"), {}, Augment(), "which have 4 channels"),
        (np.zeros((24, 16, 4), "uint8"), {"in_channels": 4}, ALL, "in_channels must"),
        (b"", {"in_channels": 4}, Augment(), "in_channels must"),
    ),
)
def test_augment_image_refuses_wrong_arguments(image, fields, settings, match):
    with pytest.raises(ValueError, match=rf"{match}.*Received: "):
        augment.augment_image(tf.constant(image), _config(**fields), settings, [0, 0])


def test_four_channels_are_cropped_and_flipped():
    image = _image(channels=4)
    results = _run(image, Augment(crop="pad", flip=True, cutout=4), _config(in_channels=4), seeds=2)
    assert results[0].shape == (24, 16, 4)

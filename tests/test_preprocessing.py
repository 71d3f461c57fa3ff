"""The pixel contract: `preprocess` compared with timm's transforms and with our own layer."""

import warnings

import keras
import numpy as np
import pytest
from conformance import TINY, to_numpy
from PIL import Image

from keras_vit import preprocessing
from keras_vit.preprocessing import preprocess

CONFIG = TINY.replace(image_size=(32, 32), patch_size=8)


def photo(height=61, width=90, channels=3, seed=0):
    """A smooth image with an edge, for which resizing methods differ."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (6, 9, channels)).astype("uint8")
    planes = [
        np.asarray(
            Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC)
        )
        for c in range(channels)
    ]
    image = np.stack(planes, -1)
    image[height // 2 :, : width // 3] //= 2
    return image


@pytest.mark.backend_free
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [None, 0.875, 1.0])
@pytest.mark.parametrize("shape", [(61, 90), (90, 61), (32, 32), (20, 25)])
def test_preprocess_equals_timm(method, crop, shape, torchvision):
    timm_data = pytest.importorskip("timm.data")
    config = CONFIG.replace(
        resize_method=method,
        crop_fraction=crop,
        pixel_mean=(0.485, 0.456, 0.406),
        pixel_std=(0.229, 0.224, 0.225),
    )
    image = Image.fromarray(photo(*shape))
    transform = timm_data.create_transform(
        (3, 32, 32),
        interpolation=method,
        mean=config.pixel_mean,
        std=config.pixel_std,
        crop_pct=crop or 1.0,
        crop_mode="squash" if crop is None else "center",
    )
    expected = transform(image).numpy().transpose(1, 2, 0)
    ours = preprocess(image, config)
    assert ours.shape == (1, 32, 32, 3) and ours.dtype == "float32"
    np.testing.assert_allclose(ours[0], expected, atol=1e-5)
    other = preprocess(image, config.replace(pixel_mean=0.5))
    assert np.abs(other[0] - expected).max() > 1e-2


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("size", "covered"), [(192, 225), (48, 59), (64, 93), (144, 224), (224, 256), (384, 438)]
)
def test_crop_fraction_from_two_sizes_gives_the_larger_one_again(size, covered):
    """192 / (192 / 225) is 224.99999999999997, and so for 48, 64 and 144; not for the last two."""
    config = CONFIG.replace(image_size=size, patch_size=1, crop_fraction=size / covered)
    assert preprocessing.covering(400, 400, config) == (covered, covered)
    assert preprocessing.covering(300, 400, config)[0] == covered


@pytest.mark.backend_free
def test_crop_fractions_of_timm_give_timms_size(torchvision):
    import math

    pytest.importorskip("timm")
    from timm.models._registry import _model_pretrained_cfgs

    pairs = {
        (cfg.input_size[1], cfg.crop_pct)
        for cfg in _model_pretrained_cfgs.values()
        if cfg.crop_pct <= 1
    }
    assert len(pairs) > 50
    for size, fraction in pairs:
        config = CONFIG.replace(image_size=size, patch_size=1, crop_fraction=fraction)
        assert preprocessing.covering(size, size, config)[0] == math.floor(size / fraction)


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [None, 0.875, 1.0])
@pytest.mark.parametrize("shape", [(61, 90), (90, 61), (64, 48)])
def test_layer_is_close_to_preprocess(method, crop, shape):
    config = CONFIG.replace(resize_method=method, crop_fraction=crop)
    image = photo(*shape)
    outside = preprocess(image, config)[0] * 127.5  # in pixel levels
    inside = to_numpy(preprocessing.Preprocessing(config)(image[None].astype("float32")))[0] * 127.5
    assert inside.shape == outside.shape
    difference = np.abs(inside - outside)
    assert difference.max() < 1.01 and difference.mean() < 0.3
    shifted = np.roll(outside, 1, axis=0)
    assert np.abs(inside - shifted).mean() > 1


def test_layer_runs_in_tf_data_on_images_of_any_size():
    tf = pytest.importorskip("tensorflow")
    layer = preprocessing.Preprocessing(CONFIG.replace(crop_fraction=0.9))
    photos = [photo(40, 61), photo(70, 35)]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(photos), output_signature=tf.TensorSpec((None, None, 3), tf.uint8)
    )
    batch = next(iter(dataset.map(layer).batch(2)))
    assert batch.shape == (2, 32, 32, 3)
    for got, image in zip(batch.numpy(), photos, strict=True):
        expected = to_numpy(layer(image[None].astype("float32")))[0]
        # Backends sum in another order, which may round a value differently.
        assert np.abs(got - expected).max() < 1.01 / 127.5
        assert np.abs(got - expected).mean() < 1e-4


def test_layer_is_saved_in_front_of_a_model(tmp_path):
    images = keras.Input((40, 60, 3))
    config = CONFIG.replace(crop_fraction=0.8)
    model = keras.Model(images, preprocessing.Preprocessing(config)(images))
    x = photo(40, 60)[None].astype("float32")
    y = model.predict(x, verbose=0)
    model.save(tmp_path / "p.keras")
    again = keras.saving.load_model(tmp_path / "p.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), y)
    assert -1 <= y.min() < y.max() <= 1


@pytest.mark.backend_free
def test_preprocess_accepts_pil_images_arrays_and_sequences():
    array = photo()
    image = Image.fromarray(array)
    expected = preprocess(array, CONFIG)
    for same in (image, [image], (array,), array[None], array.astype("int32")):
        assert preprocess(same, CONFIG).shape == expected.shape
    np.testing.assert_array_equal(preprocess(image, CONFIG), expected)
    both = preprocess([image, Image.fromarray(photo(33, 47, seed=1))], CONFIG)
    np.testing.assert_array_equal(both[:1], expected)
    assert both.shape == (2, 32, 32, 3)
    np.testing.assert_allclose(
        preprocess(array.astype("float32"), CONFIG), expected, atol=1 / 127
    )  # floats are not rounded to whole pixels


@pytest.mark.backend_free
def test_preprocess_matches_channels():
    gray, color = photo(channels=1), photo()
    one = CONFIG.replace(in_channels=1)
    assert preprocess(Image.fromarray(color), one).shape == (1, 32, 32, 1)
    assert preprocess(gray[..., 0], one).shape == (1, 32, 32, 1)
    repeated = preprocess(gray, CONFIG)
    np.testing.assert_array_equal(repeated[..., 0], repeated[..., 2])
    ten = CONFIG.replace(in_channels=10)
    stack = np.concatenate([photo(channels=1, seed=i) for i in range(10)], -1)
    result = preprocess(stack, ten)
    np.testing.assert_allclose(result[..., 3:4], preprocess(stack[..., 3:4], one), atol=1 / 127)


@pytest.mark.backend_free
def test_preprocess_same_size_only_scales():
    x = np.array([0, 51, 255], "uint8") * np.ones((32, 32, 1), "uint8")
    y = preprocess(x, CONFIG)
    np.testing.assert_allclose(y[0, 5, 5], [-1.0, -0.6, 1.0], atol=1e-6)


@pytest.mark.backend_free
def test_preprocess_reports_a_wrong_range():
    pixels = photo(32, 32).astype("float32")
    with pytest.raises(ValueError, match=r"\[-1, 1\]. Received: values in .*Leave rescale=True"):
        preprocess(pixels, CONFIG, rescale=False)
    with pytest.warns(UserWarning, match=r"\[-1, 1\]. Received: values in .*Leave rescale=True"):
        preprocess(pixels - 128, CONFIG, rescale=False)
    with pytest.warns(UserWarning, match="seem to be scaled already"):
        preprocess(pixels / 255, CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preprocess(pixels, CONFIG)
        preprocess(np.full_like(pixels, 1.5), CONFIG)  # dark, but no share of 255
        ready = preprocess(pixels / 127.5 - 1, CONFIG, rescale=False)
    np.testing.assert_allclose(ready, preprocess(pixels, CONFIG), atol=1e-6)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "images must hold at least one image"),
        (np.zeros(3), "images must be .H, W., .H, W, C. or .B, H, W, C."),
        (np.zeros((4, 4, 2)), "images must have in_channels=3"),
        ([np.zeros((4, 4, 3, 1))], "images must be .H, W, C."),
        (np.zeros((0, 4, 3)), "images must be .H, W, C."),
        (np.full((4, 4, 3), 300.0), "images must have pixels from 0 to 255"),
        (np.full((4, 4, 3), -1.0), "images must have pixels from 0 to 255"),
        (np.full((4, 4, 3), np.nan), "images must hold finite"),
        (["cat.jpg"], "images must hold numbers or be PIL images"),
    ],
)
def test_preprocess_refuses_other_than_images(images, message):
    with pytest.raises(ValueError, match=message + ".*Received"):
        preprocess(images, CONFIG)


@pytest.mark.backend_free
def test_preprocess_limits_the_size_that_an_image_is_resized_to(monkeypatch):
    config = CONFIG.replace(crop_fraction=0.5)
    narrow = np.zeros((65500, 1, 3), "uint8")
    size = r"65500 x 1 pixels, which becomes \d+ x \d+: \d+$"
    for images in (narrow, narrow.swapaxes(0, 1), Image.fromarray(narrow)):
        with pytest.raises(ValueError, match="at most 33554432 pixels.*Received: an image of"):
            preprocess(images, config)
    with pytest.raises(ValueError, match=size):
        preprocess(narrow, config)
    assert preprocess(narrow, CONFIG.replace(crop_fraction=None)).shape[0] == 1
    # One that is only made smaller is in memory already, however large.
    monkeypatch.setattr(preprocessing, "MAX_PIXELS", 1000)
    large = np.zeros((200, 300, 3), "uint8")
    assert preprocess(large, config).shape[0] == 1
    with pytest.raises(ValueError, match="at most 1000 pixels"):
        preprocess(large[:1], config)


@pytest.mark.backend_free
def test_preprocess_refuses_a_pil_image_for_many_channels():
    with pytest.raises(ValueError, match="images must be arrays for in_channels=4.*Received"):
        preprocess(Image.fromarray(photo()), CONFIG.replace(in_channels=4))


@pytest.mark.backend_free
@pytest.mark.parametrize("mode", ["I", "F"])
def test_preprocess_refuses_numbers_of_which_white_is_unknown(mode):
    values = np.array([[0, 1000], [30000, 65535]])
    image = Image.fromarray(values.astype("int32" if mode == "I" else "float32"))
    assert image.mode == mode
    with pytest.raises(ValueError, match=f"images must hold pixels of 8 or 16.*mode '{mode}'"):
        preprocess(image, TINY)
    deep = preprocess(Image.fromarray(values.astype("uint16")), CONFIG)  # 65535 is white
    assert deep.max() == 1 and deep.min() == -1 and len(np.unique(deep)) > 4


def test_layer_reads_channels_last_whatever_keras_reads():
    config = CONFIG.replace(pixel_mean=(0.1, 0.5, 0.7), pixel_std=(0.2, 0.3, 0.4))
    images = photo()[None].astype("float32")
    expected = to_numpy(preprocessing.Preprocessing(config)(images))
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        result = to_numpy(preprocessing.Preprocessing(config)(images))
    finally:
        keras.config.set_image_data_format(before)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.backend_free
def test_preprocess_applies_exif_orientation(tmp_path):
    from keras_vit.images import read_image, read_pixels

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype="uint8"))
    tags = Image.Exif()
    tags[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=tags)
    config = TINY.replace(image_size=(16, 24))
    wanted = preprocess(image.transpose(Image.Transpose.ROTATE_270), config)
    with Image.open(tmp_path / "turned.png") as opened:
        np.testing.assert_array_equal(preprocess(opened, config), wanted)
    once = read_image(tmp_path / "turned.png")  # and not twice
    np.testing.assert_array_equal(preprocess(once, config), wanted)
    np.testing.assert_array_equal(
        preprocess(read_pixels(tmp_path / "turned.png", config), config), wanted
    )
    assert not np.array_equal(preprocess(image, config), wanted)

"""Augmentation of one training image: crop, flip, colors, keras-cv's layers, erasing, cutout.

Everything is stateless TensorFlow, made for `tf.data`: what happens to an image is a function of
its seed alone. Images stay uint8, a quarter of the bytes of float32, until `normalize_batch`.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.export.saved_model.orientation import orientation, turned
from keras_vit.preprocessing import KERAS_METHODS, Preprocessing
from keras_vit.train.augment import keras_cv_layers, rand_augment
from keras_vit.train.data.decoding import decode
from keras_vit.train.recipe import Augment

TRIES = 10
"""Draws of a random box until one fits, as in timm and torchvision."""
CROP_DRAWS = 2 * TRIES + 2
"""Random numbers that an inception crop needs."""
RATIO = (3 / 4, 4 / 3)
"""Of the width to the height of an inception crop."""
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


def augment_image(
    image: tf.Tensor, config: ViTConfig, augment: Augment, seed: tf.Tensor
) -> tf.Tensor:
    """Augments one image; only `normalize_batch` is missing for the model.

    Args:
        image: An encoded image (a scalar string), or uint8 (H, W, C).
        config: The model's config; `image_size`, `in_channels` and the pixel fields are used.
        augment: What is done.
        seed: Two integers; all randomness comes from them.

    Returns:
        uint8 (height, width, in_channels).

    Example:

    >>> dataset = dataset.map(lambda image, seed: augment_image(image, config, augment, seed))
    """
    _check(image, config, augment)
    # One draw for all: for small images the number of operations dominates the cost.
    counts = {
        "crop": {"none": 0, "pad": 2, "inception": CROP_DRAWS}[augment.crop],
        "flip": int(augment.flip),
        "rand_augment": 2 * augment.rand_augment_layers,
        "three_augment": 2 * augment.three_augment,
        "color_jitter": 3 * (augment.color_jitter > 0),
        "erasing": (2 * TRIES + 3) * (augment.erasing > 0),
        "cutout": 2 * (augment.cutout > 0),
    }
    draws = dict.fromkeys(counts)
    if total := sum(counts.values()):
        drawn = tf.random.stateless_uniform([total], seed)
        draws = dict(zip(counts, tf.split(drawn, list(counts.values())), strict=True))

    image = _crop(image, config, augment, draws["crop"])  # (height, width, C)
    if augment.flip:
        flipped = tf.stack([False, draws["flip"][0] < 0.5, False])
        image = tf.raw_ops.Reverse(tensor=image, dims=flipped)
    if augment.rand_augment_layers:
        image = rand_augment.rand_augment(
            image,
            augment.rand_augment_layers,
            augment.rand_augment_magnitude,
            tf.reshape(draws["rand_augment"], (-1, 2)),
        )
    if augment.three_augment:
        image = _three_augment(image, draws["three_augment"])
    if augment.color_jitter:
        image = _color_jitter(image, augment.color_jitter, draws["color_jitter"])
    if layers := keras_cv_layers.split_layers(augment)[0]:
        image = keras_cv_layers.augment_with_layers(image, layers, seed)
    if augment.erasing:
        image = _erase(image, config, augment.erasing, draws["erasing"], seed)
    if augment.cutout:
        image = _cut_out(image, augment.cutout, draws["cutout"])
    return tf.ensure_shape(image, (*config.image_size, config.in_channels))


def normalize_batch(images: tf.Tensor, config: ViTConfig) -> tf.Tensor:
    """uint8 (..., W, C) to the model's float32: (pixel / 255 - mean) / std."""
    mean, std = (
        np.broadcast_to(np.asarray(v, "float64"), config.in_channels)
        for v in (config.pixel_mean, config.pixel_std)
    )
    # By whole rows: arithmetic on one value a channel is four times slower.
    width = config.image_size[1]
    scale = np.tile(1 / (255 * std), width).astype("float32")
    offset = np.tile(mean / std, width).astype("float32")
    rows = tf.reshape(images, (-1, width * config.in_channels))
    result = tf.reshape(tf.cast(rows, tf.float32) * scale - offset, tf.shape(images))
    return tf.ensure_shape(result, images.shape)


def _check(image, config, augment):
    if image.dtype not in (tf.string, tf.uint8):
        raise ValueError(
            f"image must be an encoded string or uint8. Received: image of dtype {image.dtype}"
        )
    colors = augment.rand_augment_layers or augment.three_augment or augment.color_jitter
    if config.in_channels not in (1, 3) and (image.dtype == tf.string or colors):
        raise ValueError(
            "in_channels must be 1 or 3 for encoded images, RandAugment, 3-Augment and color "
            f"jitter. Received: in_channels={config.in_channels}"
        )


# -- which part of the image


def _crop(image, config, augment, draws):
    if augment.crop == "inception":
        return inception_crop(image, config, augment.crop_area, draws)
    image = _view(decode(image, config.in_channels), config)
    if augment.crop == "pad":
        padding = augment.crop_padding
        shape = image.shape
        begin = tf.cast(draws * (2 * padding + 1), tf.int32)
        image = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        image = tf.slice(image, tf.concat([begin, [0]], 0), shape)
    return image


def _view(image, config):
    """The view of the evaluation, as uint8."""
    if config.crop_fraction is None and tuple(image.shape[:2]) == config.image_size:
        return image
    pixels = dataclasses.replace(config, pixel_mean=0.0, pixel_std=1 / 255)  # leaves 0..255
    return tf.cast(tf.round(Preprocessing(pixels, dtype="float32")(image)), tf.uint8)


def inception_crop(image, config, area, draws):
    """A random part of the image, in the random size and shape of torchvision and timm.

    Args:
        image: An encoded image, or uint8 (H, W, C).
        config: Its `image_size` is that of the result.
        area: The least and the largest share of the image.
        draws: `CROP_DRAWS` numbers, uniform in [0, 1).
    """

    def pixels():
        picture = decode(image, config.in_channels)
        return tf.slice(picture, *_window(tf.shape(picture), area, draws))

    def jpeg():
        # The box is one of the stored pixels: areas and ratios are as random when it is turned.
        begin, size = _window(tf.image.extract_jpeg_shape(image), area, draws)
        how = orientation(image)
        sides = tf.constant(config.image_size)
        sides = tf.where(how >= 5, sides[::-1], sides)  # those turn height into width

        def decode_at(ratio):
            box = tf.concat([begin[:2] // ratio, size[:2] // ratio], 0)
            return tf.image.decode_and_crop_jpeg(image, box, config.in_channels, ratio)

        # JPEG can be decoded at a half, a quarter or an eighth in a fraction of the time. The box
        # then moves by less than one of the larger pixels.
        surplus = tf.reduce_min(size[:2] // sides)
        step = tf.reduce_sum(tf.cast(surplus >= tf.constant([2, 4, 8]), tf.int32))
        part = tf.switch_case(step, [lambda r=r: decode_at(r) for r in (1, 2, 4, 8)])
        return turned(part, how)

    encoded = image.dtype == tf.string
    part = tf.cond(tf.io.is_jpeg(image), jpeg, pixels) if encoded else pixels()
    part.set_shape((None, None, config.in_channels))
    return _resize(part, config)


def _window(shape, area, draws):
    """Begin and size of a random box; the center if no draw fits into the image."""
    height, width = tf.unstack(tf.cast(shape[:2], tf.float32))
    widths, heights = _boxes(height * width, area, RATIO, draws)
    # The last one is the largest part of the center with an allowed ratio.
    ratio = tf.clip_by_value(width / height, *RATIO)
    size = tf.stack(
        [
            tf.concat([heights, [tf.minimum(height, tf.round(width / ratio))]], 0),
            tf.concat([widths, [tf.minimum(width, tf.round(height * ratio))]], 0),
        ],
        axis=1,
    )  # (TRIES + 1, 2)
    space = tf.stack([height, width]) - size
    fits = tf.reduce_all((space >= 0) & (size >= 1), axis=1)
    first = tf.argmax(tf.concat([fits[:TRIES], [True]], 0), output_type=tf.int32)
    share = tf.where(first < TRIES, draws[2 * TRIES :], 0.5)
    begin = tf.minimum(tf.floor(share * (space[first] + 1)), space[first])
    begin, size = tf.cast(begin, tf.int32), tf.cast(size[first], tf.int32)
    return tf.concat([begin, [0]], 0), tf.concat([size, [-1]], 0)


def _boxes(whole, area, ratio, draws):
    """Widths and heights of TRIES boxes: areas uniform, ratios log-uniform."""
    areas = whole * (area[0] + (area[1] - area[0]) * draws[:TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    roots = tf.exp((low + (high - low) * draws[TRIES : 2 * TRIES]) / 2)
    sides = tf.sqrt(areas)
    return tf.round(sides * roots), tf.round(sides / roots)


def _resize(image, config):
    """To the model's size, in uint8."""
    size = config.image_size
    if config.resize_method == "bilinear":
        # Deviation: TensorFlow's antialiased bilinear takes five times as long. Area means
        # are as free of aliasing, and when enlarging both are the same.
        shrinks = tf.reduce_all(tf.shape(image)[:2] >= size)
        image = tf.cond(
            shrinks,
            lambda: tf.raw_ops.ResizeArea(images=image[None], size=size),
            lambda: tf.raw_ops.ResizeBilinear(
                images=image[None], size=size, half_pixel_centers=True
            ),
        )[0]
        return tf.cast(image + 0.5, tf.uint8)
    if config.resize_method == "nearest":
        return tf.image.resize(image, size, "nearest")
    method = KERAS_METHODS.get(config.resize_method, config.resize_method)
    image = tf.image.resize(image, size, method, antialias=True)
    return tf.cast(tf.clip_by_value(image + 0.5, 0, 255), tf.uint8)


# -- what is done to the pixels


def _three_augment(image, draws):
    """DeiT III's (arXiv 2204.07118): one of gray, solarized and blurred."""
    kinds = [
        lambda: rand_augment.gray(image),
        lambda: rand_augment.solarize(image, 128),
        lambda: blur(image, 0.1 + 1.9 * draws[1]),
    ]
    return tf.switch_case(tf.cast(draws[0] * 3, tf.int32), kinds)


def blur(image, sigma):
    """A Gaussian blur of at most two pixels."""
    reach = min(6, *image.shape[:2])  # three times the largest sigma; no image is mirrored twice
    weights = tf.exp(-tf.square(tf.range(-reach, reach + 1, dtype=tf.float32) / sigma) / 2)
    weights = tf.tile((weights / tf.reduce_sum(weights))[:, None], [1, image.shape[-1]])
    values = tf.cast(image, tf.float32)[None]
    # Deviation: the image is mirrored at the border; PIL repeats its outermost pixels.
    values = tf.pad(values, [[0, 0], [reach, reach], [reach, reach], [0, 0]], "SYMMETRIC")
    for kernel in (weights[:, None, :, None], weights[None, :, :, None]):
        values = tf.nn.depthwise_conv2d(values, kernel, [1, 1, 1, 1], "VALID")
    return tf.cast(values[0] + 0.5, tf.uint8)


def _color_jitter(image, strength, draws):
    """Brightness, contrast and saturation, each times a factor around 1."""
    # Deviation: always in this order; torchvision's is random.
    factors = tf.unstack(1 + strength * (2 * draws - 1))
    changes = (rand_augment.brightness, rand_augment.contrast, rand_augment.color)
    for change, factor in zip(changes, factors, strict=True):
        image = change(image, factor)
    return image


def _erase(image, config, chance, draws, seed):
    """Random erasing (arXiv 1708.04896), as timm's mode "pixel": a box of noise.

    There the noise is standard normal after normalization. Here it is drawn so that it becomes
    that, rounded to pixel values from 0 to 255.
    """
    height, width, channels = image.shape

    def erase():
        widths, heights = _boxes(height * width, ERASED_AREA, ERASED_RATIO, draws)
        fits = (widths < width) & (heights < height)
        first = tf.argmax(fits)
        box_height, box_width = (
            tf.where(fits[first], tf.cast(side[first], tf.int32), 0) for side in (heights, widths)
        )
        top, left = (
            tf.cast(draws[i] * tf.cast(space + 1, tf.float32), tf.int32)
            for i, space in ((-3, height - box_height), (-2, width - box_width))
        )
        noise = tf.random.stateless_normal(
            tf.stack([box_height, box_width, channels]), tf.random.fold_in(seed, 1)
        )
        noise = 255 * (np.float32(config.pixel_mean) + np.float32(config.pixel_std) * noise) + 0.5
        noise = tf.cast(tf.clip_by_value(noise, 0, 255), tf.uint8)
        return rand_augment.paste(image, noise, top, left)

    return tf.cond(draws[-1] < chance, erase, lambda: image)


def _cut_out(image, side, draws):
    """Cutout (arXiv 1708.04552): a gray square around a random pixel, clipped at the border."""
    (top, bottom), (left, right) = (
        span(draw, size, side) for draw, size in zip(tf.unstack(draws), image.shape, strict=False)
    )
    patch = tf.fill([bottom - top, right - left, image.shape[-1]], np.uint8(rand_augment.GRAY))
    return rand_augment.paste(image, patch, top, left)


def span(draw, size, side):
    """Begin and end of `side` pixels around a random one of `size`, clipped at the ends."""
    begin = tf.cast(draw * size, tf.int32) - side // 2
    return tf.maximum(begin, 0), tf.minimum(begin + side, size)

"""RandAugment (arXiv 1909.13719) for one image: uint8 in, uint8 out, in TensorFlow.

Each layer draws one of fifteen operations and applies it. Operations and ranges are those that the
ImageNet recipes of big_vision and timm share (timm's "rand-mM-nN-p1", its "increasing" off): an
argument is the magnitude, divided by 10, times the range below. As in big_vision, and not in timm,
a magnitude may exceed 10. Each operation gives PIL's pixels, which the tests check.

keras_cv's RandAugment is better known, but takes about twice as long and keeps a random state of
its own, so images would not be functions of their seed.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

GRAY = 128
"""Fills the pixels that come from beyond the border."""

LUMA = np.array([19595, 38470, 7471], "float32") / 65536
"""PIL's weights of red, green and blue; in units of 1/65536 float32 is exact."""
GRAYS = np.repeat(LUMA[:, None], 3, axis=1)


def rand_augment(image: tf.Tensor, layers: int, magnitude: float, draws: tf.Tensor) -> tf.Tensor:
    """Applies random operations to an image.

    Args:
        image: uint8 (H, W, C) of known shape; C is 1 or 3.
        layers: Operations per image.
        magnitude: Their strength, from 0 to 30; 10 is the papers' full scale.
        draws: float32 (layers, 2), uniform in [0, 1): which operation, and its sign.

    Returns:
        uint8 (H, W, C).

    Example:

    >>> draws = tf.random.stateless_uniform((2, 2), seed)
    >>> image = rand_augment(image, 2, 10, draws)
    """
    if layers < 0:
        raise ValueError(f"layers must be at least 0. Received: layers={layers}")
    if not 0 <= magnitude <= 30:
        raise ValueError(f"magnitude must be from 0 to 30. Received: magnitude={magnitude}")
    if image.shape[-1] not in (1, 3):
        raise ValueError(f"image must have 1 or 3 channels. Received: shape {image.shape}")
    shape = image.shape
    with_sign = operations(*shape.as_list(), magnitude)
    chosen = tf.cast(draws[:, 0] * len(with_sign), tf.int32)
    signs = tf.cast(draws[:, 1] * 2, tf.int32)
    for layer in range(layers):
        # A switch runs only one of them, instead of computing all fifteen and keeping one.
        branches = [
            functools.partial(operation, image, signs[layer]) for operation in with_sign.values()
        ]
        image = tf.switch_case(chosen[layer], branches)
        image.set_shape(shape)
    return image


def operations(
    height: int, width: int, channels: int, magnitude: float
) -> dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]:
    """The operations by name: functions of the image and of a sign, which is 0 or 1."""
    share = magnitude / 10
    factor = 1.8 * share + 0.1
    size = (height, width)
    point = {
        "AutoContrast": auto_contrast,
        "Equalize": equalize,
        "Invert": tf.bitwise.invert,
        "Posterize": functools.partial(posterize, bits=int(4 * share)),
        "Solarize": functools.partial(solarize, threshold=int(256 * share)),
        "SolarizeAdd": functools.partial(solarize_add, add=int(110 * share)),
        "Color": functools.partial(color, factor=factor),
        "Contrast": functools.partial(contrast, factor=factor),
        "Brightness": functools.partial(brightness, factor=factor),
        "Sharpness": functools.partial(sharpness, factor=factor),
    }
    moved = {
        "Rotate": [rotation(sign * 30 * share, *size) for sign in (1, -1)],
        "ShearX": [(1, sign * 0.3 * share, 0, 0, 1, 0) for sign in (1, -1)],
        "ShearY": [(1, 0, 0, sign * 0.3 * share, 1, 0) for sign in (1, -1)],
        "TranslateX": [(1, 0, sign * 0.45 * share * width, 0, 1, 0) for sign in (1, -1)],
        "TranslateY": [(1, 0, 0, 0, 1, sign * 0.45 * share * height) for sign in (1, -1)],
    }
    result = {name: functools.partial(_unsigned, operation) for name, operation in point.items()}
    for name, matrices in moved.items():
        sources = np.stack([affine_sources(matrix, *size) for matrix in matrices])
        result[name] = functools.partial(_moved, sources)
    return result


def _unsigned(operation, image, sign):
    del sign
    return operation(image)


def _moved(sources, image, sign):
    return take_pixels(image, tf.constant(sources)[sign])


# -- the operations on pixel values


def auto_contrast(image: tf.Tensor) -> tf.Tensor:
    """Stretches each channel to 0..255, as PIL.ImageOps.autocontrast does."""
    low, high = (tf.cast(f(image, (0, 1)), tf.float32) for f in (tf.reduce_min, tf.reduce_max))
    flat = high <= low
    scale = tf.where(flat, 1.0, 255 / (high - low))
    low = tf.where(flat, 0.0, low)
    # PIL truncates: the small term keeps whole numbers whole in float32.
    return _whole(_rows(_rows(image) * _row(scale, image) - _row(low * scale - 1e-4, image), image))


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Makes each channel's histogram flat, as PIL.ImageOps.equalize does."""
    channels = image.shape[-1]
    first = tf.range(channels) * 256
    values = tf.cast(tf.reshape(image, _flat(image)), tf.int32) + _row(first, image)
    counts = tf.raw_ops.Bincount(arr=values, size=channels * 256, weights=tf.constant([], tf.int32))
    counts = tf.reshape(counts, (channels, 256))
    below = tf.cumsum(counts, axis=1, exclusive=True)
    # Pixels below the brightest value there is, spread over 255 steps.
    step = tf.reduce_max(tf.where(counts > 0, below, 0), axis=1, keepdims=True) // 255
    table = tf.where(step > 0, (step // 2 + below) // tf.maximum(step, 1), tf.range(256))
    table = tf.cast(tf.minimum(table, 255), tf.uint8)
    return tf.reshape(tf.gather(tf.reshape(table, [-1]), values), image.shape)


def posterize(image: tf.Tensor, bits: int) -> tf.Tensor:
    """Keeps the upper bits of each value."""
    return tf.bitwise.bitwise_and(image, np.uint8(0xFF << (8 - min(bits, 8)) & 0xFF))


def solarize(image: tf.Tensor, threshold: int) -> tf.Tensor:
    """Inverts values from the threshold on."""
    if threshold > 255:
        return tf.identity(image)
    return tf.bitwise.bitwise_xor(image, tf.cast(image >= threshold, tf.uint8) * 255)


def solarize_add(image: tf.Tensor, add: int) -> tf.Tensor:
    """Adds to values below 128; at most 128, so that none passes 255."""
    return image + tf.cast(image < 128, tf.uint8) * min(add, 128)


def color(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Moves an image away from its gray version, or toward it if factor < 1."""
    if image.shape[-1] == 1:
        return tf.identity(image)
    # Deviation: gray is not rounded before it is mixed in, so that all is one product.
    mix = factor * tf.eye(3) + (1 - factor) * GRAYS
    pixels = tf.reshape(tf.cast(image, tf.float32), (-1, 3))
    return _whole(tf.reshape(pixels @ mix, image.shape))


def gray(image: tf.Tensor) -> tf.Tensor:
    """An image without colors, as PIL's mode "L"; it keeps its channels."""
    if image.shape[-1] == 1:
        return tf.identity(image)
    pixels = tf.reshape(tf.cast(image, tf.float32), (-1, 3))
    return _whole(tf.reshape(pixels @ GRAYS + 0.5, image.shape))


def contrast(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Moves values away from the mean brightness, or toward it if factor < 1."""
    values = tf.cast(image, tf.float32)
    mean = tf.floor(tf.reduce_mean(tf.floor(_gray(values) + 0.5)) + 0.5)
    return _whole(mean + factor * (values - mean))


def brightness(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Multiplies values."""
    return _whole(tf.cast(image, tf.float32) * factor)


def sharpness(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Moves an image away from its smoothed version; the outermost pixels stay."""
    smooth = np.ones((3, 3), "float32")
    smooth[1, 1] = 5
    center = np.zeros((3, 3), "float32")
    center[1, 1] = factor
    # Deviation: the smoothed image is not rounded before it is mixed in.
    kernel = center + (1 - factor) * smooth / smooth.sum()
    kernel = np.repeat(kernel[:, :, None, None], image.shape[-1], axis=2)
    values = tf.cast(image, tf.float32)[None]
    inner = tf.nn.depthwise_conv2d(values, kernel, [1, 1, 1, 1], "VALID")[0]
    return paste(image, _whole(inner), 1, 1)


# -- the operations that move pixels


def rotation(degrees: float, height: int, width: int) -> tuple[float, ...]:
    """The matrix of a turn about the center, as PIL.Image.rotate makes it."""
    angle = -math.radians(degrees)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def affine_sources(matrix: tuple[float, ...], height: int, width: int) -> np.ndarray:
    """Where each pixel of an affine image comes from, as PIL's nearest neighbor.

    Args:
        matrix: PIL's six numbers, from a target's pixel to its source.
        height: Of the image.
        width: Of the image.

    Returns:
        int32 (H * W,): numbers of pixels; H * W stands for "from beyond the border".
    """
    a, b, c, d, e, f = matrix
    # PIL counts in 1/65536 of a pixel, from the middle of the first one.
    fixed = np.floor(np.array([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2]) * 65536 + 0.5).astype(
        "int64"
    )
    y, x = np.mgrid[:height, :width]
    column = (fixed[2] + fixed[0] * x + fixed[1] * y) >> 16
    row = (fixed[5] + fixed[3] * x + fixed[4] * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return np.where(inside, row * width + column, height * width).astype("int32").ravel()


def take_pixels(image: tf.Tensor, sources: tf.Tensor) -> tf.Tensor:
    """The image that `affine_sources` describes."""
    # Faster than ImageProjectiveTransformV3, which looks up each channel by itself.
    pixels = tf.reshape(image, (-1, image.shape[-1]))
    beyond = tf.constant(GRAY, tf.uint8, (1, image.shape[-1]))
    return tf.reshape(tf.gather(tf.concat([pixels, beyond], 0), sources), image.shape)


def paste(image: tf.Tensor, patch: tf.Tensor, top, left) -> tf.Tensor:
    """The image with a patch laid over it."""
    bottom, right = top + tf.shape(patch)[0], left + tf.shape(patch)[1]
    rows = [image[top:bottom, :left], patch, image[top:bottom, right:]]
    result = tf.concat([image[:top], tf.concat(rows, 1), image[bottom:]], 0)
    return tf.ensure_shape(result, image.shape)


# -- the forms that make them fast


def _whole(values: tf.Tensor) -> tf.Tensor:
    """float32 to uint8, decimals cut off, as PIL does."""
    return tf.cast(tf.minimum(tf.maximum(values, 0.0), 255.0), tf.uint8)


def _gray(values: tf.Tensor) -> tf.Tensor:
    if values.shape[-1] == 1:
        return values
    return tf.linalg.matvec(values, tf.constant(LUMA))


def _flat(image):
    return (-1, image.shape[-2] * image.shape[-1])


def _rows(image, like=None):
    if like is not None:
        return tf.reshape(image, like.shape)
    return tf.reshape(tf.cast(image, tf.float32), _flat(image))


def _row(per_channel, image):
    """One value a channel as one a number of a row: arithmetic on three at a time is slow."""
    return tf.tile(per_channel, [image.shape[-2]])

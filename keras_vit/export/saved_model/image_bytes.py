"""From image files to a model's pixels inside a TensorFlow graph, with the numbers of `preprocess`.

Decoding gives exactly PIL's pixels: JPEG of any color space, PNG of any depth. Alpha is dropped, 16
bits become their upper 8, and the EXIF orientation of a JPEG is applied, as in `preprocess`.
Resizing rounds to whole pixels after each axis, as PIL does.

A header may claim more pixels than memory holds, and TensorFlow's decoders believe it. So the
header is read first, and an image that is too large is not decoded.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.saved_model.orientation import orientation, turned
from keras_vit.preprocessing import MAX_PIXELS, corner, covering

PARALLEL = 4  # images of a batch that are decoded at a time
NAMED = 8  # images that an error names
KERNELS = {"bilinear": "triangle", "bicubic": "keyscubic", "lanczos": "lanczos3"}
DAMAGED = "its data is cut off or damaged"


def decode(files: Any, config: ViTConfig, max_pixels: int = MAX_PIXELS) -> Any:
    """Decodes, resizes and crops a batch of image files as the pixel contract says.

    A file that cannot be used fails the batch; the error says which one and why.

    Args:
        files: String tensor (B,), each a JPEG or PNG file.
        config: The model's, of which `image_size`, `in_channels` and the pixel contract are used.
        max_pixels: The largest number of pixels of an image, before and after resizing, which takes
            up to 16 bytes a pixel.

    Returns:
        uint8 tensor (B, height, width, in_channels).
    """
    import tensorflow as tf

    def one():
        reason, image = _image(files[0], config, max_pixels)
        wrong = tf.strings.length(reason) > 0
        return tf.where(wrong, tf.strings.join(["image 0: ", reason]), ""), image[None]

    # Only a dataset can continue after a decoder's error, and starting one takes some milliseconds.
    # A request of one image needs no dataset, because its error needs no number.
    error, images = tf.cond(tf.size(files) == 1, one, lambda: _several(files, config, max_pixels))
    check = tf.debugging.Assert(tf.equal(error, ""), [error])
    with tf.control_dependencies([check]):
        return tf.ensure_shape(images, (None, *config.input_shape))


def decoder(
    config: ViTConfig, max_pixels: int = MAX_PIXELS
) -> Callable[[Sequence[bytes]], np.ndarray]:
    """`decode` as a function from files to uint8 pixels `(B, height, width, in_channels)`.

    It gives the pixels that an exported SavedModel's signatures see, and its errors as
    `ValueError`.
    """
    import tensorflow as tf

    files_type = tf.TensorSpec([None], tf.string)
    compiled = tf.function(
        lambda files: decode(files, config, max_pixels),
        input_signature=[files_type],
        autograph=False,
    )

    def pixels(files: Sequence[bytes]) -> np.ndarray:
        try:
            return compiled(tf.constant(list(files), tf.string, [len(files)])).numpy()
        except tf.errors.InvalidArgumentError as error:
            found = re.search(r"assertion failed: \[(.*)\]", error.message)
            reason = found[1] if found else error.message.partition("\n")[0]
            raise ValueError(reason) from error

    return pixels


def _several(files, config: ViTConfig, max_pixels: int):
    """What is wrong with the files, "" for nothing, and their pixels."""
    import tensorflow as tf

    count = tf.size(files, tf.int64)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # they take longer
    options.autotune.enabled = False
    images = (
        tf.data.Dataset.from_tensor_slices((tf.range(count), files))
        .map(
            lambda i, file: (i, *_image(file, config, max_pixels)),
            num_parallel_calls=PARALLEL,
            deterministic=True,
        )
        .ignore_errors()
        .batch(count + 1)
        .with_options(options)
    )
    none = (
        tf.zeros([0], tf.int64),
        tf.zeros([0], tf.string),
        tf.zeros((0, *config.input_shape), tf.uint8),
    )
    decoded, reasons, images = images.reduce(none, lambda _, batch: batch)
    reasons = tf.tensor_scatter_nd_update(tf.fill([count], DAMAGED), decoded[:, None], reasons)
    wrong = tf.where(tf.not_equal(reasons, ""))[:, 0]
    named = wrong[:NAMED]
    lines = tf.strings.join(
        ["image ", tf.strings.as_string(named), ": ", tf.gather(reasons, named)]
    )
    more = tf.size(wrong) - tf.size(named)
    rest = tf.strings.join(["; and ", tf.strings.as_string(more), " more"])
    text = tf.strings.reduce_join(lines, separator="; ")
    return tf.strings.join([text, tf.where(more > 0, rest, "")]), images


def _image(file, config: ViTConfig, max_pixels: int):
    """Why a file cannot be used, "" if it can, and its pixels (height, width, C)."""
    import tensorflow as tf

    is_jpeg = tf.strings.substr(file, 0, 3) == b"\xff\xd8\xff"
    is_png = tf.strings.substr(file, 0, 8) == b"\x89PNG\r\n\x1a\n"
    size = tf.case(
        [
            (is_jpeg, lambda: tf.io.extract_jpeg_shape(file)[:2]),
            (is_png, lambda: _png_size(file)),
        ],
        default=lambda: tf.zeros([2], tf.int32),
    )
    how = tf.cond(is_jpeg, lambda: orientation(file), lambda: tf.ones([], tf.int64))
    size = tf.cast(tf.where(how >= 5, tf.reverse(size, [0]), size), tf.int64)
    covered = _size(size, config)
    most = tf.reduce_prod(tf.maximum(size, covered))
    numbers = tf.strings.reduce_join(tf.strings.as_string(size), separator=" x ")
    reason = tf.case(
        [
            (~(is_jpeg | is_png), lambda: tf.constant("it is neither a JPEG nor a PNG file")),
            (tf.reduce_any(size < 1), lambda: tf.constant(DAMAGED)),
            (
                most > max_pixels,
                lambda: tf.strings.join(
                    [numbers, f" pixels are too many; at most {max_pixels} can be resized"]
                ),
            ),
        ],
        default=lambda: tf.constant(""),
    )

    def pixels():
        image = tf.cond(
            is_jpeg,
            # The default is faster, and off by up to three pixel values.
            lambda: tf.io.decode_jpeg(file, 3, dct_method="INTEGER_ACCURATE"),
            lambda: tf.io.decode_png(file, 3),
        )
        image = turned(image, how)
        return _crop(_resize(_channels(image, config.in_channels), covered, config), config)

    shape = config.input_shape
    image = tf.cond(tf.equal(reason, ""), pixels, lambda: tf.zeros(shape, tf.uint8))
    return reason, tf.ensure_shape(image, shape)


def _png_size(file):
    """Height and width, from the first chunk of the file."""
    import tensorflow as tf

    head = tf.strings.join([tf.strings.substr(file, 0, 24), b"\0" * 24])
    width, height = tf.unstack(
        tf.io.decode_raw(tf.strings.substr(head, 16, 8), tf.int32, little_endian=False), num=2
    )
    # More than 2 ** 31 is not allowed, and reads as a negative number.
    return tf.stack([height, width])


def _size(size, config: ViTConfig):
    """The size that an image is resized to before the center crop."""
    import tensorflow as tf

    height, width = tf.unstack(tf.maximum(size, 1))

    def where(condition, yes, no):
        return tf.where(condition, tf.cast(yes, tf.int64), tf.cast(no, tf.int64))

    return tf.cast(tf.stack(covering(height, width, config, where=where)), tf.int64)


def _channels(image, channels: int):
    import tensorflow as tf

    if channels == 3:
        return image
    weights = tf.constant([19595, 38470, 7471])  # PIL's, in units of 2 ** -16
    gray = tf.reduce_sum(tf.cast(image, tf.int32) * weights, -1, keepdims=True)
    return tf.cast((gray + 2**15) // 2**16, tf.uint8)


def _resize(image, size, config: ViTConfig):
    """uint8 (H, W, C) to (h, w, C), the width first."""
    import tensorflow as tf

    height, width = tf.unstack(tf.shape(image, tf.int64)[:2])
    if config.resize_method == "nearest":
        rows, columns = _nearest(height, size[0]), _nearest(width, size[1])
        return tf.gather(tf.gather(image, rows), columns, axis=1)
    kernel = KERNELS[config.resize_method]
    for step in (tf.stack([height, size[1]]), size):
        scale = tf.cast(step, tf.float32) / tf.cast(tf.shape(image)[:2], tf.float32)
        values = tf.raw_ops.ScaleAndTranslate(
            images=image[None],
            size=tf.cast(step, tf.int32),
            scale=scale,
            translation=[0.0, 0.0],
            kernel_type=kernel,
        )[0]
        image = tf.cast(tf.clip_by_value(tf.floor(values + 0.5), 0, 255), tf.uint8)
    return image


def _nearest(old, new):
    """Which old pixel of an axis each new one shows; a running sum, to round as PIL does."""
    import tensorflow as tf

    step = tf.cast(old, tf.float64) / tf.cast(new, tf.float64)
    places = tf.cumsum(tf.concat([[step * 0.5], tf.fill([new - 1], step)], 0))
    return tf.minimum(tf.cast(places, tf.int64), old - 1)


def _crop(image, config: ViTConfig):
    import tensorflow as tf

    top, left = corner(tf.unstack(tf.shape(image)[:2]), config)
    height, width = config.image_size
    return image[top : top + height, left : left + width]

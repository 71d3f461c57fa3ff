"""Decodes an image, or converts pixels, to uint8 with the model's channels."""

import tensorflow as tf

from keras_vit.export.saved_model.orientation import orientation, turned
from keras_vit.train.augment import rand_augment


def decode(image: tf.Tensor, channels: int) -> tf.Tensor:
    """An image as uint8, with PIL's pixels; gray and color are converted to the model's channels.

    The EXIF orientation of a JPEG is applied.

    Args:
        image: An encoded image (a scalar string), or uint8 (..., C).
        channels: The model's channels.

    Returns:
        uint8 (..., channels).
    """
    if image.dtype != tf.string:
        return _with_channels(image, channels)

    def jpeg():
        # The default is faster and up to three pixel values off.
        picture = tf.io.decode_jpeg(image, channels, dct_method="INTEGER_ACCURATE")
        return turned(picture, orientation(image))

    def other():  # in color first: TensorFlow does not decode BMP and GIF to gray
        picture = tf.io.decode_image(image, 3, expand_animations=False)
        return _with_channels(tf.ensure_shape(picture, (None, None, 3)), channels)

    picture = tf.cond(tf.io.is_jpeg(image), jpeg, other)
    return tf.ensure_shape(picture, (None, None, channels))


def _with_channels(image, channels):
    found = image.shape[-1]
    if found == channels:
        return image
    if (found, channels) == (1, 3):
        return tf.image.grayscale_to_rgb(image)
    if (found, channels) == (3, 1):
        gray = tf.tensordot(tf.cast(image, tf.float32), rand_augment.LUMA[:, None], 1)
        return tf.cast(gray + 0.5, tf.uint8)
    raise ValueError(
        f"in_channels must be that of the images, which have {found} channels, or one of the two "
        f"be gray and the other RGB. Received: in_channels={channels}"
    )

"""From an encoded picture, or from pixels, to uint8 with the channels of the model."""

import tensorflow as tf

from keras_vit.train.augment import rand_augment


def decode(image: tf.Tensor, channels: int) -> tf.Tensor:
    """A picture as uint8, with PIL's pixels; grey and colour become what the model takes.

    Args:
        image: An encoded picture (a scalar string), or uint8 (..., C).
        channels: The model's.

    Returns:
        uint8 (..., channels).
    """
    if image.dtype != tf.string:
        return _with_channels(image, channels)

    def jpeg():
        # The default is faster and up to three pixel values off.
        return tf.io.decode_jpeg(image, channels, dct_method="INTEGER_ACCURATE")

    def other():  # in colour first: TensorFlow makes no grey picture of BMP and GIF
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
        grey = tf.tensordot(tf.cast(image, tf.float32), rand_augment.LUMA[:, None], 1)
        return tf.cast(grey + 0.5, tf.uint8)
    raise ValueError(
        f"in_channels must be that of the pictures, which have {found} channels, or one of the two "
        f"be grey and the other RGB. Received: in_channels={channels}"
    )

"""The EXIF orientation of JPEG files, read and applied inside a TensorFlow graph.

A camera held upright writes the sensor's pixels, and in the tag Orientation how to turn them. PIL's
`exif_transpose` does the same for single images.
"""

from typing import Any

HEAD = 1 << 16
"""Bytes in which the EXIF segment begins: it is among the first of a file."""
ENTRIES = 64
"""Most entries of a directory that are searched; the tag is among the first dozen."""
TAG = 0x0112


def orientation(file: Any) -> Any:
    """The EXIF orientation of a JPEG file, 1 to 8.

    Args:
        file: The file, a scalar string tensor.

    Returns:
        int64 scalar; 1, which changes nothing, if the file states none or it is damaged.
    """
    import tensorflow as tf

    head = tf.io.decode_raw(tf.strings.substr(file, 0, HEAD), tf.uint8)
    count = tf.size(head, tf.int64)
    head = tf.cast(tf.concat([head, tf.zeros([16], tf.uint8)], 0), tf.int64)

    def numbers(places, size):
        """Unsigned numbers of `size` bytes at these places, 0 beyond the end."""
        offsets = tf.range(size, dtype=tf.int64)
        places = tf.minimum(tf.maximum(places, 0)[..., None] + offsets, count)
        weights = tf.where(little, 256**offsets, 256 ** (size - 1 - offsets))
        return tf.reduce_sum(tf.gather(head, places) * weights, -1)

    mark = b"\xff\xe1..Exif\0\0"  # dots stand for the length of the segment
    parts = [head[i : i + count] == c for i, c in enumerate(mark) if c != ord(".")]
    found = tf.where(tf.reduce_all(tf.stack(parts), 0))[:1, 0]  # the first one, or none
    start = tf.reduce_sum(found) + len(mark)
    little = tf.gather(head, tf.minimum(start, count)) == ord("I")
    directory = start + numbers(start + 4, 4)
    each = tf.range(ENTRIES, dtype=tf.int64)
    entries = directory + 2 + 12 * each
    is_tag = (numbers(entries, 2) == TAG) & (each < numbers(directory, 2))
    stated = tf.boolean_mask(numbers(entries + 8, 2), is_tag)[:1]
    value = tf.reduce_sum(stated)
    known = (tf.size(found) > 0) & (value >= 1) & (value <= 8)
    return tf.where(known, value, tf.ones_like(value))


def turned(image: Any, how: Any) -> Any:
    """An image `(H, W, C)` as its orientation says; `(W, H, C)` for 5 to 8.

    Args:
        image: The pixels of the file.
        how: What `orientation` returned.
    """
    import tensorflow as tf

    def turn():
        sides = tf.cond(how >= 5, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
        for axis, which in ((1, (2, 3, 6, 7)), (0, (3, 4, 7, 8))):
            mirrored = tf.reduce_any(how == tf.constant(which, tf.int64))
            sides = tf.cond(
                mirrored,
                lambda axis=axis, sides=sides: tf.reverse(sides, [axis]),
                lambda sides=sides: sides,
            )
        return sides

    return tf.cond(how > 1, turn, lambda: image)

"""Image files of every kind are decoded to uint8 with the channels of the model."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit.train.data.decoding import decode

pytestmark = pytest.mark.backend_free


def encode(mode, kind):
    coarse = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((23, 15)).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.arange(15 * 23, dtype="uint8").reshape(15, 23)))
    file = io.BytesIO()
    image.save(file, kind, quality=95)
    return file.getvalue()


def decoded(image, channels):
    """Decodes as in a pipeline, where an image's size is unknown."""
    dataset = tf.data.Dataset.from_tensors(image).map(lambda i: decode(i, channels))
    assert dataset.element_spec.shape[-1] == channels
    (result,) = dataset.as_numpy_iterator()
    return result.astype(int)


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB")])
@pytest.mark.parametrize(
    "kind, modes",
    [
        ("PNG", ("RGB", "RGBA", "L", "LA", "P", "1")),
        ("BMP", ("RGB", "RGBA", "L")),
        ("GIF", ("P", "L")),
        ("JPEG", ("RGB", "L")),
    ],
)
def test_decode_agrees_with_pil(kind, modes, channels, mode):
    for stored in modes:
        file = encode(stored, kind)
        wanted = np.asarray(Image.open(io.BytesIO(file)).convert(mode), int).reshape(15, 23, -1)
        # TensorFlow reads the brightness of a JPEG from the file; PIL computes it from the colors.
        bound = 2 if kind == "JPEG" and channels == 1 else 0
        found = decoded(file, channels)
        assert np.abs(found - wanted).max() <= bound, stored
        assert np.abs(found[::-1] - wanted).max() > 9


@pytest.mark.parametrize("found, channels, mode", [(1, 3, "RGB"), (3, 1, "L")])
def test_decode_of_pixels_converts_between_gray_and_color(found, channels, mode):
    batch = np.random.default_rng(0).integers(0, 256, (2, 5, 7, found), dtype=np.uint8)
    wanted = [Image.fromarray(p if found == 3 else p[..., 0]).convert(mode) for p in batch]
    wanted = np.stack([np.asarray(p, int).reshape(5, 7, channels) for p in wanted])
    np.testing.assert_array_equal(decoded(batch, channels), wanted)
    np.testing.assert_array_equal(decoded(batch, found), batch)


def test_decode_refuses_other_channels():
    with pytest.raises(ValueError, match="which have 2 channels.*Received: in_channels=3"):
        decode(tf.zeros((5, 7, 2), tf.uint8), 3)

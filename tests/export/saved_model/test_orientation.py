"""EXIF orientation in a TensorFlow graph, compared with PIL's."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from keras_vit.export.saved_model.orientation import orientation, turned
from keras_vit.images import read_image
from keras_vit.train.data.decoding import decode

pytestmark = pytest.mark.only_on("tensorflow")
tf = pytest.importorskip("tensorflow")


def exif(value, order="<", tag=0x0112):
    """An EXIF segment of three entries, the orientation the second one."""
    mark = b"II" if order == "<" else b"MM"
    entries = [(0x010F, 2, 0), (tag, 1, value), (0x8769, 1, 0)]
    rows = b"".join(struct.pack(f"{order}HHIHH", t, 3, n, v, 0) for t, n, v in entries)
    head = mark + struct.pack(f"{order}HIH", 42, 8, len(entries))
    return b"Exif\0\0" + head + rows + struct.pack(f"{order}I", 0)


def jpeg(**options):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype="uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def decoded():
    """`decode` as in training folders: one graph for every file."""
    return tf.function(lambda f: decode(f, 3), input_signature=[tf.TensorSpec([], tf.string)])


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("value", range(1, 9))
def test_orientation_turns_as_pil(value, order, tmp_path, decoded):
    file = jpeg(exif=exif(value, order))
    (tmp_path / "a.jpg").write_bytes(file)
    wanted = np.asarray(read_image(tmp_path / "a.jpg"))
    raw = tf.io.decode_jpeg(file, dct_method="INTEGER_ACCURATE")
    assert int(orientation(tf.constant(file))) == value
    np.testing.assert_array_equal(turned(raw, orientation(tf.constant(file))), wanted)
    np.testing.assert_array_equal(decoded(tf.constant(file)), wanted)
    assert (value == 1) == np.array_equal(raw, wanted)


@pytest.mark.parametrize(
    "file",
    [
        jpeg(),
        jpeg(exif=exif(6, tag=0x0113)),
        jpeg(exif=exif(9)),
        jpeg(exif=exif(0)),
        jpeg(exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
        b"\xff\xd8\xff\xe1\0\x10Exif\0\0",
        b"\xff\xe1",
        b"",
    ],
)
def test_files_without_an_orientation_stay(file):
    assert int(orientation(tf.constant(file))) == 1

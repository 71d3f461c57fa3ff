"""Image files whose headers ask for too much are refused before they are decoded."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from seeds import tiled_tiff

from keras_vit.image_bounds import MAX_BLANK, PIXELS_A_BYTE, excess, webp_size
from keras_vit.images import ImageFileError, read_image

pytestmark = pytest.mark.backend_free


def encoded(kind, size=(31, 23), **options):
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0x"}])
def test_webp_size_is_that_of_the_image(options):
    assert webp_size(encoded("WEBP", **options)[:30]) == (31, 23)
    assert webp_size(encoded("PNG")[:30]) is None and webp_size(b"RIFF") is None


def test_excess_depends_on_the_bytes_and_the_passes():
    side = int(MAX_BLANK**0.5)
    assert excess(side, side, 1) is None
    assert "4097 x 4096 pixels, too many for 1 bytes" in (excess(side + 1, side, 1) or "")
    assert excess(side + 1, side, (side + 1) * side // PIXELS_A_BYTE + 1) is None
    assert "2 times" in (excess(side, side, 1, passes=2) or "")
    assert excess(8256, 5504, 3_000_000, passes=12) is None  # a progressive photograph of 45 MP


def _webp(data):
    """A canvas of 16,383 x 16,383 pixels, for which Pillow allocates 3 GB as it opens the file."""
    assert data[12:16] == b"VP8X"
    return data[:24] + b"\xfe\x3f\0" * 2 + data[30:]


def _tiff(data):
    """The size in a TIFF's directory, of 8192 x 8192 pixels."""
    for tag in (256, 257):
        at = max(data.find(struct.pack("<HHI", tag, kind, 1)) for kind in (3, 4))
        data = data[: at + 2] + struct.pack("<HII", 4, 1, 8192) + data[at + 12 :]
    return data


def _scans(data):
    """A progressive JPEG of 4000 x 4000 pixels whose last scan comes a hundred times."""
    frame = data.index(b"\xff\xc2")
    data = data[: frame + 5] + struct.pack(">HH", 4000, 4000) + data[frame + 9 :]
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 100 + data[-2:]


@pytest.mark.parametrize(
    ("name", "options", "change", "message"),
    [
        ("a.webp", {"exif": b"Exif\0\0x"}, _webp, "too many pixels; at most"),
        ("a.tif", {"compression": "tiff_lzw"}, _tiff, "asks for 8192 x 8192 pixels"),
        ("a.jpg", {"progressive": True}, _scans, "4000 x 4000 pixels 109 times"),
    ],
)
def test_absurd_headers_are_refused_before_decoding(
    tmp_path, monkeypatch, name, options, change, message
):
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(name[2:], "WEBP")
    path = tmp_path / name
    path.write_bytes(encoded(kind, **options))
    assert read_image(path).size == (31, 23)
    path.write_bytes(change(path.read_bytes()))
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda image: decoded.append(image))
    with pytest.raises(ImageFileError, match=f"{name}: .*{message}"):
        read_image(path)
    assert not decoded


def test_large_tile_is_refused(tmp_path):
    """A tile is decoded whole, even if the image is smaller."""
    data = tiled_tiff(np.zeros((23, 31, 3), np.uint8))
    path = tmp_path / "t.tif"
    path.write_bytes(data)
    assert read_image(path).size == (31, 23)
    for tag in (322, 323):
        at = data.index(struct.pack("<HHI", tag, 3, 1))
        data = data[: at + 8] + struct.pack("<I", 65520) + data[at + 12 :]
    path.write_bytes(data)
    with pytest.raises(ImageFileError, match="65520 x 65520 pixels"):
        read_image(path)

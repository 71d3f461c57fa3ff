"""How much decoding an image file asks for, from its header alone, and how much it may ask for.

Memory and time of a decoder follow from the size that the header states, however short the file is.
A photograph has a byte for a few pixels. A file that states thousands of pixels a byte is blank, or
was made to exhaust the machine.
"""

import io
from typing import Any, BinaryIO

MAX_BLANK = 1 << 24
"""Pixels that any file may state: a blank image of 4096 x 4096 takes a few hundred bytes."""
PIXELS_A_BYTE = 1000
"""Pixels that each byte of a file may stand for beyond that. Deflate reaches 1032 bytes a byte."""
TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF tags
SCAN = b"\xff\xda"  # JPEG: start of scan


def webp_size(start: bytes) -> tuple[int, int] | None:
    """Width and height in the first 30 bytes of a WebP file; None if it is none.

    Pillow allocates three canvases of this size when it opens a file.
    """
    if start[:4] != b"RIFF" or start[8:12] != b"WEBP" or len(start) < 30:
        return None
    kind = start[12:16]
    if kind == b"VP8X":
        return 1 + _int(start[24:27]), 1 + _int(start[27:30])
    if kind == b"VP8L":
        bits = _int(start[21:25])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return _int(start[26:28]) & 0x3FFF, _int(start[28:30]) & 0x3FFF
    return None


def excess(width: int, height: int, nbytes: int, passes: int = 1) -> str | None:
    """Why an image is too much to decode for a file of `nbytes`; None if it is not.

    Args:
        width: Pixels.
        height: Pixels.
        nbytes: The file's size.
        passes: How often the decoder goes over all pixels.
    """
    if width * height * passes <= max(MAX_BLANK, PIXELS_A_BYTE * nbytes):
        return None
    times = f" {passes} times" if passes > 1 else ""
    return f"its header asks for {width} x {height} pixels{times}, too many for {nbytes:,} bytes"


def excess_of(image: Any, file: BinaryIO) -> str | None:
    """`excess` of an image that Pillow has opened from `file` and not decoded."""
    width, height = image.size
    if image.format == "TIFF":
        tile = [image.tag_v2.get(tag) for tag in (TILE_WIDTH, TILE_LENGTH)]
        if all(isinstance(side, int) for side in tile):  # one is decoded whole
            width, height = max(width, tile[0]), max(height, tile[1])
    passes = 1
    if image.format == "JPEG" and image.info.get("progressive"):
        place = file.tell()  # Pillow reads on from there
        file.seek(0)
        passes = max(1, file.read().count(SCAN))
        file.seek(place)
    return excess(width, height, file_size(file), passes)


def file_size(file: BinaryIO) -> int:
    """The bytes of an open file, whose place stays."""
    place = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(place)
    return size


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little")

"""Encoded pictures of requests, decoded within bounds."""

import io
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image

from keras_vit.config import ViTConfig
from keras_vit.images import IMAGE_FORMATS, ImageFileError, read_pixels
from keras_vit.preprocessing import MAX_PIXELS, most_pixels

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
DAMAGED = "its data is cut off or damaged"
NAMED = 8
"""Files that an error names."""


def decode(files: Sequence[bytes], config: ViTConfig, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decodes files as uint8 pixels `(B, H, W, C)`, resized and cropped as the config says.

    Args:
        files: JPEG or PNG files: those that an exported SavedModel decodes.
        config: The model's config.
        max_pixels: Most pixels of an image, before and after resizing.

    Raises:
        ValueError: A file cannot be used. The message says which ones and why, as a SavedModel
            does.
    """
    decoded, wrong = [], []
    for number, file in enumerate(files):
        try:
            decoded.append(_decode(file, config, max_pixels))
        except ImageFileError as error:
            wrong.append(f"image {number}: {error.reason}")
    if wrong:
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError("; ".join(wrong[:NAMED]) + more)
    return np.stack(decoded) if decoded else np.zeros((0, *config.input_shape), "uint8")


def _decode(file: bytes, config: ViTConfig, max_pixels: int) -> np.ndarray:
    if not file.startswith((JPEG, PNG)):
        raise ImageFileError("", "it is neither a JPEG nor a PNG file")
    check_size(file, config, max_pixels)
    try:
        return read_pixels("", config, file)
    except ImageFileError as error:
        damaged = error.reason.startswith(DAMAGED) or "not an image" in error.reason
        raise ImageFileError("", DAMAGED if damaged else error.reason) from error


def check_size(file: bytes, config: ViTConfig, max_pixels: int = MAX_PIXELS) -> None:
    """Raises if the header of a file claims more pixels than are decoded; reads only the header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about many pixels, which are counted here
            with Image.open(io.BytesIO(file), formats=list(IMAGE_FORMATS)) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise ImageFileError("", f"its pixels are too many; at most {max_pixels}") from None
    except Exception:  # decoders raise anything on a damaged file
        raise ImageFileError("", DAMAGED) from None
    if width < 1 or height < 1:
        raise ImageFileError("", DAMAGED)
    if most_pixels(height, width, config) > max_pixels:
        raise ImageFileError(
            "", f"{height} x {width} pixels are too many; at most {max_pixels} can be resized"
        )

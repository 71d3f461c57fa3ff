"""Untrusted image files: finding them, and opening one within limits."""

import glob
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from keras_vit.image_bounds import excess, excess_of, file_size, webp_size
from keras_vit.pillow_warnings import pillow_warnings

IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
}
"""The formats that are read, and the suffixes by which a folder's files are selected."""


class ImageFileError(ValueError):
    """A file that cannot be used as an image; the message is one line with the path and reason."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.reason = reason


class FoundImage(NamedTuple):
    """An image file, or a name without one and the problem."""

    path: str
    problem: str | None = None


def find_images(names: Iterable[str]) -> Iterator[FoundImage]:
    """Finds the image files that names refer to, without opening any.

    Args:
        names: Files with any suffix; folders, which are searched recursively for images that are
            not hidden; and globs, where ** matches any depth.

    Yields:
        The files in the order of the names; within a folder or a glob, in alphabetical order.
    """
    for name in names:
        if os.path.isdir(name):
            yield from _in_folder(name)
        elif glob.has_magic(name) and not os.path.lexists(name):
            matches = [path for path in glob.glob(name, recursive=True) if os.path.isfile(path)]
            yield from map(FoundImage, sorted(matches))
            if not matches:
                yield FoundImage(name, "no file matches it")
        elif not os.path.exists(name):
            yield FoundImage(name, "there is no such file")
        elif not os.path.isfile(name):
            yield FoundImage(name, "it is neither a file nor a folder")
        else:
            yield FoundImage(name)


def read_image(path: str | os.PathLike, content: bytes | None = None) -> Any:
    """Opens and decodes one image, or the first frame of an animation.

    Its EXIF orientation is applied, as everywhere in the package. Its size is checked before
    anything is decoded: see `keras_vit.image_bounds`.

    Args:
        path: A file in one of `IMAGE_FORMATS`, with no more pixels than Pillow decodes by default.
        content: The bytes of the file, if they are in memory; `path` is then only a name for
            errors.

    Returns:
        A `PIL.Image.Image`, loaded into memory.

    Raises:
        ImageFileError: The file cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    from keras_vit.preprocessing import oriented

    kinds = ", ".join(IMAGE_FORMATS)
    try:
        with (
            pillow_warnings,
            _opened(Path(path)) if content is None else io.BytesIO(content) as file,
        ):
            _check_start(file, path)
            with Image.open(file, formats=list(IMAGE_FORMATS)) as image:
                _check_pixels(*image.size)
                if problem := excess_of(image, file):
                    raise ImageFileError(path, problem)
                image.load()
                image = oriented(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        most = f"{Image.MAX_IMAGE_PIXELS:,}"
        raise ImageFileError(path, f"it has too many pixels; at most {most} are decoded") from None
    except UnidentifiedImageError:
        raise ImageFileError(path, f"it is not an image that can be read ({kinds})") from None
    except ImageFileError:
        raise
    except OSError as error:
        if error.errno is None:  # from Pillow, not from the system
            raise _damaged(path, error) from error
        raise ImageFileError(path, f"it cannot be read: {error.strerror}") from error
    except Exception as error:  # decoders raise anything on a damaged file
        raise _damaged(path, error) from error
    if image.mode in ("I", "F"):  # the value of white is unknown
        raise ImageFileError(path, f"its pixels are 32-bit numbers (mode {image.mode!r})")
    return image


def _opened(path: Path) -> io.BufferedReader:
    """Opens a regular file: reading a pipe or a device may never end."""
    if not path.is_file():
        path.stat()  # raises if there is nothing
        raise ImageFileError(path, "it is not a regular file")
    return path.open("rb")


def _check_start(file: BinaryIO, path: str | os.PathLike) -> None:
    """Raises for what must not reach Pillow."""
    nbytes = file_size(file)
    if not nbytes:
        raise ImageFileError(path, "the file is empty")
    size = webp_size(file.read(30))
    file.seek(0)
    if size is None:
        return
    _check_pixels(*size)
    if problem := excess(*size, nbytes):
        raise ImageFileError(path, problem)


def _check_pixels(width: int, height: int) -> None:
    """Raises above Pillow's limit, where Pillow itself only warns, up to twice of it."""
    from PIL import Image

    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError


def read_pixels(path: str | os.PathLike, config: Any, content: bytes | None = None) -> Any:
    """Reads a file as uint8 pixels `(H, W, C)`, resized and cropped as the config says.

    Several threads may call it at once. Decoding and resizing run without the interpreter's lock.

    Args:
        path: A file, or a name for errors, as in `read_image`.
        config: The model's `ViTConfig`.
        content: The bytes of the file, if they are in memory.
    """
    from keras_vit.preprocessing import resized_pixels

    image = read_image(path, content)
    try:
        return resized_pixels(image, config)
    except ValueError as error:  # so narrow that it would be huge after resizing
        raise ImageFileError(path, str(error)) from error


def sample_images(folder: str | os.PathLike, config: Any, count: int = 200) -> Any:
    """Reads up to `count` evenly spaced images of a folder as uint8 pixels `(B, H, W, C)`."""
    import numpy as np

    files = _files(folder)
    chosen = np.linspace(0, len(files) - 1, min(len(files), count)).astype(int)
    return np.stack([read_pixels(files[i], config) for i in chosen])


def labeled_images(
    folder: str | os.PathLike, config: Any, labels: Sequence[str] | None = None, at_a_time: int = 64
) -> Iterator[tuple[Any, Any]]:
    """Reads the images in the subfolders of a folder, each named after a class.

    Args:
        folder: The folder.
        config: The model's `ViTConfig`.
        labels: Class names; defaults to the config's, or the class numbers.
        at_a_time: Batch size.

    Returns:
        An iterator over batches of uint8 pixels `(B, H, W, C)` and class numbers `(B,)`. All
        subfolder names are checked before it is returned.
    """
    import numpy as np

    if not config.num_classes:
        raise ValueError(
            "labeled images must be left out for a model without a head. Received: num_classes=0"
        )
    if config.num_classes == 1:
        raise ValueError(
            "labeled images must be left out for a model of one logit, whose top class is the same "
            "for every image. Received: num_classes=1"
        )
    names = labels or config.labels or tuple(map(str, range(config.num_classes)))
    folders = {path.name: path for path in sorted(Path(folder).iterdir()) if path.is_dir()}
    if unknown := [name for name in folders if name not in names]:
        raise ValueError(
            f"{folder} must contain folders named as classes: {', '.join(names[:10])}. "
            f"Received: {', '.join(unknown[:10])}"
        )
    names = list(names)
    if twice := [name for name in folders if names.count(name) > 1]:
        raise ValueError(
            f"{folder} must contain folders whose names each belong to one class: pass labels in "
            "which such classes have different names, and rename the folders. Received: "
            f"{', '.join(twice[:10])}, each the name of several classes"
        )
    files = [
        (file, number)
        for number, name in enumerate(names)
        if name in folders
        for file in _files(folders[name])
    ]
    if not files:
        raise ValueError(f"{folder} must contain a folder of images. Received: none")

    def batches():
        for start in range(0, len(files), at_a_time):
            part = files[start : start + at_a_time]
            yield (
                np.stack([read_pixels(f, config) for f, _ in part]),
                np.array([n for _, n in part]),
            )

    return batches()


def _files(folder: str | os.PathLike) -> list[str]:
    """The image files of a folder; raises if there is none."""
    found = list(find_images([os.fspath(folder)]))
    for item in found:
        if item.problem:
            raise ImageFileError(item.path, item.problem)
    return [item.path for item in found]


def _damaged(path: str | os.PathLike, error: Exception) -> ImageFileError:
    text = " ".join(str(error).split()) or type(error).__name__
    return ImageFileError(path, f"its data is cut off or damaged ({text})")


def _in_folder(folder: str) -> Iterator[FoundImage]:
    endings = tuple(ending for endings in IMAGE_FORMATS.values() for ending in endings)
    problems: list[OSError] = []
    none = True
    for place, folders, files in os.walk(folder, onerror=problems.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(endings) and not name.startswith("."):
                none = False
                yield FoundImage(os.path.join(place, name))
    for error in problems:
        yield FoundImage(str(error.filename), f"it cannot be read: {error.strerror}")
    if none and not problems:
        yield FoundImage(folder, f"no image is in this folder ({', '.join(endings)})")

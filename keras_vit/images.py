"""Picture files that somebody else made: finding them, and opening one within bounds."""

import glob
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
}
"""What is read, and the endings by which the files of a folder are chosen."""


class ImageFileError(ValueError):
    """A file that cannot be used as a picture, in one line: which, and why."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.reason = reason


class FoundImage(NamedTuple):
    """A picture file, or a name that leads to none."""

    path: str
    problem: str | None = None


def find_images(names: Iterable[str]) -> Iterator[FoundImage]:
    """The picture files that names stand for; no file is opened.

    Args:
        names: Files, which may end in anything; folders, of which every picture is meant, those
            in folders inside too, but hidden ones; and globs, in which ** is any depth.

    Yields:
        What is found, in the order of the names; in a folder or a glob, in that of the alphabet.
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


def read_image(path: str | os.PathLike) -> Any:
    """Opens and decodes one picture; of an animation the first frame.

    It is not turned as its EXIF says: nor is it anywhere else in this package.

    Args:
        path: A file in one of `IMAGE_FORMATS`, of no more pixels than Pillow takes for harmless.

    Returns:
        A `PIL.Image.Image`, whole in memory. What cannot be read raises `ImageFileError`.
    """
    from PIL import Image, UnidentifiedImageError

    kinds = ", ".join(IMAGE_FORMATS)
    try:
        if not Path(path).stat().st_size:
            raise ImageFileError(path, "the file is empty")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, which is not used
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=list(IMAGE_FORMATS)) as image:
                image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        most = f"{Image.MAX_IMAGE_PIXELS:,}"
        raise ImageFileError(path, f"it has too many pixels; at most {most} are decoded") from None
    except UnidentifiedImageError:
        raise ImageFileError(path, f"it is not a picture that can be read ({kinds})") from None
    except ImageFileError:
        raise
    except OSError as error:
        if error.errno is None:  # from Pillow, not from the system
            raise _damaged(path, error) from error
        raise ImageFileError(path, f"it cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever a decoder makes of a damaged file
        raise _damaged(path, error) from error
    if image.mode in ("I", "F"):  # nobody knows which of their values is white
        raise ImageFileError(path, f"its pixels are 32-bit numbers (mode {image.mode!r})")
    return image


def read_pixels(path: str | os.PathLike, config: Any) -> Any:
    """A file as uint8 pixels `(H, W, C)` of a model's size, resized and cropped as it says."""
    from keras_vit.preprocessing import preprocess

    picture = read_image(path)
    try:
        whole = preprocess(picture, config.replace(pixel_mean=0.0, pixel_std=1 / 255))
    except ValueError as error:  # so narrow that it would be huge once it is resized
        raise ImageFileError(path, str(error)) from error
    return whole[0].round().astype("uint8")


def sample_images(folder: str | os.PathLike, config: Any, count: int = 200) -> Any:
    """Up to `count` images of a folder as uint8 pixels `(B, H, W, C)`, evenly chosen."""
    import numpy as np

    files = _files(folder)
    chosen = np.linspace(0, len(files) - 1, min(len(files), count)).astype(int)
    return np.stack([read_pixels(files[i], config) for i in chosen])


def labeled_images(
    folder: str | os.PathLike, config: Any, labels: Sequence[str] | None = None, at_a_time: int = 64
) -> Iterator[tuple[Any, Any]]:
    """The images in the subfolders of a folder, each subfolder named after a class.

    Args:
        folder: The folder.
        config: The `ViTConfig` whose size the images get.
        labels: Names of the classes; default to the model's, or their numbers.
        at_a_time: Images in a batch.

    Yields:
        Batches of uint8 pixels `(B, H, W, C)` and the numbers `(B,)` of their classes. The names of
        all files are checked before the first.
    """
    import numpy as np

    if not config.num_classes:
        raise ValueError(
            "labeled images must be left out for a model without a head. Received: num_classes=0"
        )
    names = labels or config.labels or tuple(map(str, range(config.num_classes)))
    folders = {path.name: path for path in sorted(Path(folder).iterdir()) if path.is_dir()}
    if unknown := [name for name in folders if name not in names]:
        raise ValueError(
            f"{folder} must contain folders named as classes: {', '.join(names[:10])}. "
            f"Received: {', '.join(unknown[:10])}"
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
    """The image files of a folder, at least one."""
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
        yield FoundImage(folder, f"no picture is in this folder ({', '.join(endings)})")

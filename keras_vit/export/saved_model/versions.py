"""Writes version folders atomically.

TensorFlow Serving loads a folder as soon as its name is a number, even if it is half copied. So a
version is written under a name that is not a number, flushed to the disk, and then renamed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from keras_vit.atomic import flush_folder, remove_left_over, temporary_name
from keras_vit.paths import check_above


def check_version(path: Path, version: int | None) -> None:
    """Raises, before any work is done, if a version cannot be written."""
    if set("[\\") & set(os.path.abspath(path)) and os.name != "nt":
        raise ValueError(
            "path must not hold [ or \\, which TensorFlow reads as a pattern when it loads. "
            f"Received: path={os.fspath(path)!r}"
        )
    if path.is_file():
        raise ValueError(f"path must be a folder of versions. Received: path={str(path)!r}, a file")
    check_above("path", path)
    if version is None:
        return
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version must be a positive int. Received: version={version!r}")
    if (path / str(version)).exists():
        raise _taken(path, version)


@contextlib.contextmanager
def new_version(path: Path, version: int | None) -> Iterator[tuple[Path, list[Path]]]:
    """Yields a folder to write to, which becomes `path/version` when the block ends.

    If the block raises, the folder is removed, and so are the parents that were created for it. A
    killed process leaves a folder named `.tmp-*`, which no server takes for a version and which the
    next export removes.

    Args:
        path: The folder of all versions, created if needed.
        version: An unused number; None means the next one.

    Yields:
        The folder, and a list that holds the version's path once the block has ended.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    remove_left_over(path)
    temporary = path / temporary_name()
    temporary.mkdir(parents=True)
    placed: list[Path] = []
    try:
        yield temporary, placed
        _flush(temporary)
        placed.append(_place(temporary, path, version))
        flush_folder(path)
    finally:
        if not placed:
            shutil.rmtree(temporary)
            with contextlib.suppress(OSError):  # another export may be using them
                for folder in made:
                    folder.rmdir()


def _place(temporary: Path, path: Path, version: int | None) -> Path:
    while True:
        target = path / str(version or _next(path))
        try:
            os.rename(temporary, target)  # fails if the target has files
            return target
        except OSError:
            if not target.exists():
                raise
            if version is not None:  # otherwise another export has just taken the number
                raise _taken(path, version) from None


def _next(path: Path) -> int:
    numbers = (int(p.name) for p in path.iterdir() if p.name.isascii() and p.name.isdigit())
    return max(numbers, default=0) + 1


def _taken(path: Path, version: int) -> FileExistsError:
    return FileExistsError(
        f"version must be one that {path} does not hold. Received: version={version}"
    )


def _flush(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir():
            _flush(entry)
        else:
            with entry.open("rb+") as file:
                os.fsync(file.fileno())
    flush_folder(path)

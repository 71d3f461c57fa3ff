"""Writes files and folders atomically: beside the target, flushed, then renamed to it."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from keras_vit.paths import check_above

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files and folders. A killed writer leaves them."""


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and renames it to `path` when the block ends.

    The block creates a file or a folder there. When it ends, everything is flushed to the disk and
    renamed. If it raises, the temporary is removed and `path` is unchanged. A killed process leaves
    a `.tmp-*` entry and the old target.

    If `path` is a folder that holds files, files of the same names are replaced one by one and the
    others stay. Each file is whole, but a kill in between leaves some old and some new ones.

    Args:
        path: The file or folder to write. Missing parents are created.

    Example:

    >>> with atomic_path("labels.txt") as temporary:
    ...     temporary.write_text("cat")
    """
    target = Path(os.path.abspath(path))
    check_above("path", path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system. With the same
    # suffix, because some writers choose their format by it.
    mark = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}-"
    temporary = target.with_name(mark + target.name)
    try:
        yield temporary
        _flush(temporary)
        if temporary.is_dir() and target.is_dir() and any(target.iterdir()):
            _replace_files(temporary, target)
        else:
            os.replace(temporary, target)
            flush_folder(target.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _replace_files(source: Path, target: Path) -> None:
    for file in sorted(p for p in source.rglob("*") if not p.is_dir()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
        flush_folder(place.parent)


def _flush(path: Path) -> None:
    if path.is_dir():
        for entry in path.iterdir():
            _flush(entry)
        flush_folder(path)
    else:
        with path.open("rb+") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Waits until the entries of a folder are on the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

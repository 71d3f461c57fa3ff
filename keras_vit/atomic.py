"""Writing beside the target and moving into place: a file appears whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from keras_vit.paths import check_above

TEMPORARY = ".tmp-"
"""How names begin of what is being written, or was when its writer was killed."""


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary path beside `path` and moves what the block wrote there to `path`.

    The block writes a file or makes a folder at the path it is given. When it ends, everything is
    flushed to the disk and `os.replace`d; when it raises, the temporary is removed and what stood
    at `path` is untouched. A process that is killed leaves a `.tmp-*` entry and the old target.

    A folder moved onto a folder that holds files replaces the files of the same names, one after
    another, and leaves the others alone: each file is whole, and a kill in between leaves some old
    and some new ones.

    Args:
        path: The file or folder to make. Folders above it are made as needed.

    Example:

    >>> with atomic_path("labels.txt") as temporary:
    ...     temporary.write_text("cat")
    """
    target = Path(os.path.abspath(path))
    check_above("path", path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, for a rename is atomic only within one file system; with the same ending,
    # for some writers choose their format by it.
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
    """Has the names in a folder written to the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

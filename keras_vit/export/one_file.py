"""Writes an export that is one file atomically, and replaces another only on request."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from keras_vit.atomic import flush_folder, remove_left_over, temporary_name
from keras_vit.paths import as_path, check_above


def check_file(path: str | os.PathLike, suffix: str, overwrite: bool) -> Path:
    """The path of a file to write, checked before any work is done."""
    target = as_path("path", path)
    if target.suffix != suffix:
        raise ValueError(f"path must end in {suffix}. Received: path={os.fspath(path)!r}")
    if target.is_dir():
        raise ValueError(f"path must not be a folder. Received: path={os.fspath(path)!r}")
    if os.path.lexists(target) and not overwrite:  # a broken link counts too
        raise FileExistsError(
            f"path must not exist, or overwrite be True. Received: path={os.fspath(path)!r}"
        )
    check_above("path", path)
    return target


@contextlib.contextmanager
def new_file(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a path beside `target` to write to, which is renamed to it when the block ends.

    Without `overwrite`, this raises if `target` was created in the meantime.

    If the block raises, the file is removed, and so are the parents that were created for it. A
    killed process leaves a file named `.tmp-*`, which the next call removes. A symbolic link is
    replaced, its target is not.
    """
    target = Path(os.path.abspath(target))
    made = [folder for folder in target.parents if not folder.exists()]
    remove_left_over(target.parent)
    beside = target.with_name(temporary_name(target.name))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        check_file(target, target.suffix, overwrite)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another export may be using them
            for folder in made:
                folder.rmdir()
        raise
    flush_folder(target.parent)

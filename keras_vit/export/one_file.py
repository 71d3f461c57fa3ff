"""A file that appears whole or not at all, under a name that nothing else has unless asked for."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from keras_vit.paths import as_path, check_above


def check_file(path: str | os.PathLike, suffix: str, overwrite: bool) -> Path:
    """The path of a file to write, or an error before any work is done."""
    target = as_path("path", path)
    if target.suffix != suffix:
        raise ValueError(f"path must end in {suffix}. Received: path={os.fspath(path)!r}")
    if target.is_dir():
        raise ValueError(f"path must not be a folder. Received: path={os.fspath(path)!r}")
    if os.path.lexists(target) and not overwrite:  # a link that leads nowhere would be replaced too
        raise FileExistsError(
            f"path must not exist, or overwrite be True. Received: path={os.fspath(path)!r}"
        )
    check_above("path", path)
    return target


@contextlib.contextmanager
def new_file(target: Path, overwrite: bool) -> Iterator[Path]:
    """Gives a path beside `target` to write to, which becomes it when the block ends.

    Without `overwrite` a file that has come there meanwhile stays, and this raises.

    When the block raises, nothing is left, nor the folders above that were made for it. A process
    that is killed leaves a file named `.tmp-*`. A link is replaced, and what it leads to stays.
    """
    target = Path(os.path.abspath(target))
    made = [folder for folder in target.parents if not folder.exists()]
    # In the same folder, for a rename is atomic only within one file system; with the same ending,
    # by which a runtime is chosen.
    beside = target.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        check_file(target, target.suffix, overwrite)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another export may use them by now
            for folder in made:
                folder.rmdir()
        raise
    flush_folder(target.parent)


def flush_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Writes files and folders atomically: beside the target, flushed, then renamed to it."""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from keras_vit.paths import check_above

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files and folders. A killed writer leaves them."""
NAME = re.compile(re.escape(TEMPORARY) + r"([0-9a-f]{6})-(\d+)-(\d+)-[0-9a-f]{6}(-.*)?", re.DOTALL)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and renames it to `path` when the block ends.

    The block creates a file or a folder there. When it ends, everything is flushed to the disk and
    renamed. If it raises, the temporary is removed and `path` is unchanged. A killed process leaves
    a `.tmp-*` entry, which the next call removes, and the old target.

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
    remove_left_over(target.parent)
    temporary = target.with_name(temporary_name(target.name))
    try:
        yield temporary
        _flush(temporary)
        if temporary.is_dir() and target.is_dir() and any(target.iterdir()):
            _replace_files(temporary, target)
        else:
            os.replace(temporary, target)
            flush_folder(target.parent)
    finally:
        remove(temporary)


def temporary_name(name: str = "") -> str:
    """A new name for what is being written; it tells which process writes.

    The file belongs into the folder of its target, because a rename is atomic only within one file
    system. It ends like the target, because some writers choose their format by the suffix.
    """
    pid = os.getpid()
    mark = f"{TEMPORARY}{_machine()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(3)}"
    return f"{mark}-{name}" if name else mark


def remove_left_over(folder: Path) -> None:
    """Removes what killed processes of this machine left unfinished in a folder.

    What a living process writes stays. So does what another machine wrote, or this one before a
    restart: nobody here can know whether it is still being written. It is logged.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(TEMPORARY)]
    except OSError:  # writing there will say what is wrong
        return
    for name in names:
        if (found := NAME.fullmatch(name)) is None:
            continue  # another program's
        machine, pid, started = found[1], int(found[2]), int(found[3])
        if machine != _machine():
            logger.info("Not removed, because another machine may be writing it: %s", folder / name)
        elif not _runs(pid, started):
            logger.info("Removed what a killed process left: %s", folder / name)
            with contextlib.suppress(OSError):  # another process removes it too
                remove(folder / name)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@functools.cache
def _machine() -> str:
    """A mark of this machine since it was started, and of this container in it."""
    facts = [platform.node()]
    with contextlib.suppress(OSError):  # there is no such file but on Linux
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:6]


def _runs(pid: int, started: int) -> bool:
    """Whether the process that wrote a name is alive. Its number may be another one's by now."""
    if pid == os.getpid() or os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        pass
    return _started(pid) in (None, started)


def _started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


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

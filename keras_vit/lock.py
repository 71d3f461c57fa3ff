"""A lock: one process at a time writes to a folder."""

import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out there
    fcntl = None

LOCK = "lock"
"""The name of the file that is locked."""


class Lock:
    """Keeps a second process from writing to a folder. A kill releases it.

    Args:
        folder: The folder; created if it is missing.
    """

    _held: dict[str, int] = {}  # by this process, which may acquire it again

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(os.path.realpath(folder), LOCK)

    def acquire(self) -> None:
        """Acquires the lock, or raises a `BlockingIOError` that names its holder."""
        if str(self.path) in self._held:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"The folder must be writable: {error.strerror}",
                str(self.path.parent),
            ) from error
        try:
            _flock(handle)
        except BlockingIOError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(
                error.errno,
                f"One process at a time may write here. It is locked by {owner}",
                str(self.path.parent),
            ) from error
        os.ftruncate(handle, 0)
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {moment}".encode())
        self._held[str(self.path)] = handle

    def release(self) -> None:
        """Releases the lock; the file stays."""
        handle = self._held.pop(str(self.path), None)
        if handle is not None:
            os.ftruncate(handle, 0)
            os.close(handle)

    @classmethod
    def _forget(cls) -> None:
        """In a forked process, which may outlive the one that holds the lock."""
        for handle in cls._held.values():
            os.close(handle)
        cls._held.clear()


def _flock(handle: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # `keras-vit info` may have looked just now
        time.sleep(0.1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


if fcntl is not None:
    os.register_at_fork(after_in_child=Lock._forget)

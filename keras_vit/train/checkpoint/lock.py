"""One process at a time writes into a folder of checkpoints, or into a run folder."""

import os
import socket
import time
from pathlib import Path

from keras_vit.runs import LOCK

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out there
    fcntl = None


class Lock:
    """Keeps a second process from writing into a folder. A kill frees it.

    Args:
        folder: The folder, which is made if need be.
    """

    _held: dict[str, int] = {}  # of this process: its own objects do not shut each other out

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(os.path.realpath(folder), LOCK)

    def acquire(self) -> None:
        """Takes it, or raises a `BlockingIOError` that says who has it."""
        if str(self.path) in self._held:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"The folder of the checkpoints must be one that can be written: {error.strerror}",
                str(self.path.parent),
            ) from error
        try:
            _flock(handle)
        except BlockingIOError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(
                error.errno,
                f"One process at a time may write checkpoints here, and {owner} does",
                str(self.path.parent),
            ) from error
        os.ftruncate(handle, 0)
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {moment}".encode())
        self._held[str(self.path)] = handle

    def release(self) -> None:
        """Gives it back; the file stays."""
        handle = self._held.pop(str(self.path), None)
        if handle is not None:
            os.ftruncate(handle, 0)
            os.close(handle)

    @classmethod
    def _forget(cls) -> None:
        """In a forked process, which may live longer than the one that took the lock."""
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

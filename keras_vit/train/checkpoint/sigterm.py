"""SIGTERM is noted, not obeyed at once: clusters send it some time before they kill."""

import os
import signal
import threading
from typing import Any

CODE = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended."""


class Sigterm:
    """Notes SIGTERM between `watch` and `release`, in the main thread; elsewhere it does nothing.

    A second SIGTERM is obeyed: the run hangs, or it ended with an error and nothing checks `came`.

    Attributes:
        came: Whether SIGTERM has come.
    """

    def __init__(self):
        self.came = False
        self._before: Any = None

    def watch(self) -> None:
        """Installs the handler."""
        if threading.current_thread() is threading.main_thread() and self._before is None:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def release(self) -> None:
        """Restores the previous handler."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number, frame):
        del frame
        if self.came:
            self.release()
            os.kill(os.getpid(), number)
        self.came = True

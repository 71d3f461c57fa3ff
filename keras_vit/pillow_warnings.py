"""Pillow's warnings while images are decoded, in any number of threads at once."""

import threading
import warnings


class _PillowWarnings:
    """A scope without Pillow's warnings about metadata, which is not used, and about large images.

    Python's own `warnings.catch_warnings` is one setting of the whole process: of two threads that
    are inside at once, the first to leave would restore the warnings of the other. Here the first
    to enter changes the setting, and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = warnings.catch_warnings()
                self._before.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\b")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.__exit__(None, None, None)


pillow_warnings = _PillowWarnings()

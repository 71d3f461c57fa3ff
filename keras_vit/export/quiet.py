"""TensorFlow's own log, which in a notebook names every folder that it writes."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def without_infos() -> Iterator[None]:
    """Hides what TensorFlow logs below a warning.

    In a notebook it logs the temporary folders of an export, which are gone when the user reads it.
    """
    log = logging.getLogger("tensorflow")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)

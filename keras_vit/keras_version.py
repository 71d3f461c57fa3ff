"""The versions of Keras that keras_vit works with, checked when it is imported.

keras_vit relies on behavior of Keras that its documentation does not promise, and on corrections
that older versions lack.
"""

import logging
import re

import keras

OLDEST = (3, 15, 1)
NEWEST = (3, 15)
"""The newest minor version that the tests were run with."""

log = logging.getLogger("keras_vit")


def check(version: str) -> None:
    """Raises for a version that is too old or too new, and logs a warning for an untested one."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    if found < OLDEST or found[0] > NEWEST[0]:
        supported = f"keras>={oldest},<{NEWEST[0] + 1}"
        raise ImportError(
            f"keras must be at least {oldest} and below {NEWEST[0] + 1}. Received: keras "
            f"{version}. Install another one: pip install '{supported}'"
        )
    if found[:2] > NEWEST:
        log.warning("keras %s is newer than %s, which keras_vit was tested with", version, newest)


check(keras.__version__)

"""The supported versions of Keras, checked at import.

keras_vit relies on undocumented behavior of Keras, and on bug fixes that older versions lack.
"""

import logging
import re

import keras

OLDEST = (3, 15, 1)
NEWEST = (3, 15)
"""The newest minor version that the tests run with."""

log = logging.getLogger("keras_vit")


def check_keras_version(version: str) -> None:
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
        log.warning("keras %s is newer than %s, the newest tested version", version, newest)


check_keras_version(keras.__version__)

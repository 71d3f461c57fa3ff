"""LiteRT's interpreter, which would say on stderr that it was made."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from keras_vit.runtime.tflite_file import litert

GREETING = b"INFO: Created TensorFlow Lite"


def open_interpreter(content: bytes, **options: Any) -> Any:
    """The interpreter of a file, ready to run.

    Args:
        content: The file.
        **options: Arguments of LiteRT's `Interpreter`.
    """
    make = litert("interpreter").Interpreter
    with _without_greeting():
        interpreter = make(model_content=content, **options)
        interpreter.allocate_tensors()
    return interpreter


@contextlib.contextmanager
def _without_greeting() -> Iterator[None]:
    """Hides LiteRT's line. Whatever else is written to stderr appears when the block ends."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # a program without stderr
        yield
        return
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            os.write(2, b"".join(line for line in file if not line.startswith(GREETING)))

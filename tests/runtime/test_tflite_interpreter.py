"""What LiteRT says when it starts."""

import os
import sys
from types import SimpleNamespace

import pytest

from keras_vit.runtime import tflite_interpreter

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize("fails", [False, True])
def test_greeting_is_hidden_and_nothing_else(monkeypatch, capfd, fails):
    def interpreter(model_content, **options):
        assert (model_content, options) == (b"TFL3", {"num_threads": 2})
        os.write(2, b"INFO: Created TensorFlow Lite XNNPACK delegate for CPU.\n")
        os.write(2, b"ERROR: of the file\n")
        print("of Python", file=sys.stderr)
        if fails:
            raise ValueError("no file")
        return SimpleNamespace(allocate_tensors=lambda: None)

    module = SimpleNamespace(Interpreter=interpreter)
    monkeypatch.setattr(tflite_interpreter, "litert", {"interpreter": module}.get)
    if fails:
        with pytest.raises(ValueError, match="no file"):
            tflite_interpreter.open_interpreter(b"TFL3", num_threads=2)
    else:
        tflite_interpreter.open_interpreter(b"TFL3", num_threads=2)
    os.write(2, b"after\n")
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "ERROR: of the file",
        "after",
        "of Python",
    ]

"""What refusing means for files that state absurd things."""

import re
import tracemalloc

import keras
import pytest
from hostile import FLAT

from keras_vit.weights.files.rules import Refused


@pytest.fixture
def refused(monkeypatch):
    """Calls a function that must raise `Refused`: in little memory, no weight given a value."""

    def initialize(*args, **kwargs):
        raise AssertionError("a weight is given a value")

    def check(found, function, *args):
        monkeypatch.setattr(keras.Variable, "_initialize_with_initializer", initialize)
        tracemalloc.start()
        try:
            with pytest.raises(Refused) as error:
                function(*args)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        message = str(error.value)
        assert re.search(found, message), message
        assert str(args[0]) in message and len(message) < 20000
        assert peak < FLAT, peak

    return check

"""`refused` checks how files with absurd values are refused."""

import re

import keras
import pytest
from hostile import refusal_of


@pytest.fixture
def refused(monkeypatch):
    """Calls a function that must raise `Refused` with little memory and without any new weight."""

    def initialize(*args, **kwargs):
        raise AssertionError("a weight was initialized")

    def check(found, function, *args):
        monkeypatch.setattr(keras.Variable, "_initialize_with_initializer", initialize)
        message = refusal_of(function, *args)
        assert re.search(found, message), message
        assert str(args[0]) in message and len(message) < 20000

    return check

"""What callbacks and random generators know, packed and unpacked."""

import keras
import numpy as np
import pytest

from training import remembered


def test_remembered_values_come_back_as_they_were():
    class Any(keras.callbacks.Callback):
        def __init__(self, setting=1):
            super().__init__()
            self.setting = setting
            self.state = None
            self.file = print

    class Own(Any):
        def get_state(self):
            return {"mine": self.state}

        def set_state(self, state):
            self.state = state["mine"]

    value = {
        "a": [1, 2.5, None, True, "text", float("inf"), (3, [])],
        7: np.arange(6, dtype="int16").reshape(2, 3),
        "b": np.float64(0.1),
        "c": keras.ops.ones((2,)),
    }
    for make in (Any, Own):
        old, new, arrays = make(), make(setting=2), {}
        old.state = value
        entries = remembered.of_callbacks([keras.callbacks.History(), old], arrays)
        gone = remembered.restore_callbacks([new], entries, arrays)
        assert gone == ["History"] and new.setting == 2 and new.file is print
        assert new.state["a"] == value["a"] and list(new.state) == list(value)
        assert type(new.state["a"][6]) is tuple and type(new.state["b"]) is np.float64
        assert new.state[7].dtype == "int16" and np.array_equal(new.state[7], value[7])
        assert np.array_equal(new.state["c"], [1, 1])
    bad = Own()
    bad.state = object()
    with pytest.raises(TypeError, match="must be something JSON can hold. Received: object"):
        remembered.of_callbacks([bad], {})


def test_remembered_random_generators_go_on():
    import random

    arrays = {}
    keras.random.uniform((2,))
    entries = remembered.of_random(arrays)
    draw = [random.random(), np.random.rand(), keras.ops.convert_to_numpy(keras.random.uniform(()))]
    other = [
        random.random(),
        np.random.rand(),
        keras.ops.convert_to_numpy(keras.random.uniform(())),
    ]
    remembered.restore_random(entries, arrays)
    again = [
        random.random(),
        np.random.rand(),
        keras.ops.convert_to_numpy(keras.random.uniform(())),
    ]
    assert draw == again != other

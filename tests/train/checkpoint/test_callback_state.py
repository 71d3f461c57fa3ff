"""The state of callbacks and random generators, saved and restored."""

import random

import keras
import numpy as np
import pytest

from keras_vit.train.checkpoint import callback_state, random_state


def test_values_of_callbacks_are_restored_unchanged():
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
        entries = callback_state.collect_callbacks([keras.callbacks.History(), old], arrays)
        gone = callback_state.restore_callbacks([new], entries, arrays)
        assert gone == ["History"] and new.setting == 2 and new.file is print
        assert new.state["a"] == value["a"] and list(new.state) == list(value)
        assert type(new.state["a"][6]) is tuple and type(new.state["b"]) is np.float64
        assert new.state[7].dtype == "int16" and np.array_equal(new.state[7], value[7])
        assert np.array_equal(new.state["c"], [1, 1])
    bad = Own()
    bad.state = object()
    with pytest.raises(TypeError, match="must be something JSON can hold. Received: object"):
        callback_state.collect_callbacks([bad], {})


def test_random_generators_are_restored():
    def draw():
        uniform = keras.ops.convert_to_numpy(keras.random.uniform(()))
        return [random.random(), np.random.rand(), uniform]

    arrays = {}
    keras.random.uniform((2,))
    entries = random_state.collect_random(arrays)
    first, other = draw(), draw()
    random_state.restore_random(entries, arrays)
    assert draw() == first != other


def test_callbacks_of_one_class_are_told_apart_by_their_settings():
    def make(monitor):
        return keras.callbacks.EarlyStopping(monitor, patience=3)

    old = [make("val_loss"), make("loss")]
    old[0].wait, old[1].wait = 1, 2
    entries = callback_state.collect_callbacks(old, {})
    new = [make("loss"), make("val_loss")]
    callback_state.restore_callbacks(new, entries, {})
    assert [one.wait for one in new] == [2, 1]


def test_only_attributes_that_changed_during_fit_are_saved():
    one = keras.callbacks.EarlyStopping("loss")
    one.folder, one.list, one.array = "here", [1], np.zeros(2)
    others = callback_state.SavedCallbacks([one])
    others.begin()
    assert others.pack({})[0]["attributes"] == {}
    one.list.append(2)
    one.array[1] = 1
    arrays = {}
    assert set(others.pack(arrays)[0]["attributes"]) == {"list", "array"} and len(arrays) == 1
    others.begin()  # by a second fit: the changes of the first one still count
    assert set(others.pack({})[0]["attributes"]) == {"list", "array"}


def test_get_state_without_set_state_is_not_called():
    class Half(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

        def get_state(self):
            raise AssertionError

    old, new = Half(), Half()
    old.count = 5
    callback_state.restore_callbacks([new], callback_state.collect_callbacks([old], {}), {})
    assert new.count == 5

"""The state of callbacks, as JSON and arrays, and back again."""

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit.train.checkpoint.packing import PLAIN, pack, unpack

# What Keras sets or finds out again, such as whether a CSV file has a header.
MANAGED = {"_model", "model", "params", "monitor_op", "append_header"}
KNOWN = {"keras", "keras_vit"}  # packages whose callbacks recreate what is not saved

logger = logging.getLogger(__name__)


class SavedCallbacks:
    """The callbacks whose state a checkpoint saves.

    Args:
        callbacks: Any Keras callbacks.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback] = ()):
        self.callbacks = list(callbacks)
        self._begin: dict[int, Attributes] = {}
        self._warned = False

    def begin(self) -> None:
        """Call once all of them have had their `on_train_begin`."""
        for number, callback in enumerate(self.callbacks):
            if number not in self._begin:  # in a second `fit` it may have the state of the first
                self._begin[number] = attributes(callback, number)

    def pack(self, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """See `collect_callbacks`; warns once about what is not saved."""
        entries = collect_callbacks(self.callbacks, arrays, self._begin)
        lost = [f"{e['class']}.{name}" for e in entries for name in e.get("left_out", ())]
        if lost and not self._warned:
            self._warned = True
            logger.warning(
                "Checkpoints do not save %s. Give the callbacks get_state() and set_state() if "
                "they need it after a restart",
                ", ".join(lost),
            )
        return entries


def collect_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    arrays: dict[str, np.ndarray],
    begin: Mapping[int, "Attributes"] | None = None,
) -> list[dict[str, Any]]:
    """The state of callbacks: that of `get_state()` if they have it, else their attributes.

    Plain values, arrays, and lists, tuples and dicts of them are saved. An attribute named like an
    argument of the constructor is a setting, not state, and keeps the value that the program sets.
    So does one that has not changed since training began, such as a path made of a setting. Other
    attributes are listed as left out, unless the callback is from Keras or from here.

    Args:
        callbacks: Any Keras callbacks.
        arrays: Receives the arrays.
        begin: Number of a callback -> its `attributes` when training began.

    Returns:
        One entry for each callback, for JSON.
    """
    entries = []
    for number, callback in enumerate(callbacks):
        entry: dict[str, Any] = {"class": type(callback).__name__}
        settings = _settings(type(callback))
        entry["settings"] = {
            key: value
            for key, value in vars(callback).items()
            if key in settings and type(value) in PLAIN
        }
        if _has_state(callback):
            entry["state"] = pack(callback.get_state(), arrays, f"callbacks/{number}")
        else:
            found = attributes(callback, number)
            before = begin[number].values if begin and number in begin else {}
            changed = {k: v for k, v in found.values.items() if not _same(v, before.get(k))}
            entry["attributes"] = {key: packed for key, (packed, _) in changed.items()}
            entry["left_out"] = found.left_out
            for _, held in changed.values():
                arrays |= held
        entries.append(entry)
    return entries


class Attributes(NamedTuple):
    """Attributes of a callback: name -> its packed value and the arrays in it."""

    values: dict[str, tuple[Any, dict[str, np.ndarray]]]
    left_out: list[str]


def attributes(callback: keras.callbacks.Callback, number: int) -> Attributes:
    """The attributes of a callback that are not settings, and the names of those not saved."""
    found = Attributes({}, [])
    settings = _settings(type(callback)) | MANAGED
    known = type(callback).__module__.split(".")[0] in KNOWN
    for key, value in vars(callback).items():
        if key in settings:
            continue
        held: dict[str, np.ndarray] = {}
        try:
            found.values[key] = pack(value, held, f"callbacks/{number}/{key}"), held
        except TypeError:  # a function, a file, a model: recreated, not state
            if not known and _may_change(value):
                found.left_out.append(key)
    return found


def _same(one: tuple[Any, dict], other: tuple[Any, dict] | None) -> bool:
    """Whether two packed values hold the same."""
    if other is None or one[0] != other[0] or one[1].keys() != other[1].keys():
        return False
    return all(a.tobytes() == other[1][name].tobytes() for name, a in one[1].items())


def _has_state(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    entries: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Restores the state of callbacks, whose order may have changed.

    Several of a class are distinguished by their settings, and if these are equal by their order.

    Returns:
        Classes of saved callbacks that are missing now.
    """
    left = list(entries)
    for callback in callbacks:
        same = [entry for entry in left if entry["class"] == type(callback).__name__]
        if not same:
            continue
        entry = max(same, key=lambda one: _agreement(callback, one.get("settings", {})))
        left = [one for one in left if one is not entry]
        if "state" in entry and _has_state(callback):
            callback.set_state(unpack(entry["state"], arrays))
        else:
            for key, value in entry.get("attributes", {}).items():
                value = unpack(value, arrays)
                assign = getattr(getattr(callback, key, None), "assign", None)
                if assign is not None:  # a variable, which other objects may share
                    assign(value)
                else:
                    setattr(callback, key, value)
    return [entry["class"] for entry in left]


def _may_change(value: Any) -> bool:
    """Whether a value that cannot be saved may be state."""
    if isinstance(value, os.PathLike) or inspect.isclass(value):
        return False
    return not callable(value) or hasattr(value, "variables")  # a metric, a model


def _agreement(callback: keras.callbacks.Callback, settings: Mapping[str, Any]) -> int:
    """How many settings are unchanged."""
    present = vars(callback)
    return sum(key in present and present[key] == value for key, value in settings.items())


def _settings(cls: type) -> set[str]:
    """Names of the arguments of all constructors, those of parents too."""
    found: set[str] = set()
    for one in cls.__mro__[:-1]:
        if "__init__" in vars(one):
            found |= set(inspect.signature(one.__init__).parameters)
    return found

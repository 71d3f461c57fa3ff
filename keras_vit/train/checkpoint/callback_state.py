"""What callbacks and the global random generators know, as JSON and arrays, and back again."""

import inspect
import logging
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator  # Keras' own seeds have no public door

# What Keras puts into a callback, or finds anew: whether a CSV file has a header, for one.
MANAGED = {"_model", "model", "params", "monitor_op", "append_header"}
KNOWN = {"keras", "training"}  # packages whose callbacks make anew what is not kept
PLAIN = (bool, int, float, str, type(None))

logger = logging.getLogger(__name__)


class Others:
    """The callbacks beside the checkpoint.

    Args:
        callbacks: Any Keras callbacks.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback] = ()):
        self.callbacks = list(callbacks)
        self._begin: dict[int, Attributes] = {}
        self._said = False

    def begin(self) -> None:
        """When training has begun, and all of them have heard of it."""
        for number, callback in enumerate(self.callbacks):
            if number not in self._begin:  # in a second `fit` it may remember the first one
                self._begin[number] = attributes(callback, number)

    def pack(self, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """As `of_callbacks`; says once what is not kept."""
        entries = of_callbacks(self.callbacks, arrays, self._begin)
        lost = [f"{e['class']}.{name}" for e in entries for name in e.get("left_out", ())]
        if lost and not self._said:
            self._said = True
            logger.warning(
                "Checkpoints do not keep %s. Give the callbacks get_state() and set_state(), if "
                "they must know it after a restart",
                ", ".join(lost),
            )
        return entries


def of_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    arrays: dict[str, np.ndarray],
    begin: Mapping[int, "Attributes"] | None = None,
) -> list[dict[str, Any]]:
    """What callbacks remember: from `get_state()` where they have it, else their attributes.

    Plain values, arrays, and lists, tuples and dicts of them are kept. An attribute with the name
    of an argument of the constructor is a setting, not something remembered: it is as the program
    sets it now. So is one that is as it was when training began, such as a path made of a setting.
    What is left out of the attributes is named, unless Keras or we know it.

    Args:
        callbacks: Any Keras callbacks.
        arrays: Receives the arrays.
        begin: By the number of a callback, its `attributes` when training began.

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
    """What `of_callbacks` looks at: by name, a packed value and the arrays that it holds."""

    values: dict[str, tuple[Any, dict[str, np.ndarray]]]
    left_out: list[str]


def attributes(callback: keras.callbacks.Callback, number: int) -> Attributes:
    """The attributes of a callback that are no settings, and the names of those not kept."""
    found = Attributes({}, [])
    settings = _settings(type(callback)) | MANAGED
    known = type(callback).__module__.split(".")[0] in KNOWN
    for key, value in vars(callback).items():
        if key in settings:
            continue
        held: dict[str, np.ndarray] = {}
        try:
            found.values[key] = pack(value, held, f"callbacks/{number}/{key}"), held
        except TypeError:  # a function, a file, a model: made anew, not remembered
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
    """Gives callbacks what they remembered, in whatever order they are now.

    Several of a class are told apart by their settings, and where these are the same, by order.

    Returns:
        Classes of callbacks that there are no more.
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
                value, present = unpack(value, arrays), getattr(callback, key, None)
                if hasattr(present, "assign"):  # a variable, which others may hold as well
                    present.assign(value)
                else:
                    setattr(callback, key, value)
    return [entry["class"] for entry in left]


def pack(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    """A value as JSON can hold it exactly; its arrays go to `arrays`.

    Raises:
        TypeError: It is, or holds, something else than plain values, arrays, lists, tuples, dicts.
    """
    if type(value) in PLAIN:
        return value
    variable = isinstance(value, keras.Variable)
    tensor = not variable and keras.ops.is_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) or variable or tensor:
        array = np.array(keras.ops.convert_to_numpy(value))
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise TypeError(f"{name} must hold numbers. Received: dtype={array.dtype}")
        arrays[name] = array
        kind = "scalar" if isinstance(value, np.generic) else "tensor" if tensor else "array"
        return {"array": name, "kind": kind, "dtype": array.dtype.name}
    if type(value) in (list, tuple):
        items = [pack(item, arrays, f"{name}/{number}") for number, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        items = [
            [key, pack(item, arrays, f"{name}/{number}")]
            for number, (key, item) in enumerate(value.items())
        ]
        return {"dict": items}
    raise TypeError(f"{name} must be something JSON can hold. Received: {type(value).__name__}")


def unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that was packed."""
    if isinstance(value, list):
        return [unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]].astype(value["dtype"])  # bfloat16 is read as float32
        if value["kind"] == "tensor":
            return keras.ops.convert_to_tensor(array)
        return array[()] if value["kind"] == "scalar" else array
    if "tuple" in value:
        return tuple(unpack(item, arrays) for item in value["tuple"])
    return {key: unpack(item, arrays) for key, item in value["dict"]}


def of_random(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The global random generators: Python's, NumPy's, and those of Keras and torch if in use.

    Layers and `training.data` have seeds of their own. These matter to what a user adds.
    """
    version, internal, gauss = random.getstate()
    states = {
        "python": (version, np.array(internal, "uint32"), gauss),
        "numpy": np.random.get_state(),
    }
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is not None:
        states["keras"] = keras.ops.convert_to_numpy(generator.state)
    if keras.backend.backend() == "torch":
        import torch

        states["torch"] = torch.get_rng_state().numpy()
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return {name: pack(state, arrays, f"random/{name}") for name, state in states.items()}


def restore_random(entries: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Puts the global random generators back."""
    states = {name: unpack(entry, arrays) for name, entry in entries.items()}
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(map(int, internal)), gauss))
    np.random.set_state(states["numpy"])
    if "keras" in states:
        seed_generator.global_seed_generator().state.assign(states["keras"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        if len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([torch.from_numpy(s) for s in states["cuda"]])


def torch_generator() -> Any:
    """The state of torch's generator, where Keras uses it; else None."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.get_rng_state()


def restore_torch_generator(state: Any) -> None:
    """Puts it back, where there is one.

    torch's data loader draws when it begins: in each epoch, or in the first one of a program. A run
    that goes on must not see the difference.
    """
    if state is not None:
        import torch

        torch.set_rng_state(state)


def _may_change(value: Any) -> bool:
    """Whether a value that cannot be kept may be something that a callback remembers."""
    if isinstance(value, os.PathLike) or inspect.isclass(value):
        return False
    return not callable(value) or hasattr(value, "variables")  # a metric, a model


def _agreement(callback: keras.callbacks.Callback, settings: Mapping[str, Any]) -> int:
    """How many settings are as they were."""
    present = vars(callback)
    return sum(key in present and present[key] == value for key, value in settings.items())


def _settings(cls: type) -> set[str]:
    """Names of the arguments of all constructors, those of parents too."""
    found: set[str] = set()
    for one in cls.__mro__[:-1]:
        if "__init__" in vars(one):
            found |= set(inspect.signature(one.__init__).parameters)
    return found

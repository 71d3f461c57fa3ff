"""The variables of a model in training, copied to named arrays and restored.

A name is "<group>/<number>:<path>", as "model/12:encoder_block_0/attention/query/kernel". The
groups are the model's variables (seeds of dropout too), the optimizer's (slots, averages, loss
scale, iterations) and the metrics'.
"""

import logging
import platform
import re
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from keras_vit.train.checkpoint.files import Snapshot

MODEL, OPTIMIZER, METRICS = "model", "optimizer", "metrics"
STATE: tuple[str, ...] = (MODEL, OPTIMIZER)

Entry = tuple[str, tuple[int, ...], str]  # path, shape, dtype

logger = logging.getLogger(__name__)


def variables(model: keras.Model, group: str) -> list[keras.Variable]:
    """The variables of a group, in Keras' order."""
    if group == MODEL:
        return model.variables
    if group == OPTIMIZER:
        return [v for optimizer in optimizers(model) for v in optimizer.variables]
    return model.metrics_variables


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizer, and others that it or a layer of it has as attributes, as GANs do."""
    found = [model.optimizer]
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            if isinstance(value, keras.optimizers.Optimizer) and all(value is not o for o in found):
                found.append(value)
    return found


def collect(model: keras.Model, groups: Sequence[str]) -> dict[str, np.ndarray]:
    """Copies of all variables. The caller owns them: training may continue at once."""
    # convert_to_numpy may give a view of memory that the next step writes to, or frees.
    return {
        f"{group}/{number}:{variable.path}": np.array(keras.ops.convert_to_numpy(variable))
        for group in groups
        for number, variable in enumerate(variables(model, group))
    }


def assign(model: keras.Model, groups: Sequence[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Assigns what `collect` copied. Call `differences` first."""
    for group in groups:
        pairs = zip(variables(model, group), names(group, arrays), strict=True)
        for variable, name in pairs:
            variable.assign(arrays[name])


def names(group: str, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The names of a group's arrays, in the order of its variables."""
    found = [name for name in arrays if name.startswith(f"{group}/")]
    return sorted(found, key=lambda name: int(name.split(":")[0].split("/")[1]))


def differences(
    model: keras.Model,
    groups: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str],
) -> list[str]:
    """Lists in how the arrays differ from the model's variables, a line each.

    Variables are matched by their order. Their paths are compared without the numbers in them, by
    which Keras counts the layers of a process: "dense", "dense_1".
    """
    lines = []
    for group in groups:
        saved = [
            (name.split(":", 1)[1], arrays[name].shape, dtypes[name])
            for name in names(group, arrays)
        ]
        present = [
            (v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype))
            for v in variables(model, group)
        ]
        lines += [f"{group}: {line}" for line in _differences(group, saved, present)]
    return lines


def find_non_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """The first array of model, optimizer or loss that holds an infinity or NaN, or None.

    Other metrics may start at infinity. A gradient that overflows in float16 is not in the state:
    the loss scale drops it.
    """
    for name, array in arrays.items():
        group, path = name.split(":", 1)[0].split("/")[0], name.split(":", 1)[-1]
        if group not in STATE and not (group == METRICS and path.startswith("loss/")):
            continue
        if "float" in array.dtype.name and not _is_finite(array.reshape(-1)):
            return path
    return None


def build_optimizer(model: keras.Model) -> None:
    """Builds the optimizer of a model. Raises if the model itself is not built and compiled."""
    if getattr(model, "optimizer", None) is None or not model.built:
        raise ValueError("model must be built and compiled. Received: model=" + model.name)
    unbuilt = [layer.name for layer in model._flatten_layers() if not layer.built]
    if unbuilt and not model.trainable_variables:  # a layer that is never used may stay unbuilt
        raise ValueError(
            "model must be built: call it once on a batch. "
            f"Received: model={model.name}, whose layer {unbuilt[0]} is not"
        )
    # In a new folder too, so that the names of its variables are the same after a restart.
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def restore_model(model: keras.Model, snapshot: Snapshot) -> None:
    """Restores a model and its built optimizer from a checkpoint.

    Raises:
        ValueError: They differ from the saved ones. Nothing is changed; the message lists all
            differences.
    """
    before, here = snapshot.facts["versions"], versions()
    if before["backend"] != here["backend"]:
        raise ValueError(
            f"KERAS_BACKEND must be that of the checkpoint, {before['backend']}. "
            f"Received: {here['backend']}, for {snapshot.path}"
        )
    for optimizer in optimizers(model):
        if not optimizer.built:
            raise ValueError(
                "Each optimizer of a model must be built before a checkpoint is restored: "
                f"optimizer.build(variables). Received: {optimizer.name}, which is not"
            )
    lines = differences(model, STATE, snapshot.arrays, snapshot.dtypes)
    old, new = snapshot.facts.get("optimizer"), optimizer_name(model)
    if old not in (None, new):  # two optimizers may have the same slots
        lines.append(f"optimizer: {old} in the checkpoint, {new} here")
    if lines:
        raise ValueError(
            f"The model and its optimizer must be those of {snapshot.path}. "
            "Received:\n  " + "\n  ".join(lines)
        )
    if before != here:
        logger.warning(
            "The run resumes, but perhaps not bit for bit: it ran on %s, and now on %s",
            *(", ".join(f"{k} {v}" for k, v in w.items()) for w in (before, here)),
        )
    assign(model, STATE, snapshot.arrays)


def restore_metrics(model: keras.Model, snapshot: Snapshot) -> None:
    """Restores the metrics, at the latest when the next step begins."""
    groups, arrays = (METRICS,), snapshot.arrays
    if not (there := names(METRICS, arrays)):
        return

    def assign_metrics():
        if lines := differences(model, groups, arrays, snapshot.dtypes):
            raise ValueError(
                f"The metrics must be those of {snapshot.path} in the middle of an epoch. "
                "Received others:\n  " + "\n  ".join(lines)
            )
        assign(model, groups, arrays)

    if keras.backend.backend() == "tensorflow" and len(model.metrics_variables) < len(there):
        _build_metrics_first(model, assign_metrics)
    else:
        assign_metrics()


def versions() -> dict[str, str]:
    """The versions that must be equal for a run to resume bit for bit."""
    backend = keras.backend.backend()
    return {
        "backend": backend,
        backend: __import__(backend).__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def optimizer_name(model: keras.Model) -> str:
    """The optimizer's name, without the number that Keras may append."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return re.sub(r"_\d+$", "", optimizer.name)


def _build_metrics_first(model: keras.Model, then: Callable[[], None]) -> None:
    """On TensorFlow, builds the metrics before the next training step, and calls `then`.

    Keras creates metric variables while it traces the first step, too late to restore them. Only
    the step receives the data that determines their shapes, so it is wrapped for one call.
    """
    function = model.train_function

    def first(iterator):
        model.train_function = function
        batch = keras.tree.map_structure(
            lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name),
            iterator.element_spec,
        )
        model._symbolic_build(data_batch=batch)
        then()
        return function(iterator)

    model.train_function = first


def _differences(group: str, saved: list[Entry], present: list[Entry]) -> list[str]:
    if len(saved) == len(present):
        return [
            f"{_text(old)} in the checkpoint, {_text(new)} here"
            for old, new in zip(saved, present, strict=True)
            if old[1:] != new[1:] or _stem(group, old[0]) != _stem(group, new[0])
        ]
    old, new = ({entry[0]: entry for entry in entries} for entries in (saved, present))
    lines = [f"{_text(old[path])} only in the checkpoint" for path in old if path not in new]
    lines += [f"{_text(new[path])} only here" for path in new if path not in old]
    for path in old:
        if path in new and old[path] != new[path]:
            lines.append(f"{_text(old[path])} in the checkpoint, {_text(new[path])} here")
    return [f"{len(saved)} variables in the checkpoint, {len(present)} here", *lines]


def _stem(group: str, path: str) -> str:
    """A path without Keras' numbers, and without the names of optimizers.

    With loss scaling there are one or two, depending on when Keras built the inner optimizer.
    """
    if group == OPTIMIZER:
        path = path.rsplit("/", 1)[-1]
    return re.sub(r"_\d+(?=_|/|$)", "", path)


def _text(entry: Entry) -> str:
    path, shape, dtype = entry
    return f"{path} {tuple(shape)} {dtype}"


def _is_finite(values: np.ndarray) -> bool:
    # A dot product needs no second array. It may overflow though every value is finite.
    if values.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(values, values)):
                return True
    return bool(np.isfinite(values).all())

"""Keras' `fit` and `evaluate` under MultiWorkerMirroredStrategy, which fail in Keras 3.15.1.

See https://github.com/keras-team/keras/issues/20585. In keras/src/backend/tensorflow/trainer.py

1. `_maybe_symbolic_build` asks the strategy for the mean of a batch, of which it needs shapes and
   dtypes only. It gets: "Attempt to convert a value (PerReplica:...".
2. `reduce_per_replica` takes the mean of each replica's metrics over axis 0. They are scalars.

What is put around the two gives a Keras that is right what it makes itself. So it is there under
every Keras whose two functions have the known parameters, and not where they have changed: a test
says when Keras no longer needs it, and this file can go.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

logger = logging.getLogger(__name__)

# The last release known to need it.
LAST_WRONG = (3, 15, 1)
KNOWN = {
    "_maybe_symbolic_build": ["self", "iterator", "data_batch"],
    "reduce_per_replica": ["values", "strategy", "reduction"],
}


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Corrects Keras, and takes it back."""
    owners = {"_maybe_symbolic_build": trainer.TensorFlowTrainer, "reduce_per_replica": trainer}
    found = {name: getattr(owner, name, None) for name, owner in owners.items()}
    changed = [
        name
        for name, function in found.items()
        if function is None or list(inspect.signature(function).parameters) != KNOWN[name]
    ]
    if changed:
        _check_newer(changed)
        yield
        return
    build = _build_of_one_replica(found["_maybe_symbolic_build"])
    trainer.TensorFlowTrainer._maybe_symbolic_build = build
    trainer.reduce_per_replica = _mean_of_scalars(found["reduce_per_replica"])
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(owner, name, found[name])


def _check_newer(changed):
    numbers = (part for part in keras.__version__.split(".")[:3])
    version = tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in numbers)
    if version <= LAST_WRONG:
        raise RuntimeError(
            f"keras {keras.__version__} must be corrected to train in several processes "
            f"(keras-team/keras#20585), and its {', '.join(changed)} cannot be: "
            "something has replaced it"
        )
    logger.warning(
        "Keras %s has changed %s: training in several processes is left to it, uncorrected "
        "(keras-team/keras#20585)",
        *(keras.__version__, ", ".join(changed)),
    )


def _build_of_one_replica(keras_build):
    @functools.wraps(keras_build)
    def build(self, iterator=None, data_batch=None):
        # (It does nothing for a model that was made outside of the strategy.)
        if iterator is not None and self._distribute_strategy is not None:
            local = self._distribute_strategy.experimental_local_results
            for _, _, batches in iterator:
                parts = next(batches)
                data_batch = keras.tree.map_structure(lambda part: local(part)[0], parts)
                iterator = None
                break
        return keras_build(self, iterator, data_batch)

    return build


def _mean_of_scalars(keras_reduce):
    @functools.wraps(keras_reduce)
    def reduce(values, strategy, reduction):
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if several and reduction in ("auto", "mean"):
            mean = functools.partial(strategy.reduce, "MEAN", axis=None)
            return keras.tree.map_structure(mean, values)
        return keras_reduce(values, strategy, reduction)

    return reduce

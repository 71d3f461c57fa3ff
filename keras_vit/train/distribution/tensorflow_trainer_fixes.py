"""Fixes of Keras 3.15.1's `fit` and `evaluate` under a strategy of TensorFlow.

MultiWorkerMirroredStrategy fails: https://github.com/keras-team/keras/issues/20585. What is wrong,
in keras/src/backend/tensorflow/trainer.py:

1. `_maybe_symbolic_build` asks the strategy for the mean of a batch, of which it needs only shapes
   and dtypes. The error: "Attempt to convert a value (PerReplica:...". Under MirroredStrategy it
   works, but a generator has lost the batches that were read for it.
2. `reduce_per_replica` takes the mean of each replica's metrics over axis 0. They are scalars.
3. `fit` splits a batch into unequal parts and takes the mean of their means, or fails on an empty
   part: "Missing 1-th output". Here such a batch is refused. (`evaluate` and `predict` are right.)

The wrappers around the three functions do not change the results of a correct Keras. They are used
with every version in which the functions have the known parameters. On versions where these have
changed, the original functions are kept. A test fails when Keras no longer needs this file.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

logger = logging.getLogger(__name__)

# The last release known to need it.
LAST_WRONG = (3, 15, 1)
KNOWN = {
    "_maybe_symbolic_build": ["self", "iterator", "data_batch"],
    "reduce_per_replica": ["values", "strategy", "reduction"],
    "TFEpochIterator": ["distribute_strategy", "args", "kwargs"],
}


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Applies the fixes, and restores Keras at the end."""
    owners = dict.fromkeys(KNOWN, trainer) | {"_maybe_symbolic_build": trainer.TensorFlowTrainer}
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
    build = _build_of_shapes(found["_maybe_symbolic_build"])
    trainer.TensorFlowTrainer._maybe_symbolic_build = build
    trainer.reduce_per_replica = _mean_of_scalars(found["reduce_per_replica"])
    trainer.TFEpochIterator = _iterator_of_equal_parts(found["TFEpochIterator"])
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
            f"keras {keras.__version__} must be corrected to train on several devices "
            f"(keras-team/keras#20585), and its {', '.join(changed)} cannot be: "
            "something has replaced it"
        )
    logger.warning(
        "Keras %s has changed %s: training on several devices is left to it, uncorrected "
        "(keras-team/keras#20585)",
        *(keras.__version__, ", ".join(changed)),
    )


def _build_of_shapes(keras_build):
    @functools.wraps(keras_build)
    def build(self, iterator=None, data_batch=None):
        # (Not for a model that was built outside the strategy.)
        if iterator is not None and self._distribute_strategy is not None:
            spec = iterator._distributed_dataset.element_spec
            data_batch, iterator = keras.tree.map_structure(_of_one_replica, spec), None
        return keras_build(self, iterator, data_batch)

    return build


def _of_one_replica(spec):
    spec = getattr(spec, "_value_specs", [spec])[0]
    return None if isinstance(spec, tf.OptionalSpec) else spec  # Keras' way to say None


def _mean_of_scalars(keras_reduce):
    @functools.wraps(keras_reduce)
    def reduce(values, strategy, reduction):
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if several and reduction in ("auto", "mean"):
            mean = functools.partial(strategy.reduce, "MEAN", axis=None)
            return keras.tree.map_structure(mean, values)
        return keras_reduce(values, strategy, reduction)

    return reduce


def _iterator_of_equal_parts(keras_iterator):
    @functools.wraps(keras_iterator)
    def iterator(*args, distribute_strategy, **kwargs):
        replicas = distribute_strategy.num_replicas_in_sync
        if "class_weight" not in kwargs or replicas == 1:  # only `fit` passes it
            return keras_iterator(distribute_strategy, *args, **kwargs)
        made = keras_iterator(_EqualParts(distribute_strategy), *args, **kwargs)
        # Known in advance only for arrays.
        arrays = isinstance(made.data_adapter, ArrayDataAdapter)
        rest = made.data_adapter.partial_batch_size if arrays else None
        if rest and rest % replicas and not made.steps_per_epoch:
            raise ValueError(
                f"batch_size must leave a last batch that is a multiple of the {replicas} devices, "
                f"or some samples be left out. Received: a last batch of {rest}"
            )
        return made

    return iterator


class _EqualParts:
    """A strategy that splits batches into equal parts only."""

    def __init__(self, strategy):
        self.strategy = strategy

    def experimental_distribute_dataset(self, dataset):
        replicas = self.strategy.num_replicas_in_sync

        def check(*batch):
            size = tf.shape(tf.nest.flatten(batch)[0])[0]
            says = f"batches must be a multiple of the {replicas} devices. Received: a batch of"
            tf.debugging.Assert(size % replicas == 0, [says, size])
            return batch if isinstance(dataset.element_spec, tuple) else batch[0]

        return self.strategy.experimental_distribute_dataset(dataset.map(check))

"""Puts the data of `fit` on the devices of JAX, in one process or several."""

import contextlib
import functools
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from keras.src.backend.jax import distribution_lib
from keras.src.backend.jax.trainer import JAXEpochIterator

# The functions of Keras that are replaced.
_PLACES = (
    (distribution_lib, "distribute_data_input"),
    (JAXEpochIterator, "_get_distributed_iterator"),
)
_FEED, _BATCHES = (getattr(*place) for place in _PLACES)


class SplitBatches:
    """Mixed into a Keras distribution: splits batches over its devices.

    Deviation: with several processes Keras takes only tf.data. It splits whole batches too, but
    loses their number, and gives processes unequal parts of a smaller last batch. Here each process
    has the whole batch of any data, and gives its devices their parts. Datasets in `own` hold only
    the part of this process.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = weakref.WeakSet()
        self.auto_shard_dataset = False

    def is_own(self, dataset: Any) -> bool:
        """Whether a dataset, or the one it was made from, holds only the part of this process."""
        while dataset is not None and dataset not in self.own:
            dataset = getattr(dataset, "_input_dataset", None)  # Keras maps it for class_weight
        return dataset is not None

    def feed(self, values: Any, layout: Any = None, batch_dim_name: Any = None, own: bool = False):
        """Gives each device its part of an array, or all of it if it cannot be split evenly.

        Deviation: Keras raises an IndivisibleError then, as for the last batch of arrays. With the
        whole batch each device computes the same, which is right but slower.
        """
        if values is None:
            return None
        layout = self.get_data_layout(values.shape).backend_layout
        if own:
            here = self._replicas // self.num_processes
            if len(values) % here:
                raise ValueError(
                    f"batches must be a multiple of the {self._replicas} devices. Received: a part "
                    f"of {len(values)} samples for the {here} devices of process "
                    f"{jax.process_index()}"
                )
        elif len(values) % self._replicas:
            everywhere = jax.sharding.PartitionSpec()
            layout = jax.sharding.NamedSharding(self.device_mesh.backend_mesh, everywhere)
        if own or self.num_processes == 1:
            return _FEED(values, layout, batch_dim_name)
        return jax.make_array_from_callback(values.shape, layout, lambda index: values[index])

    def batches(self, adapter: Any) -> Iterator[Any]:
        """The batches of Keras' data adapter, on the devices."""
        own = self.is_own(getattr(adapter, "_dataset", None))
        for number, batch in enumerate(adapter.get_jax_iterator()):
            if number == 0 and self.num_processes > 1 and not own:
                self._check_same(batch)
            yield keras.tree.map_structure(functools.partial(self.feed, own=own), batch)

    def _check_same(self, batch):
        """Raises in every process if their first batches differ."""
        mark = 0
        for values in keras.tree.flatten(batch):
            if values is not None:
                mark = zlib.crc32(np.ascontiguousarray(values), mark)
        if np.any(multihost_utils.process_allgather(np.uint32(mark)) != mark):
            raise ValueError(
                "a batch must be the same in all processes, each takes its part of it. Received: "
                "different ones. Shuffle with one seed, or give each process its part, with "
                "devices.distribute"
            )

    @property
    def _replicas(self):
        shape = dict(zip(self.device_mesh.axis_names, self.device_mesh.shape, strict=True))
        return shape[self.batch_dim_name]


@contextlib.contextmanager
def feeding(distribution: Any) -> Iterator[None]:
    """Makes Keras feed its models by a `SplitBatches`. For other distributions nothing changes."""
    former = [getattr(*place) for place in _PLACES]
    new = (_FEED, _BATCHES)
    if isinstance(distribution, SplitBatches):
        new = distribution.feed, lambda self, distribution: distribution.batches(self.data_adapter)
    for place, function in zip(_PLACES, new, strict=True):
        setattr(*place, function)
    try:
        yield
    finally:
        for place, function in zip(_PLACES, former, strict=True):
            setattr(*place, function)

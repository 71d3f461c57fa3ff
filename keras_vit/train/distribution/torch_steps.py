"""Training and test steps for Keras on torch in several processes.

`torch.py` installs them.
"""

import ast
import contextlib
import contextvars
import hashlib
import inspect
import re
import textwrap
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.src.backend.torch.trainer import TorchTrainer

from keras_vit.train.distribution.devices import Devices

# Hashes of the steps of Keras for which the replacements were written.
KNOWN_STEPS = {"train_step": "2efbe660520ab77c", "test_step": "aad112ecc9a336d4"}

LOSSES = ("compute_loss", "compute_metrics")
"""What a model may compute from its images in its own way."""
TRAIN, TEST = 0, 1
_offset = contextvars.ContextVar("offset", default=0)  # added to the seeds of seed generators


def own_parts(dataset: Iterable, number: int) -> torch.utils.data.DataLoader:
    """A loader of the batches of a dataset, marked as `OwnPart`.

    Args:
        dataset: Tuples of arrays.
        number: Number of batches; negative if unknown.
    """
    batches = _Batches(dataset) if number < 0 else _CountedBatches(dataset, int(number))
    return torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=_as_it_is)


class OwnPart(NamedTuple):
    """A batch that is already this process' part, and is not split again."""

    x: Any
    y: Any = None
    sample_weight: Any = None


class _Batches(torch.utils.data.IterableDataset):
    """The batches of a dataset as tensors, marked."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        for batch in self.dataset:
            batch = batch if isinstance(batch, (tuple, list)) else (batch,)
            yield OwnPart(*(_map(keras.ops.convert_to_tensor, part) for part in batch))


class _CountedBatches(_Batches):
    def __init__(self, dataset, number):
        super().__init__(dataset)
        self.number = number

    def __len__(self):
        return self.number


class _Steps:
    """The replacements for the methods of Keras' trainer.

    Args:
        devices: The processes.
    """

    def __init__(self, devices):
        self.devices = devices
        # The same seeds would give each process the dropout masks of the others, on other images.
        # The offset is added to the drawn seed, not to the state, which stays equal everywhere and
        # is saved by one process. The golden ratio keeps the seeds of two processes apart.
        offset = devices.process * 0x9E3779B1 % 2**32
        self.offset = offset - 2**32 if offset >= 2**31 else offset  # Keras' seeds are int32
        self.met = weakref.WeakSet()  # models with the weights of process 0

    def train(self, model, data):
        batch = self._batch(TRAIN, model, data)
        model.zero_grad()
        weights = model.trainable_weights
        if not weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            loss, predictions = _Forward(model, self.devices)(batch, training=True)
        else:
            loss, predictions = self._parallel(model, weights)(batch, training=True)
        model._loss_tracker.update_state(loss, sample_weight=batch.size)
        if weights:
            model.optimizer.scale_loss(loss).backward()
            gradients = [v.value.grad for v in weights]
            with torch.no_grad():
                model.optimizer.apply(gradients, weights)
        return _metrics(model, batch, predictions)

    def test(self, model, data):
        batch = self._batch(TEST, model, data)
        loss, predictions = _Forward(model, self.devices)(batch, training=False)
        model._loss_tracker.update_state(loss, sample_weight=batch.size)
        return _metrics(model, batch, predictions)

    def meet(self, model):
        """Prepares a model. Called before the first batch of `fit` or `evaluate`."""
        for name in KNOWN_STEPS:
            if getattr(type(model), name) is not getattr(TorchTrainer, name):
                raise NotImplementedError(
                    f"{type(model).__name__} must use Keras' own {name} with several processes: "
                    "its own would ignore the other processes"
                )
        if model.jit_compile:
            self.devices.jit_compile(True)
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                raise NotImplementedError(
                    f"{layer.name}: BatchNormalization must not train with several processes: it "
                    "would see one process' part of the batch"
                )
        # Arrays that `fit` shuffles are shuffled by torch's generator.
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)
        if model in self.met:
            return
        variables = [*model.variables]
        if model.optimizer is not None:
            variables += model.optimizer.variables
        self._check_same(variables)
        with torch.no_grad():
            for variable in variables:
                dist.broadcast(variable.value.data, 0)
        self.met.add(model)

    def _check_same(self, variables):
        facts = [f"{v.path} {v.dtype} {tuple(v.shape)}" for v in variables]
        text = "\n".join(re.sub(r"_\d+", "", fact) for fact in facts)
        own = np.frombuffer(hashlib.sha256(text.encode()).digest(), "uint8")
        differ = (self.devices.gather(own) != own).any(1).nonzero()[0]
        if differ.size:
            raise ValueError(
                "model and optimizer must be the same in every process. Received: other variables "
                f"on process {', '.join(map(str, differ))} than on {self.devices.process}"
            )

    def _parallel(self, model, weights):
        """DistributedDataParallel of the current trainable weights."""
        parameters = [v.value for v in weights]
        made = model.__dict__.get("_data_parallel")
        if made is not None and [*map(id, made.module.weights)] == [*map(id, parameters)]:
            return made
        forward = _Forward(model, self.devices, parameters)
        # The weights are equal already. A weight may be unused, but then in every step: looking for
        # unused ones in each step costs time, and torch warns.
        made = torch.nn.parallel.DistributedDataParallel(
            forward, init_sync=False, static_graph=True
        )
        # Not as an attribute, which Keras and torch would track, save and count.
        model.__dict__["_data_parallel"] = made
        return made

    def _batch(self, kind, model, data):
        """The batch of a step, once all processes are known to have the same one."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        own = isinstance(data, OwnPart)
        size = len(_leaves(x)[0])
        mark = 0
        if not own:  # each process takes its part of the global batch
            for leaf in (*_leaves(y), *_leaves(weights), *(leaf[:1] for leaf in _leaves(x))):
                mark = zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(leaf)), mark)
        mine = np.array([kind, own, size, mark])
        seen = self.devices.gather(mine)
        if (seen != mine).any():
            raise ValueError(self._difference(seen))
        count, number = self.devices.processes, self.devices.process
        if own:
            y, weights = (
                _map(lambda v: _whole(keras.ops.convert_to_tensor(v), count), v)
                for v in (y, weights)
            )
            # Keras' own loss does not read the images; sending them to all takes time.
            own = any(getattr(type(model), f) is not getattr(keras.Model, f) for f in LOSSES)
            reads = getattr(model, "loss_reads_images", own)
            images = _map(lambda v: _whole(v, count), x) if reads else None
            return _Batch(x, y, weights, images, size * count, size)
        part = -(-size // count)
        rows = slice(number * part, (number + 1) * part)
        if size % count:  # padded with the last sample, whose prediction is dropped
            rows = np.minimum(np.arange(number * part, (number + 1) * part), size - 1)
        own = _map(lambda v: v[rows], x)
        return _Batch(own, y, weights, x, size, part)

    def _difference(self, seen):
        kinds, own, sizes, _ = seen.T
        if len({*kinds}) > 1:
            what = ", ".join(f"{n} {'evaluates' if k else 'trains'}" for n, k in enumerate(kinds))
            return f"all processes must do the same, with as many batches. Received: {what}"
        if len({*own}) > 1:
            what = ", ".join(f"{n}: {'part' if k else 'whole'}" for n, k in enumerate(own))
            return f"devices.distribute must be used on all processes or none. Received: {what}"
        if len({*sizes}) > 1:
            what = ", ".join(f"{n}: {size}" for n, size in enumerate(sizes))
            return f"batches must be of one size on all processes. Received: samples of {what}"
        return (
            "a batch must be the same on all processes, each takes its part of it. Received: "
            "different batches. Shuffle with one seed, or give each process its part, with "
            "devices.distribute"
        )


class _Batch(NamedTuple):
    x: Any  # the part of this process
    y: Any  # of all processes, like the weights
    sample_weight: Any
    images: Any  # x of all processes; None if the loss does not read it
    size: int  # samples of all processes
    part: int  # samples of this one


class _Forward(torch.nn.Module):
    """Computes the loss of the global batch.

    Args:
        model: A Keras model.
        devices: The processes.
        weights: Parameters for DistributedDataParallel.
    """

    def __init__(self, model, devices, weights=()):
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)
        self._model = (model,)  # in a tuple, where torch does not look for parameters
        self._processes = (devices.processes, devices.process)

    def forward(self, batch, training):
        (model,) = self._model
        has_argument = {"training": training} if model._call_has_training_arg else {}
        predictions = model(batch.x, **has_argument)

        def of_all(own):
            if own.ndim == 0 or len(own) != batch.part:
                raise ValueError(
                    "a model must predict something for each sample with several processes. "
                    f"Received: shape {tuple(own.shape)} for {batch.part} samples"
                )
            return _AllParts.apply(own, *self._processes)[: batch.size]

        predictions = _map(of_all, predictions)
        loss = model._compute_loss(
            x=batch.images,
            y=batch.y,
            y_pred=predictions,
            sample_weight=batch.sample_weight,
            training=training,
        )
        return loss, _map(torch.Tensor.detach, predictions)


class _AllParts(torch.autograd.Function):
    """Gathers the parts of all processes; the gradient flows back to this process' part."""

    @staticmethod
    def forward(ctx, own, processes, process):
        ctx.which = processes, process
        return _whole(own, processes)

    @staticmethod
    def backward(ctx, gradient):
        processes, process = ctx.which
        # DistributedDataParallel divides by the number of processes.
        return gradient.chunk(processes)[process] * processes, None, None


def _whole(own, processes):
    """The tensors of all processes, concatenated along the first axis."""
    own = own.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(processes)]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def _metrics(model, batch, predictions):
    return model.compute_metrics(
        batch.images, batch.y, predictions, sample_weight=batch.sample_weight
    )


@contextlib.contextmanager
def replaced(devices: Devices) -> Iterator[None]:
    """Replaces the steps of Keras' trainer, and restores them at the end."""
    steps = _Steps(devices)
    generator = keras.random.SeedGenerator
    next_seed = generator.next
    make_train, make_test = TorchTrainer.make_train_function, TorchTrainer.make_test_function

    def train_step(self, data):
        token = _offset.set(steps.offset)
        try:
            return steps.train(self, data)
        finally:
            _offset.reset(token)

    def test_step(self, data):
        return steps.test(self, data)

    def make_train_function(self, force=False):
        steps.meet(self)
        return make_train(self, force)

    def make_test_function(self, force=False):
        steps.meet(self)
        return make_test(self, force)

    def next_(self, ordered=True):
        seed = next_seed(self, ordered)
        return seed + _offset.get() if _offset.get() else seed

    new = (train_step, test_step, make_train_function, make_test_function)
    places = [(TorchTrainer, f.__name__, f) for f in new] + [(generator, "next", next_)]
    before = [(cls, name, getattr(cls, name)) for cls, name, _ in places]
    for cls, name, method in places:
        setattr(cls, name, method)
    try:
        yield
    finally:
        for cls, name, method in before:
            setattr(cls, name, method)
        for model in steps.met:
            model.__dict__.pop("_data_parallel", None)


def check_keras() -> None:
    """Raises if Keras' steps have changed since the replacements were written."""
    for name, known in KNOWN_STEPS.items():
        if (found := _digest(getattr(TorchTrainer, name, None))) != known:
            raise RuntimeError(
                f"{__name__} must be revised for Keras {keras.__version__}: its {name} on torch "
                f"has changed ({found}) since the replacement was written"
            )


def _digest(function):
    """A hash of the code, without comments and line breaks."""
    if function is None:
        return "missing"
    code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


# -- nested batches


def _map(function, nested):
    return None if nested is None else keras.tree.map_structure(function, nested)


def _leaves(nested):
    return [leaf for leaf in keras.tree.flatten(nested) if leaf is not None]


def _as_it_is(batch):
    return batch

"""keras-cv's augmentation layers in a pipeline whose randomness is a function of seeds.

keras-cv draws from `tf.random` and from a `tf.random.Generator`, which keep a state: a resumed run
would see other images. `seeded` replaces both while a layer is made and traced, so that each draw
is a stateless one of the seed. Only the layers of `STATEFUL` keep their state; a warning says so.
"""

import collections
import contextlib
import difflib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from keras_vit.train.recipe import Augment

BATCH_LAYERS = ("CutMix", "FourierMix", "MixUp", "Mosaic")
"""Layers that combine the images of a batch, and their labels."""
STATEFUL = ("AugMix", "FourierMix")
"""Layers that draw in loops of the graph, where a stateless draw would repeat itself."""
INSTEAD = {
    "RandomApply": "RandomAugmentationPipeline with `rate`",
    "RepeatedAugmentation": "augment.repeats",
}
"""What does the work of layers that tf.data or our batches have no place for."""
UNIT_RANGE = ("RandomJpegQuality",)
"""Layers that take pixels from 0 to 1 and have no `value_range` to say otherwise."""
REPLACED = ("uniform", "normal", "gamma", "shuffle", "get_global_generator", "Generator")
"""What keras-cv calls in `tf.random`."""
STREAM = 2**31 - 1
"""Folded into a seed, so that no draw here is one of our own operations' draws."""
TRACING = threading.RLock()
"""`seeded` changes a module for the whole process: one thread at a time."""

logger = logging.getLogger(__name__)

Pairs = tuple[tuple[str, Mapping[str, Any]], ...]


def augment_with_layers(image: tf.Tensor, layers: Pairs, seed: tf.Tensor) -> tf.Tensor:
    """Applies keras-cv's layers to one image.

    Args:
        image: uint8 (H, W, C).
        layers: Names in `keras_cv.layers` and their arguments.
        seed: Two integers; all randomness comes from them.

    Returns:
        uint8 (H, W, C).
    """
    x, seed = tf.cast(image, tf.float32), tf.random.fold_in(seed, STREAM)
    for number, (name, arguments) in enumerate(layers):
        x = _call(name, arguments, x, tf.random.fold_in(seed, number))
        x = _same_shape(x, image, name)
    return tf.cast(tf.round(tf.clip_by_value(x, 0.0, 255.0)), tf.uint8)


def mix_with_layers(
    images: tf.Tensor, targets: tf.Tensor, layers: Pairs, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Applies keras-cv's MixUp, CutMix, FourierMix or Mosaic to a batch.

    Args:
        images: float32 or uint8 (B, H, W, C), 0 to 255.
        targets: float32 (B, K), one-hot.
        layers: Names in `keras_cv.layers` and their arguments.
        seed: Two integers.

    Returns:
        Images and targets of the same shapes.
    """
    batch: Any = {"images": tf.cast(images, tf.float32), "labels": targets}
    seed = tf.random.fold_in(seed, STREAM)
    for number, (name, arguments) in enumerate(layers):
        batch = _call(name, arguments, batch, tf.random.fold_in(seed, number))
    return (
        tf.ensure_shape(batch["images"], images.shape),
        tf.ensure_shape(batch["labels"], targets.shape),
    )


def split_layers(augment: Augment) -> tuple[Pairs, Pairs]:
    """The layers for one image, and those for a batch. Raises if a batch's one is not last."""
    for_image = tuple(pair for pair in augment.keras_cv if pair[0] not in BATCH_LAYERS)
    for_batch = tuple(pair for pair in augment.keras_cv if pair[0] in BATCH_LAYERS)
    if for_image + for_batch != augment.keras_cv:
        raise ValueError(
            f"augment.keras_cv must have layers for a batch ({', '.join(BATCH_LAYERS)}) last. "
            f"Received: {', '.join(name for name, _ in augment.keras_cv)}"
        )
    return for_image, for_batch


def _same_shape(x, image, name):
    rule = "augment.keras_cv must have layers that keep the size and the channels of images"
    if isinstance(x, tf.RaggedTensor) or not x.shape.is_compatible_with(image.shape):
        raise ValueError(f"{rule}. Received: {name}, which turns {image.shape} into {x.shape}")
    if not x.shape.is_fully_defined():
        rule = f"{rule}. Received: {name}"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(x), image.shape, rule)]):
            x = tf.ensure_shape(tf.identity(x), image.shape)
    return x


def _call(name, arguments, inputs, seed):
    """One layer's outputs. Raises if they depend on more than the inputs and `seed`."""
    stateful = name in STATEFUL
    if stateful:
        logger.warning(
            "augment.keras_cv: %s draws random numbers of its own, so a resumed run sees other "
            "images than one that never stopped",
            name,
        )
    before = _random_operations()
    pixels = 255.0 if name in UNIT_RANGE else 1.0
    with _same_variable_scope(), contextlib.nullcontext() if stateful else seeded(seed):
        layer = make_layer(name, arguments)
        try:
            outputs = layer(inputs / pixels if pixels > 1 else inputs, training=True)
        except Exception as error:
            shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
            raise ValueError(
                f"augment.keras_cv: {name} cannot augment {shapes}: {error}"
            ) from error
    if not stateful and (drawn := _random_operations() - before):
        raise ValueError(
            "augment.keras_cv must name layers that keras_vit can seed, so that a resumed run sees "
            f"the same images. Received: {name}, which runs {', '.join(drawn)}"
        )
    outputs = tf.nest.map_structure(_in_tensorflow, outputs)
    return outputs * pixels if pixels > 1 else outputs


@contextlib.contextmanager
def _same_variable_scope() -> Iterator[None]:
    """Leaves TensorFlow's variable scope as it was, even after an error.

    `tf.map_fn`, in which layers run, sets a caching device while it is traced, and keeps it if that
    fails. No `tf.distribute.Strategy` could be entered afterwards.
    """
    scope = tf.compat.v1.get_variable_scope()
    before = scope.caching_device
    try:
        yield
    finally:
        if scope.caching_device is not before:
            scope.set_caching_device(before)


def _in_tensorflow(output):
    """Outside of tf.data, a layer returns arrays of Keras' backend."""
    return output if tf.is_tensor(output) else tf.convert_to_tensor(output)


def make_layer(name: str, arguments: Mapping[str, Any]) -> keras.layers.Layer:
    """A layer of `keras_cv.layers` for pixels from 0 to 255.

    Args:
        name: Its name.
        arguments: Its arguments. `layers` among them are pairs of a name and arguments too, as
            those of RandomChoice: `{"layers": [["RandomHue", {"factor": 0.2}]]}`.
    """
    import keras_cv  # it imports much

    cls = getattr(keras_cv.layers, name, None)
    if not _augments(cls):
        names = [other for other, found in vars(keras_cv.layers).items() if _augments(found)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
        raise ValueError(
            "augment.keras_cv must name augmentation layers of keras_cv.layers. "
            f"Received: {name!r}; near: {', '.join(near)}"
        )
    if name in INSTEAD:
        raise ValueError(
            f"augment.keras_cv must have {INSTEAD[name]} instead of {name}. Received: {name!r}"
        )
    arguments = dict(arguments)
    if "layers" in arguments:
        arguments["layers"] = [make_layer(*pair) for pair in arguments["layers"]]
    if "value_range" in inspect.signature(cls).parameters:
        arguments.setdefault("value_range", (0, 255))
    try:
        return cls(**arguments, dtype="float32")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"augment.keras_cv: {name} cannot be made of {arguments}: {error}"
        ) from error


def _augments(cls) -> bool:
    import keras_cv

    bases = (
        keras_cv.layers.BaseImageAugmentationLayer,
        keras_cv.layers.VectorizedBaseImageAugmentationLayer,
    )
    return isinstance(cls, type) and issubclass(cls, bases) and cls not in bases


@contextlib.contextmanager
def seeded(seed: tf.Tensor) -> Iterator[None]:
    """While it is open, each draw is a function of `seed` and of the number of the draw."""
    draws = _Draws(seed)
    stand_ins: dict[str, Callable] = {
        "uniform": draws.uniform,
        "normal": draws.normal,
        "gamma": draws.gamma,
        "shuffle": draws.shuffle,
        "get_global_generator": lambda: draws,
        "Generator": draws,
    }
    with TRACING:
        kept = {name: getattr(tf.random, name) for name in REPLACED}
        try:
            for name, stand_in in stand_ins.items():
                setattr(tf.random, name, stand_in)
            yield
        finally:
            for name, function in kept.items():
                setattr(tf.random, name, function)


class _Draws:
    """The part of `tf.random` and of `tf.random.Generator` that keras-cv uses, without a state."""

    def __init__(self, seed):
        self.seed = seed
        self.count = 0

    def from_seed(self, seed):
        return self  # the run's seed decides, not that of the layer

    def next_seed(self):
        if isinstance(tf.compat.v1.get_default_graph(), WhileBodyFuncGraph):
            raise ValueError("it draws random numbers in a loop, which keras_vit cannot seed")
        self.count += 1
        return tf.random.fold_in(self.seed, self.count)

    def uniform(self, shape, minval=0, maxval=None, dtype=tf.float32, seed=None, name=None):
        del seed, name
        dtype = tf.as_dtype(dtype)
        if maxval is None and not dtype.is_integer:
            maxval = 1
        return tf.random.stateless_uniform(shape, self.next_seed(), minval, maxval, dtype)

    def normal(self, shape, mean=0.0, stddev=1.0, dtype=tf.float32, seed=None, name=None):
        del seed, name
        return tf.random.stateless_normal(shape, self.next_seed(), mean, stddev, dtype)

    random_normal = normal  # GridMask calls it so

    def gamma(self, shape, alpha, beta=None, dtype=tf.float32, seed=None, name=None):
        del seed, name
        alpha = tf.convert_to_tensor(alpha, dtype)
        shape = tf.concat([tf.reshape(shape, [-1]), tf.shape(alpha)], 0)
        return tf.random.stateless_gamma(shape, self.next_seed(), alpha, beta, dtype)

    def shuffle(self, value, seed=None, name=None):
        del seed, name
        return tf.random.experimental.stateless_shuffle(value, self.next_seed())


def _random_operations() -> collections.Counter[str]:
    """How many operations of each kind that draw numbers with a state are traced so far."""
    if tf.executing_eagerly():
        return collections.Counter()
    definition = tf.compat.v1.get_default_graph().as_graph_def()
    inner = (node for function in definition.library.function for node in function.node_def)
    kinds = (node.op for node in (*definition.node, *inner))
    return collections.Counter(kind for kind in kinds if "Random" in kind and _is_stateful(kind))


@functools.cache
def _is_stateful(operation: str) -> bool:
    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful

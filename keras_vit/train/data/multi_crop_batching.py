"""Batches of views for self-distillation, made by tf.data on every backend."""

from typing import Any

import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.train.augment.image import normalize_batch
from keras_vit.train.augment.multi_crop import multi_crop
from keras_vit.train.data.batching import batch_options
from keras_vit.train.data.sources import Source, leave_accelerators
from keras_vit.train.data.splits import Part


def multi_crop_batches(
    source: Source,
    config: ViTConfig,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process: int = 0,
    processes: int = 1,
    **views: Any,
) -> tf.data.Dataset:
    """Infinite training batches of views for `DINO`, in the order of `train_batches`.

    Every batch is a function of (seed, step), as for `train_batches`: the seed of an image's views
    is (seed, number of the sample).

    Args:
        source: What `open_source` returns.
        config: The model's config: size, channels and pixel fields.
        batch_size: Images in a batch.
        seed: Decides order and views.
        start_step: The first batch. The batches are, bit for bit, those of a run from 0.
        process: The number of this process, which makes its part of every batch.
        processes: How many there are.
        **views: `local_size` and the other arguments of `multi_crop`.

    Returns:
        Pairs of views, a dict of float32 "global" (B, 2, H, W, C) and "local" (B, L, h, w, C), and
        float32 targets (B, num_classes), which DINO ignores.

    Example:

    >>> source = keras_vit.train.open_source(keras_vit.train.Data("tfds:cifar10"))
    >>> batches = keras_vit.train.multi_crop_batches(source, vit.config, 128, 0, local_size=16)
    >>> dino.fit(batches, epochs=100, steps_per_epoch=390, shuffle=False)
    """
    split = source.train
    if not 1 <= batch_size <= split.num_examples:
        raise ValueError(
            f"batch_size must be from 1 to the {split.num_examples} training images of "
            f"{source.name}. Received: batch_size={batch_size}"
        )
    leave_accelerators()
    part = Part.of(batch_size, process, processes) if processes > 1 else None

    def example_views(example):
        pair = tf.stack([tf.constant(seed, tf.int64), example["number"]])
        return multi_crop(example["image"], config, pair, **views), example["label"]

    def finish(images, labels):
        normalized = {"global": normalize_batch(images["global"], config)}
        if "local" in images:
            local = config.replace(image_size=views["local_size"])
            normalized["local"] = normalize_batch(images["local"], local)
        return normalized, tf.one_hot(labels, source.num_classes)

    examples = split.shuffled(seed, start_step * batch_size, 1, part)
    made = len(part.positions) if part else batch_size
    batches = examples.map(example_views, tf.data.AUTOTUNE).batch(made, drop_remainder=True)
    batches = batches.map(finish, tf.data.AUTOTUNE)
    batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return batches.prefetch(tf.data.AUTOTUNE).with_options(batch_options())

"""Batches for `fit` and `evaluate`, made by tf.data on every backend.

    source = open_source(Data("tfds:cifar10"))
    batches = train_batches(source, model.config, Augment(flip=True), 128, seed=0)
    model.fit(batches, steps_per_epoch=390, epochs=10)

The seed of an image's augmentation is (seed, number of the sample), the seed of a batch's mixing
(seed + 2**32, number of the batch). Together with the order of `splits.py`, every batch of a run is
a function of (seed, step).
"""

import dataclasses

import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.preprocessing import Preprocessing
from keras_vit.train import recipe
from keras_vit.train.augment.image import augment_image, normalize_batch
from keras_vit.train.augment.keras_cv_layers import mix_with_layers, split_layers
from keras_vit.train.augment.mixing import mix_batch
from keras_vit.train.data.decoding import decode
from keras_vit.train.data.sources import Source, leave_accelerators
from keras_vit.train.data.splits import IndexedSplit, Part, Split

MIX_SEED = 2**32  # no image's seed: seeds of a run are smaller


def train_batches(
    source: Source,
    config: ViTConfig,
    augment: recipe.Augment,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process: int = 0,
    processes: int = 1,
) -> tf.data.Dataset:
    """Infinite training batches of one size, which continue across the end of an epoch.

    With several processes each one makes its part of every batch. All parts together are the batch
    that one process would make.

    Args:
        source: What `open_source` returns.
        config: The model's config: size, channels and pixel fields.
        augment: What is done to the images.
        batch_size: Images in a batch.
        seed: Decides order and augmentation.
        start_step: The first batch. The batches are, bit for bit, those of a run from 0.
        process: The number of this process.
        processes: How many there are.

    Returns:
        Pairs of float32 images (B, H, W, C) and float32 targets (B, num_classes).
    """
    split = source.train
    if not 1 <= batch_size <= split.num_examples:
        raise ValueError(
            f"batch_size must be from 1 to the {split.num_examples} training images of "
            f"{source.name}. Received: batch_size={batch_size}"
        )
    leave_accelerators()
    start = start_step * batch_size
    mixes, (_, batch_layers) = augment.mixup or augment.cutmix, split_layers(augment)
    part = kept = None
    if processes > 1:
        part = Part.of(batch_size, process, processes)
        kept = range(len(part.positions))
        if batch_layers:  # any two samples may be mixed
            kept, part = part.positions, Part(batch_size, tuple(range(batch_size)))
        elif mixes:  # its own samples, then those they are mixed with, half a batch before
            others = tuple((i - batch_size // 2) % batch_size for i in part.positions)
            part = Part(batch_size, part.positions + others)
    if _whole_batches(split, config, augment):
        batches = split.shuffled(seed, start, augment.repeats, part, batch_size)
    else:

        def picture(example):
            pair = tf.stack([tf.constant(seed, tf.int64), example["number"]])
            image = augment_image(example["image"], config, augment, pair)
            return {"image": image, "label": example["label"]}

        examples = split.shuffled(seed, start, augment.repeats, part)
        made = len(part.positions) if part else batch_size
        batches = examples.map(picture, tf.data.AUTOTUNE).batch(made, drop_remainder=True)

    def finish(step, batch):
        images, targets = batch["image"], tf.one_hot(batch["label"], source.num_classes)
        pair = tf.stack([tf.constant(seed + MIX_SEED, tf.int64), step])
        if batch_layers:
            images, targets = mix_with_layers(images, targets, batch_layers, pair)
        images, targets = mix_batch(normalize_batch(images, config), targets, augment, pair)
        if kept is None or len(kept) == images.shape[0]:
            return images, targets
        return tf.gather(images, kept), tf.gather(targets, kept)

    batches = batches.enumerate(start_step).map(finish, tf.data.AUTOTUNE)
    batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return batches.prefetch(tf.data.AUTOTUNE).with_options(batch_options())


def test_batches(
    split: Split,
    config: ViTConfig,
    batch_size: int,
    num_classes: int,
    part: Part | None = None,
) -> tf.data.Dataset:
    """Every image once, in order, as `preprocess` makes it; the last batch is partial.

    With a `part`, for devices that share each batch, all batches have one size, and weights. The
    padding of the last batch has weight 0. The other samples weigh more, so that the sum of the
    weighted losses divided by the number of samples is the same as without padding. Metrics must
    then be `weighted_metrics`.

    Args:
        split: A split of a source.
        config: The model's config.
        batch_size: Images in a batch.
        num_classes: Size of a target.
        part: What this process makes of each batch.

    Returns:
        Pairs of float32 images (B, H, W, C) and float32 targets (B, num_classes), of known number;
        with a `part`, triples with float32 weights (B,).
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1. Received: batch_size={batch_size}")
    leave_accelerators()
    if part is not None and part.batch_size != batch_size:
        raise ValueError(
            f"part must be of batches of {batch_size}. Received: part of {part.batch_size}"
        )
    layer = Preprocessing(config, dtype="float32")  # whatever the model's precision

    def batch_of(example):
        images = layer(decode(example["image"], config.in_channels))
        targets = tf.one_hot(example["label"], num_classes)
        if part is None:
            return images, targets
        weight = part.padded(split.num_examples) / split.num_examples
        return images, targets, tf.where(example["number"] < split.num_examples, weight, 0.0)

    def picture(example):
        image, *others = batch_of(example)
        return tf.ensure_shape(image, config.input_shape), *others

    if _is_array(split):
        dataset = split.ordered(part, batch_size).map(batch_of, tf.data.AUTOTUNE)
    else:
        size = len(part.positions) if part else batch_size
        dataset = split.ordered(part).map(picture, tf.data.AUTOTUNE).batch(size)
    number = -(-split.num_examples // batch_size)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(number))
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(batch_options())


def _is_array(split: Split) -> bool:
    return isinstance(split, IndexedSplit) and split.images.dtype == tf.uint8


def _whole_batches(split: Split, config: ViTConfig, augment: recipe.Augment) -> bool:
    """Whether no image is changed by itself, so that a batch is one gather."""
    return (
        dataclasses.replace(augment, mixup=0.0, cutmix=0.0, repeats=1, keras_cv=())
        == recipe.Augment()
        and not split_layers(augment)[0]
        and _is_array(split)
        and tuple(split.images.shape[1:]) == config.input_shape
        and config.crop_fraction in (None, 1)
    )


def batch_options() -> tf.data.Options:
    """The options of every dataset for `fit` and `evaluate`."""
    options = tf.data.Options()
    options.deterministic = True
    # Workers share each batch; there are no files to distribute.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options

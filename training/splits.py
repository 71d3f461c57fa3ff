"""The order of samples: a function of (seed, epoch, index), whatever the machine or the process.

Sample number g of a run is draw g // repeats; draw d of n pictures is position d % n of permutation
d // n. Where any picture can be looked up (`IndexedSplit`), the permutation is drawn anew from its
number, so a run goes on from any sample at no cost and bit for bit. A stream of records
(`StreamedSplit`) is shuffled by files and in a buffer, and has to read what it skips.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import tensorflow as tf

BLOCK = 64
SHUFFLE_BUFFER = 8192  # encoded pictures, 0.9 GB of ImageNet's


class Split(Protocol):
    """Pictures with labels. An example is {"image", "label", "number"}.

    The image is uint8 (H, W, C) or a scalar string, an encoded picture; the label and the number,
    which counts samples from the start of training, are int64.
    """

    num_examples: int

    def shuffled(self, seed: int, start: int = 0, repeats: int = 1) -> tf.data.Dataset:
        """Examples without end, in a new order every epoch.

        Args:
            seed: The order's seed.
            start: Number of the first sample: what is left of a run that was cut off there.
            repeats: How often a picture comes, one right after the other. `num_examples` samples
                are an epoch still, and `repeats` of them show every picture `repeats` times.
        """
        ...

    def ordered(self) -> tf.data.Dataset:
        """Every example once, in the order they are stored in."""
        ...


class IndexedSplit:
    """A split in memory, or on disk as files with known paths.

    Pictures are looked up by the block: one at a time, that takes as long as to crop a small one.

    Args:
        images: uint8 (N, H, W, C), N encoded pictures, or N of what `read` takes.
        labels: N whole numbers.
        read: From an entry of `images` to the encoded picture, in TensorFlow.
    """

    def __init__(self, images, labels, read: Callable[[tf.Tensor], tf.Tensor] | None = None):
        with tf.device("CPU"):
            self.images = tf.convert_to_tensor(images)
            self.labels = tf.cast(labels, tf.int64)
        self.read = read
        self.num_examples = len(self.labels)
        if self.num_examples and np.min(self.labels) < 0:
            raise ValueError("A split must have a label for every picture; this one has none")

    def shuffled(self, seed, start=0, repeats=1, batch_size=None):
        """As `Split` has it, or in whole batches."""
        size = batch_size or BLOCK
        first, skipped = divmod(start, self.num_examples * repeats)

        def one_epoch(epoch):
            # Not `index_shuffle`, which needs no memory: on small sets its permutations are far
            # from uniform, and some leave everything in place.
            pair = tf.stack([tf.constant(seed, tf.int64), epoch])
            order = tf.random.experimental.stateless_shuffle(tf.range(self.num_examples), pair)
            return tf.data.Dataset.from_tensor_slices(tf.repeat(order, repeats))

        indices = tf.data.Dataset.counter(first).flat_map(one_epoch).skip(skipped)
        blocks = indices.batch(size, drop_remainder=True).enumerate()

        def examples(block, index):
            return self._at(index, start + block * size + tf.range(size, dtype=tf.int64))

        dataset = blocks.map(examples, tf.data.AUTOTUNE)
        return dataset if batch_size else self._one_by_one(dataset)

    def ordered(self, batch_size=None):
        """As `Split` has it, or in whole batches, the last one partial."""
        numbers = tf.data.Dataset.range(self.num_examples).batch(batch_size or BLOCK)
        dataset = numbers.map(lambda number: self._at(number, number), tf.data.AUTOTUNE)
        return dataset if batch_size else self._one_by_one(dataset)

    def _at(self, index, number):
        image, label = tf.gather(self.images, index), tf.gather(self.labels, index)
        return {"image": image, "label": label, "number": number}

    def _one_by_one(self, dataset):
        dataset = dataset.unbatch()
        if self.read is None:
            return dataset
        return dataset.map(lambda e: {**e, "image": self.read(e["image"])}, tf.data.AUTOTUNE)


class StreamedSplit:
    """A split that is read from record files.

    Args:
        num_examples: How many there are.
        open: From the seed of the files' order, or None for the order they are stored in, to one
            pass of {"image", "label"}.
    """

    def __init__(self, num_examples: int, open: Callable[[tf.Tensor | None], tf.data.Dataset]):
        self.num_examples = num_examples
        self.open = open

    def shuffled(self, seed, start=0, repeats=1):
        """As `Split` has it. It reads, but does not decode, the epoch's samples before `start`."""
        first, skipped = divmod(start // repeats, self.num_examples)

        @tf.autograph.experimental.do_not_convert
        def one_epoch(epoch):
            # TensorFlow mixes its global seed into every shuffle; a graph's own seed replaces it,
            # so that the order depends on nothing else. (0 is read as "none" further down.)
            tf.compat.v1.set_random_seed(1)
            pair = tf.stack([tf.constant(seed, tf.int64), epoch])
            files, buffer = tf.unstack(
                tf.random.stateless_uniform([2], pair, 1, 2**31 - 1, tf.int64)
            )
            return self.open(files).shuffle(
                SHUFFLE_BUFFER, seed=buffer, reshuffle_each_iteration=False
            )

        dataset = tf.data.Dataset.counter(first).flat_map(one_epoch).skip(skipped)
        if repeats > 1:
            dataset = dataset.flat_map(
                lambda example: tf.data.Dataset.from_tensors(example).repeat(repeats)
            ).skip(start % repeats)
        return dataset.enumerate(start).map(lambda number, e: {**e, "number": number})

    def ordered(self):
        """As `Split` has it."""
        return self.open(None).enumerate().map(lambda number, e: {**e, "number": number})

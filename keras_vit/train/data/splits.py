"""Splits of a source, and the order of their samples: a function of (seed, epoch, index).

Sample number g of a run is draw g // repeats; draw d of n images is position d % n of permutation
d // n. Where any image can be looked up (`IndexedSplit`), the permutation is drawn from its number,
so a run resumes at any sample at no cost, bit for bit. A stream of records (`StreamedSplit`) is
shuffled by files and in a buffer, and must read what it skips.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
import tensorflow as tf

BLOCK = 64
SHUFFLE_BUFFER = 8192  # encoded images, 0.9 GB of ImageNet's


@dataclasses.dataclass(frozen=True)
class Part:
    """The samples of each batch that a process makes, when several train together.

    Args:
        batch_size: Samples in a batch of all processes.
        positions: The samples of this process, as positions in the batch, in its own order.
    """

    batch_size: int
    positions: tuple[int, ...]

    @classmethod
    def of(cls, batch_size: int, process: int, processes: int) -> "Part":
        """The part of one of several processes, which get equal parts in order."""
        if batch_size % processes:
            raise ValueError(
                f"batch_size must be a multiple of the {processes} processes. "
                f"Received: batch_size={batch_size}"
            )
        size = batch_size // processes
        return cls(batch_size, tuple(range(process * size, (process + 1) * size)))

    def padded(self, num_examples: int) -> int:
        """The number of samples, rounded up to whole batches."""
        return -(-num_examples // self.batch_size) * self.batch_size

    def take(self, batch):
        """The rows of a batch that belong to this part."""
        return tf.nest.map_structure(lambda values: tf.gather(values, self.positions), batch)


class Split(Protocol):
    """Images with labels. An example is {"image", "label", "number"}.

    The image is uint8 (H, W, C) or a scalar string, an encoded image; the label and the number,
    which counts samples from the start of training, are int64.
    """

    num_examples: int

    def shuffled(
        self, seed: int, start: int = 0, repeats: int = 1, part: Part | None = None
    ) -> tf.data.Dataset:
        """Infinite examples, in a new order every epoch.

        Args:
            seed: The order's seed.
            start: Number of the first sample, where a run resumes.
            repeats: How often an image comes in a row. An epoch still has `num_examples` samples;
                `repeats` epochs show every image `repeats` times.
            part: Only these of each batch.
        """
        ...

    def ordered(self, part: Part | None = None) -> tf.data.Dataset:
        """Every example once, in stored order.

        Args:
            part: Only these of each batch. The last batch is padded with the first examples,
                numbered from `num_examples`.
        """
        ...


class IndexedSplit:
    """A split in memory, or on disk as files with known paths.

    Images are looked up in blocks: one at a time takes as long as cropping a small image.

    Args:
        images: uint8 (N, H, W, C), N encoded images, or N of what `read` takes.
        labels: N whole numbers.
        read: TensorFlow function from an entry of `images` to the encoded image.
    """

    def __init__(self, images, labels, read: Callable[[tf.Tensor], tf.Tensor] | None = None):
        with tf.device("CPU"):
            self.images = tf.convert_to_tensor(images)
            self.labels = tf.cast(labels, tf.int64)
        self.read = read
        self.num_examples = len(self.labels)
        if self.num_examples and np.min(self.labels) < 0:
            raise ValueError("A split must have a label for every image; this one has none")

    def shuffled(self, seed, start=0, repeats=1, part=None, batch_size=None):
        """See `Split`; with `batch_size`, in whole batches."""
        size = part.batch_size if part else batch_size or BLOCK
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
            pair = index, start + block * size + tf.range(size, dtype=tf.int64)
            return self._at(*(part.take(pair) if part else pair))

        dataset = blocks.map(examples, tf.data.AUTOTUNE)
        return dataset if batch_size else self._one_by_one(dataset)

    def ordered(self, part=None, batch_size=None):
        """See `Split`; with `batch_size`, in batches, the last one partial without a part."""
        size = part.padded(self.num_examples) if part else self.num_examples
        numbers = tf.data.Dataset.range(size)
        numbers = numbers.batch(part.batch_size if part else batch_size or BLOCK)

        def examples(number):
            number = part.take(number) if part else number
            return self._at(number % self.num_examples, number)

        dataset = numbers.map(examples, tf.data.AUTOTUNE)
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
        num_examples: Number of examples.
        open: Function from the seed of the files' order, or None for the stored order, to one
            pass of {"image", "label"}.
    """

    def __init__(self, num_examples: int, open: Callable[[tf.Tensor | None], tf.data.Dataset]):
        self.num_examples = num_examples
        self.open = open

    def shuffled(self, seed, start=0, repeats=1, part=None):
        """See `Split`. Reads, but does not decode, the epoch's samples before `start`.

        The same holds for samples of other processes.
        """
        first, skipped = divmod(start // repeats, self.num_examples)

        @tf.autograph.experimental.do_not_convert
        def one_epoch(epoch):
            # TensorFlow mixes its global seed into every shuffle. The graph's own seed replaces it,
            # so that the order depends on nothing else. (A seed of 0 would mean none below.)
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
        dataset = dataset.enumerate(start).map(lambda number, e: {**e, "number": number})
        return self._part_of(dataset, part)

    def ordered(self, part=None):
        """See `Split`."""
        dataset = self.open(None)
        if part:
            dataset = dataset.repeat().take(part.padded(self.num_examples))
        dataset = dataset.enumerate().map(lambda number, e: {**e, "number": number})
        return self._part_of(dataset, part)

    def _part_of(self, dataset, part):
        if part is None:
            return dataset
        return dataset.batch(part.batch_size, drop_remainder=True).map(part.take).unbatch()


def subset(split: Split, count: int, seed: int = 0) -> Split:
    """At most `count` examples of a split: random ones, or of a stream the first.

    A stream of TFDS was shuffled when it was prepared; a folder is ordered by its classes.
    """
    if count >= split.num_examples:
        return split
    if isinstance(split, StreamedSplit):
        return StreamedSplit(count, lambda _: split.open(None).take(count))
    chosen = np.random.default_rng(seed).permutation(split.num_examples)[:count]
    with tf.device("CPU"):
        images, labels = (tf.gather(part, np.sort(chosen)) for part in (split.images, split.labels))
    return IndexedSplit(images, labels, split.read)

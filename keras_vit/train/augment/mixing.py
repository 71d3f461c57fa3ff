"""Augmentation of a batch: MixUp and CutMix.

Both are stateless TensorFlow: how a batch is mixed is a function of its seed alone.
"""

import tensorflow as tf

from keras_vit.train.augment.image import span
from keras_vit.train.recipe import Augment


def mix_batch(
    images: tf.Tensor, targets: tf.Tensor, augment: Augment, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """MixUp (arXiv 1710.09412) or CutMix (arXiv 1905.04899) of a batch with its other half.

    The share is drawn from Beta(alpha, alpha) once a batch, as in big_vision, DeiT and timm. With
    both in the recipe, each batch gets one of the two.

    Args:
        images: float32 (B, H, W, C).
        targets: float32 (B, K), one-hot.
        augment: Its `mixup` and `cutmix` are used.
        seed: Two integers.

    Returns:
        Images and targets of the same shapes.
    """
    kinds = [
        (mix, alpha) for mix, alpha in ((_mixup, augment.mixup), (_cutmix, augment.cutmix)) if alpha
    ]
    if not kinds:
        return images, targets
    draws = tf.random.stateless_uniform([3], seed)

    def branch(mix, alpha):
        gammas = tf.random.stateless_gamma(
            [2], tf.random.fold_in(seed, 1), tf.constant(alpha, tf.float64), dtype=tf.float64
        )
        share = tf.cast(gammas[0] / tf.reduce_sum(gammas), tf.float32)
        return mix(images, targets, share, draws[:2])

    if len(kinds) == 1:
        return branch(*kinds[0])
    return tf.cond(draws[2] < 0.5, lambda: branch(*kinds[0]), lambda: branch(*kinds[1]))


def _mixup(images, targets, share, draws):
    del draws
    return _blend(images, share), _blend(targets, share)


def _blend(values, share):
    size = values.shape[0]
    if size is None or size % 2:
        return share * values + (1 - share) * _partner(values)
    # Two halves are mixed in one matrix product, which reads the memory once and not four times.
    mix = tf.reshape(tf.stack([share, 1 - share, 1 - share, share]), (2, 2))
    return tf.reshape(mix @ tf.reshape(values, (2, -1)), values.shape)


def _partner(values):
    return tf.roll(values, tf.shape(values)[0] // 2, 0)


def _cutmix(images, targets, share, draws):
    height, width = images.shape[1:3]
    cut = tf.sqrt(1 - share)
    (top, bottom), (left, right) = (
        span(draw, size, tf.cast(size * cut, tf.int32))
        for draw, size in zip(tf.unstack(draws), (height, width), strict=True)
    )
    other = _partner(images)
    rows = [
        images[:, top:bottom, :left],
        other[:, top:bottom, left:right],
        images[:, top:bottom, right:],
    ]
    mixed = tf.concat([images[:, :top], tf.concat(rows, 2), images[:, bottom:]], 1)
    # A box clipped at the border is smaller than its share.
    share = 1 - tf.cast((bottom - top) * (right - left), tf.float32) / (height * width)
    mixed = tf.ensure_shape(mixed, images.shape)
    return mixed, share * targets + (1 - share) * _partner(targets)

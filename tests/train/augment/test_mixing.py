"""MixUp and CutMix of a batch: images and targets get equal shares, which the seed decides."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.train.augment.mixing import mix_batch
from keras_vit.train.recipe import Augment

pytestmark = pytest.mark.backend_free


def _batch(size):
    rng = np.random.default_rng(1)
    images = rng.normal(size=(size, 12, 10, 2)).astype("float32")
    return images, np.eye(size, dtype="float32")


@pytest.mark.parametrize("size", (6, 5))
def test_mixup_mixes_images_like_their_targets(size):
    images, targets = _batch(size)
    shares = set()
    for seed in range(8):
        mixed, soft = mix_batch(
            tf.constant(images), tf.constant(targets), Augment(mixup=0.8), [3, seed]
        )
        # Each image has a class of its own, so the targets are the shares of the images.
        expected = np.tensordot(soft.numpy(), images, 1)
        np.testing.assert_allclose(mixed, expected, atol=1e-5)
        np.testing.assert_allclose(soft.numpy().sum(1), 1, atol=1e-6)
        shares.add(round(float(soft[0, 0]), 4))
        assert np.abs(mixed - images).max() > 1e-3
    assert len(shares) == 8


@pytest.mark.parametrize("size", (6, 5))
def test_cutmix_pastes_a_box_and_counts_its_pixels(size):
    images, targets = _batch(size)
    for seed in range(8):
        mixed, soft = mix_batch(
            tf.constant(images), tf.constant(targets), Augment(cutmix=1.0), [4, seed]
        )
        own = (mixed.numpy() == images).all(-1)  # (B, H, W)
        np.testing.assert_allclose(np.diag(soft), own.mean((1, 2)), atol=1e-6)
        for i, other in enumerate((np.arange(size) - size // 2) % size):
            assert (own[i] | (mixed.numpy()[i] == images[other]).all(-1)).all()
            np.testing.assert_allclose(soft[i, other], 1 - own[i].mean(), atol=1e-6)
        np.testing.assert_array_equal(own, own[:1].repeat(size, 0))


def test_beta_shares_have_the_moments_of_their_alpha():
    images, targets = _batch(2)
    for alpha in (0.2, 1.0):
        dataset = tf.data.Dataset.range(400).map(
            lambda i, alpha=alpha: mix_batch(
                tf.constant(images), tf.constant(targets), Augment(mixup=alpha), tf.stack([5, i])
            )[1][0, 0]
        )
        shares = np.array(list(dataset.as_numpy_iterator()))
        assert abs(shares.mean() - 0.5) < 0.06
        assert abs(shares.var() - 1 / (4 * (2 * alpha + 1))) < 0.02


def test_mixup_and_cutmix_together_draw_one_of_them_for_each_batch():
    images, targets = _batch(4)
    cut = 0
    for seed in range(60):
        mixed, _ = mix_batch(
            tf.constant(images), tf.constant(targets), Augment(mixup=1.0, cutmix=1.0), [6, seed]
        )
        mixed = mixed.numpy()
        cut += bool(((mixed == images) | (mixed == np.roll(images, 2, 0))).all())
    assert 15 <= cut <= 45


def test_no_mixing_leaves_a_batch_unchanged():
    images, targets = (tf.constant(v) for v in _batch(3))
    assert mix_batch(images, targets, Augment(), [1, 2]) == (images, targets)

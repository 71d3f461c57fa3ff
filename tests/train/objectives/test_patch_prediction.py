"""`MaskedPatchPrediction` against a NumPy reference of Appendix B.1.2."""

import keras
import numpy as np

import keras_vit
from keras_vit.train import MaskedPatchPrediction

CONFIG = dict(image_size=16, patch_size=4, width=12, depth=1, num_heads=2, mlp_dim=16)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


class Fixed(MaskedPatchPrediction):
    """Corrupts patches in training as in evaluation."""

    def seed_for(self, training, draw=0):
        return draw


def tiny(**fields):
    fields = {**CONFIG, "num_classes": 0, "pixel_mean": MEAN, "pixel_std": STD, **fields}
    model, rng = keras_vit.ViT(fields), np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(0.3 * rng.normal(size=weight.shape) + weight.path.endswith("gamma"))
    return model


def preprocessed(count=3, seed=0):
    """Pixels in [0, 1] and what the model sees; each patch with a range of colors of its own."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 0.8, size=(count, 4, 1, 4, 1, 3))
    pixels = low + rng.uniform(0, 0.2, size=(count, 4, 4, 4, 4, 3))
    pixels = pixels.reshape(count, 16, 16, 3)
    return pixels, ((pixels - MEAN) / np.array(STD)).astype("float32")


def reference_colors(pixels):
    """The color of each patch of images in [0, 1], patch by patch."""
    colors = np.zeros((len(pixels), 16), int)
    for b, image in enumerate(pixels):
        for i in range(16):
            row, column = divmod(i, 4)
            patch = image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            red, green, blue = (min(int(8 * patch[..., c].mean()), 7) for c in range(3))
            colors[b, i] = red + 8 * green + 64 * blue
    return colors


def test_colors_by_hand():
    mpp = MaskedPatchPrediction(tiny(image_size=(4, 8)))
    pixels = np.ones((1, 4, 8, 3))
    pixels[:, :, :4] = (0.3, 0.55, 0.05)  # 2.4, 4.4 and 0.4 eighths; the other patch is white
    images = ((pixels - MEAN) / np.array(STD)).astype("float32")
    colors = keras.ops.convert_to_numpy(mpp.color_classes(images))
    assert colors.tolist() == [[2 + 8 * 4 + 64 * 0, 511]]
    two_bits = MaskedPatchPrediction(tiny(image_size=(4, 8)), bits=2)
    colors = keras.ops.convert_to_numpy(two_bits.color_classes(images))
    assert colors.tolist() == [[1 + 4 * 2, 63]] and two_bits.colors.units == 64


def test_loss_equals_the_reference():
    mpp = MaskedPatchPrediction(tiny())
    pixels, images = preprocessed()
    outputs = {k: keras.ops.convert_to_numpy(v) for k, v in mpp(images).items()}
    colors = reference_colors(pixels)
    assert len(np.unique(colors)) > 20 and outputs["logits"].shape == (3, 16, 512)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(mpp.color_classes(images)), colors)
    assert outputs["mask"].sum(axis=1).tolist() == [8, 8, 8]
    logits = outputs["logits"].astype("float64")
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(logs, colors[..., None], axis=-1)[..., 0]
    mpp.compile()
    found = mpp.evaluate(images, verbose=0)
    np.testing.assert_allclose(found, losses[outputs["mask"] == 1].mean(), rtol=1e-5)
    assert abs(found - losses[outputs["mask"] == 0].mean()) > 1e-2


def test_half_of_the_patches_are_corrupted_as_the_paper_says():
    mpp, seen = MaskedPatchPrediction(tiny(), seed=1), []
    encode = mpp._encode
    mpp._encode = lambda z, training: seen.append(z) or encode(z, training)
    images = preprocessed(400)[1]
    mask = keras.ops.convert_to_numpy(mpp(images, training=True)["mask"]) == 1
    own = keras.ops.convert_to_numpy(mpp._embed(images))  # (B, N, D)
    found = keras.ops.convert_to_numpy(seen[0])
    token = keras.ops.convert_to_numpy(mpp.mask_token)[0, 0]
    masked = np.abs(found - token).max(axis=-1) < 1e-6
    kept = np.abs(found - own).max(axis=-1) < 1e-6
    # Which patch of the same image an embedding is; -1 for none.
    near = np.abs(found[:, :, None] - own[:, None]).max(axis=-1) < 1e-6  # (B, N, N)
    source = np.where(near.any(axis=-1), near.argmax(axis=-1), -1)
    assert kept[~mask].all() and (mask.sum(axis=1) == 8).all()
    np.testing.assert_allclose(masked[mask].mean(), 0.8, atol=0.03)
    np.testing.assert_allclose(kept[mask].mean(), 0.1, atol=0.03)
    other = mask & ~masked & ~kept
    assert (source[other] >= 0).all() and (source != np.arange(16))[other].all()
    np.testing.assert_allclose(other[mask].mean(), 0.1, atol=0.03)
    steps = np.unique((source - np.arange(16))[other] % 16)
    assert steps.tolist() == list(range(1, 16))


def test_gradient_is_the_slope_of_the_loss():
    mpp = Fixed(tiny())
    images = preprocessed()[1]
    mpp.compile(keras.optimizers.SGD(1.0))

    def weights():
        return [np.array(keras.ops.convert_to_numpy(w)) for w in mpp.trainable_weights]

    def loss_at(offset):
        for weight, value, slope in zip(mpp.trainable_weights, before, gradient, strict=True):
            weight.assign(value + offset * slope / norm)
        return mpp.evaluate(images, verbose=0)

    before = weights()
    mpp.train_on_batch(images)
    gradient = [b - a for b, a in zip(before, weights(), strict=True)]
    norm = np.sqrt(sum(np.sum(g.astype("float64") ** 2) for g in gradient))
    slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2
    np.testing.assert_allclose(slope, norm, rtol=5e-3)
    sizes = dict(zip((w.path for w in mpp.trainable_weights), gradient, strict=True))
    for path in (f"{mpp.name}/mask_token", "patches/projection/kernel", "colors/kernel"):
        assert np.abs(sizes[path]).max() > 1e-4, path

"""The comparison of an export with its model: what passes, what does not, and what is said."""

import numpy as np
import pytest
from conformance import TINY

from keras_vit.export.verify import checked_pictures, generated_images, verify_export
from keras_vit.runtime import Runtime

pytestmark = pytest.mark.backend_free
WEIGHTS = np.random.default_rng(0).normal(size=(24 * 16 * 3, 3)) / 30


class Plain(Runtime):
    """Logits that are a product with the pixels, of which one may be moved."""

    def __init__(self, gain=1.0, moved=0.0, log=False, activation="softmax"):
        super().__init__("", TINY, activation=activation)
        self.gain, self.moved, self.log_probabilities = gain, moved, log
        self.outputs = ("logits",)

    def _engine(self):
        return "NumPy"

    def _run(self, images, wanted="logits"):
        logits = self.gain * (images.reshape(len(images), -1) @ WEIGHTS)
        logits[:, 1] += self.moved
        logits = logits.astype("float32")
        if self.log_probabilities and self.activation == "softmax":
            raised = np.exp(logits)
            logits = np.log(raised / raised.sum(-1, keepdims=True))
        elif self.log_probabilities:
            logits = np.log(1 / (1 + np.exp(-logits)))
        return {"logits": logits}


def test_difference_is_a_share_of_the_range():
    reference = Plain()
    wanted = reference.logits(generated_images(TINY))
    seen = verify_export(reference, Plain(moved=0.01), 0.1)
    assert seen.images == 16 and seen.logits_range == np.ptp(wanted) > 1
    np.testing.assert_allclose(seen.difference, 0.01, rtol=1e-3)
    assert seen.same_top_class == 1 and seen.features_difference is None
    with pytest.raises(ValueError, match="must be the model's within 0.1 .* a difference of"):
        verify_export(reference, Plain(moved=0.11 * seen.logits_range), 0.1)
    # On images that the user gives.
    assert verify_export(reference, Plain(), 1e-5, generated_images(TINY, 40)).images == 40


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("gain", [0, 1e-4, 1, 20])
def test_probabilities_are_compared_however_near_the_logits_are(gain, activation):
    """0 is a new head: its logits have no range, and its probabilities are rounded all the same."""
    reference = Plain(gain, activation=activation)
    seen = verify_export(reference, Plain(gain, log=True, activation=activation), 1e-5)
    assert seen.difference < 1e-5 * max(1, seen.logits_range)
    assert seen.logits_range == 0 or gain
    moved = Plain(gain, 1e-4 * max(1, seen.logits_range), log=True, activation=activation)
    with pytest.raises(ValueError, match="must be the model's within 1e-05"):
        verify_export(reference, moved, 1e-5)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="model must give finite logits. Received: nan at image 0"):
        verify_export(Plain(np.nan), Plain(), 1)
    with pytest.raises(ValueError, match="Received: a difference of inf"):
        verify_export(Plain(), Plain(np.nan), 1)


def test_images_that_are_none_are_refused_by_the_name_of_the_argument():
    pixels = generated_images(TINY, 2)
    assert checked_pictures(pixels, TINY, "uint8") is pixels
    for bad, takes, message in (
        (pixels[0], "uint8", r"(\(batch, 24, 16, 3\) of uint8 pixels, .* shape \(24, 16, 3\))"),
        (pixels / 255, "uint8", "of uint8 pixels, for images='uint8'. Received: .*float64"),
        (pixels.astype("int32"), "float32", "floats as the model takes them or uint8.*int32"),
        (pixels[:0], "float32", "at least one image"),
        (pixels * np.nan, "float32", "must hold finite numbers"),
    ):
        for name in ("verify", "calibration"):
            with pytest.raises(ValueError, match=f"{name} must .*{message}|{name} {message}"):
                checked_pictures(bad, TINY, takes, name)

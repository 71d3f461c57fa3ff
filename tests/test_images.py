"""Folders of labeled images; `tests/cli/test_predict.py` reads single ones."""

import numpy as np
import pytest
from conformance import TINY
from PIL import Image

from keras_vit.images import labeled_images

pytestmark = pytest.mark.backend_free


def test_labeled_images_count_every_image_once(tmp_path):
    for name in ("dog", "crane"):
        (tmp_path / name).mkdir()
        for i in range(2):
            pixels = np.full((24, 16, 3), 100 * i, "uint8")
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    batches = list(labeled_images(tmp_path, TINY, ("crane", "dog", "emu"), at_a_time=3))
    assert [labels.tolist() for _, labels in batches] == [[0, 0, 1], [1]]
    assert batches[0][0].shape == (3, *TINY.input_shape)
    # ImageNet has two classes of this name, a bird and a machine.
    with pytest.raises(ValueError, match="each belong to one class.*Received: crane, each the"):
        labeled_images(tmp_path, TINY, ("crane", "dog", "crane"))
    # A name without a folder may stand twice.
    assert len(list(labeled_images(tmp_path, TINY, ("crane", "emu", "dog", "emu")))) == 1
    with pytest.raises(ValueError, match="must contain folders named as classes.*Received: dog"):
        labeled_images(tmp_path, TINY, ("crane", "emu", "owl"))

"""A grid that does not change: nothing is resampled, and a wrong name is still refused."""

import numpy as np
import pytest

from keras_vit.resample import PRESETS, matrix, resample_grid

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize("preset", PRESETS)
def test_matrix_same_size_is_identity_without_offset(preset):
    same = np.array_equal(matrix(14, 14, preset), np.eye(14))
    assert same == (PRESETS[preset].size_offset == 0)


def test_resample_grid_rejects_unknown_preset_for_same_grid():
    with pytest.raises(ValueError, match="interpolation must be"):
        resample_grid(np.ones((1, 49, 20), "float32"), (7, 7), (7, 7), "unknown")

"""The process that times a file: its figures, its outputs, and what it says when it fails."""

import numpy as np
import pytest
from conformance import tiny_model

from keras_vit import preprocessing
from keras_vit.benchmark import timing

pytestmark = pytest.mark.only_on("torch")  # which starts the fastest


@pytest.fixture
def pictures(tmp_path):
    path = tmp_path / timing.PICTURES
    shape = (3, *tiny_model().config.input_shape)
    np.save(path, np.random.default_rng(0).integers(0, 256, shape, "uint8"))
    return path


def test_time_file(pictures, tmp_path):
    model = tiny_model()
    model.save(tmp_path / "model.keras")
    found = timing.time_file(tmp_path / "model.keras", pictures, [1, 4], 0.01)
    assert sorted(found.times) == [1, 4]
    assert all(len(times) >= timing.LEAST and min(times) > 0 for times in found.times.values())
    assert 0 <= found.memory < 1 << 32  # importing the backend may have taken more
    x = preprocessing.normalize(np.load(pictures), model.config)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(found.outputs, expected, atol=1e-5)
    assert np.abs(found.outputs - expected[::-1]).max() > 1e-3


def test_a_process_that_fails_gives_its_last_line(pictures, tmp_path):
    (tmp_path / "model.keras").write_bytes(b"no model")
    with pytest.raises(RuntimeError, match=r"ended with 1: .*model\.keras"):
        timing.time_file(tmp_path / "model.keras", pictures, [1], 0.01)

"""`keras_vit.fused`: the model as a function, on every backend."""

import keras
import numpy as np
import pytest
from conformance import images, randomize, run, tiny_model

from keras_vit.export.fused import fused


def test_fused_predicts_as_the_model_does():
    model = tiny_model("mean")
    x = images(model.config, count=5)
    predict = fused(model)
    expected = run(model, x)
    np.testing.assert_allclose(predict(x, batch_size=2), expected, atol=1e-5)
    np.testing.assert_allclose(predict(keras.ops.convert_to_tensor(x)), expected, atol=1e-5)
    assert isinstance(predict(x[:1].tolist()), np.ndarray)
    randomize(model, seed=9)
    np.testing.assert_allclose(predict(x), expected, atol=1e-5)
    assert np.abs(predict(x) - run(model, x)).max() > 1e-2
    for wrong in (x[0], x[:, :-1], x[:0]):
        with pytest.raises(ValueError, match="images must be floats.*and have shape"):
            predict(wrong)
    with pytest.raises(ValueError, match="batch_size must be"):
        predict(x, batch_size=0)

"""DistilledHead: two classifiers and their mean."""

import numpy as np
import pytest
from conformance import built_at_random, to_numpy

from keras_vit import layers


def test_distilled_head_by_hand():
    head = layers.DistilledHead(1, activation="sigmoid")
    x = np.array([[1.0, 2.0]], "float32")  # a class and a distillation token of width 1
    head.build(x.shape)
    head.set_weights([np.array([[3.0]]), np.ones(1), np.array([[5.0]]), np.zeros(1)])
    np.testing.assert_allclose(to_numpy(head(x, separate=True)), [[[4.0], [10.0]]])
    np.testing.assert_allclose(to_numpy(head.logits(x)), [[7.0]])
    np.testing.assert_allclose(to_numpy(head(x)), [[1 / (1 + np.exp(-7.0))]], rtol=1e-6)


def test_distilled_head_has_two_dense_layers():
    head = built_at_random(layers.DistilledHead(3, use_bias=False), np.ones((2, 8), "float32"))
    shapes = {v.path.split("/", 1)[1]: tuple(v.shape) for v in head.weights}
    assert shapes == {"class/kernel": (4, 3), "distillation/kernel": (4, 3)}
    with pytest.raises(ValueError, match="x must hold two tokens.*Received"):
        layers.DistilledHead(3)(np.ones((2, 7), "float32"))

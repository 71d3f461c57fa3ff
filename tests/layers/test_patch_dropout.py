"""PatchDropout: which tokens it keeps."""

import numpy as np
from conformance import to_numpy

from keras_vit import layers


def test_patch_dropout_keeps_prefix_and_order():
    x = np.arange(2 * 10 * 1, dtype="float32").reshape(2, 10, 1)
    y = to_numpy(layers.PatchDropout(0.5, num_prefix_tokens=2)(x, training=True))
    assert y.shape == (2, 6, 1)
    np.testing.assert_array_equal(y[:, :2], x[:, :2])
    for i in range(2):
        kept = y[i, 2:, 0].tolist()
        assert kept == sorted(kept) and set(kept) <= set(x[i, 2:, 0].tolist())
        assert len(set(kept)) == 4

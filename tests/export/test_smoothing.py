"""Smoothing is an identity, and makes what products read more even."""

import numpy as np
import pytest
from conformance import KINDS, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.folded import Product
from keras_vit.export.in_numpy import NumpyOperators
from keras_vit.export.program import Program
from keras_vit.export.quantization import product_names
from keras_vit.export.smoothing import _scale, smoothed, whole_ranges

pytestmark = pytest.mark.backend_free


class Watching(NumpyOperators):
    """The operators, which note the ends of each channel that a product reads."""

    def __init__(self):
        self.seen = {}

    def product(self, x, p):
        self.seen[p.name] = (x.min(0), x.max(0))
        return super().product(x, p)

    def heads(self, x, products, tokens, num_heads):
        place, leaves = products[0].name.rpartition("/")[0], [p.name for p in products]
        name = f"{place}/{''.join(leaf.rpartition('/')[2][0] for leaf in leaves)}"
        self.seen[name if len(leaves) > 1 else leaves[0]] = (x.min(0), x.max(0))
        return super().heads(x, products, tokens, num_heads)


def watched(folded, x):
    ops = Watching()
    output = Program(folded, ops).output(x)
    return output, {name: ops.seen[name] for name in product_names(folded)}


@pytest.mark.parametrize("kind", KINDS)
def test_smoothing_changes_nothing_but_what_products_read(kind):
    model = tiny_model(kind, seed=3)
    x, folded = images(model.config), fold(model)
    wanted, seen = watched(folded, x)
    same, expected = smoothed(folded, seen)
    found, read = watched(same, x)
    assert np.abs(found - wanted).max() < 1e-5 * np.ptp(wanted)
    for name, ends in read.items():
        np.testing.assert_allclose(ends, expected[name], rtol=1e-3, atol=1e-5)
    assert run(model, x).shape == found.shape


def test_smoothing_shrinks_an_outlier():
    model = tiny_model()
    value = model.blocks[0].attention.value_dense
    value.kernel.assign(np.asarray(value.kernel) * np.where(np.arange(4) == 2, 100.0, 1.0))
    x, folded = images(model.config), fold(model)
    wanted, seen = watched(folded, x)
    name = "encoder_block_0/attention/attention_output"

    def spread(seen):
        largest = np.abs(np.array(seen[name])).max(0)
        return largest.max() / np.median(largest)

    assert spread(smoothed(folded, seen)[1]) < 0.3 * spread(seen)
    assert whole_ranges(seen)[name] == (seen[name][0].min(), seen[name][1].max())


def test_scale_is_that_of_smoothquant():
    """Eq. 4 by hand: sqrt(max |x| / max |w|), and 1 for channels without values or weights."""
    low, high = np.array([-8.0, 0, -1, 0, 0.25]), np.array([2.0, 0, 1, 3, 0.5])
    kernel = np.array([[2.0, -1], [5, 0], [0, 0], [0.25, -0.75], [1, 2]])
    seen = {"p": (low, high)}
    scale = _scale(seen, ["p"], [Product("p", kernel, np.zeros(2))])
    np.testing.assert_allclose(scale, [2, 1, 1, 2, 0.5])
    np.testing.assert_allclose(seen["p"], [low / scale, high / scale])
    far = {"p": (np.array([0.0, 0]), np.array([1e9, 1e-9]))}
    scale = _scale(far, ["p"], [Product("p", np.ones((2, 1)), np.zeros(1))])
    np.testing.assert_allclose(scale[1] / scale[0], 1e-3, rtol=1e-6)

"""Smoothing is an identity, and makes what products read more even."""

import numpy as np
import pytest
from conformance import KINDS, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.in_numpy import NumpyOperators
from keras_vit.export.program import Program
from keras_vit.export.quantization import product_names
from keras_vit.export.smoothing import smoothed, whole_ranges

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

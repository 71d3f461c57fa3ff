"""A random B/16 of every source, as `python -m benchmarks.parity` measures it."""

import keras
import pytest

from benchmarks import parity

pytestmark = pytest.mark.slow

# One of the other backends runs a torch source and a flax one; tensorflow runs them all.
ELSEWHERE = ("timm", "big_vision (NumPy)")


@pytest.mark.parametrize("source", parity.SOURCES)
def test_full_size_logits_equal_source(source):
    if keras.backend.backend() != "tensorflow" and source not in ELSEWHERE:
        pytest.skip("the tensorflow backend measures it; tiny models measure it on all three")
    row = parity.measure(source)
    assert row["relative"] < 1e-4
    assert row["range_of_logits"] > 1

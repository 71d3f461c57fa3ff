"""A random B/16 of every source, as `python -m benchmarks.parity` measures it."""

import pytest

from benchmarks import parity

pytestmark = pytest.mark.slow

# Tiny models of every source run on every backend, and of this size a torch and a flax one.
EVERYWHERE = ("timm", "big_vision (NumPy)")
SOURCES = [
    source if source in EVERYWHERE else pytest.param(source, marks=pytest.mark.backend_free)
    for source in parity.SOURCES
]


@pytest.mark.parametrize("source", SOURCES)
def test_full_size_logits_equal_source(source):
    row = parity.measure(source)
    assert row["relative"] < 1e-4
    assert row["range_of_logits"] > 1

"""Which export of a model is the fastest on this machine, and what it costs."""

from keras_vit.benchmark.comparison import Comparison, Measured, compare
from keras_vit.benchmark.kinds import KINDS, Kind

__all__ = ["KINDS", "Comparison", "Kind", "Measured", "compare"]

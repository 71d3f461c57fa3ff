"""RotaryRescale: training at random scales of the rotary positions."""

import math

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class RotaryRescale(keras.layers.Layer):
    """Draws the factor by which all blocks multiply the coordinates of rotary positions.

    `exp(u)` with u uniform in [-log r, log r], one for each call in training; otherwise 1. So a
    model learns to read positions at other resolutions.

    Args:
        limit: r, at least 1.
        seed: Random seed.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Any tensor; its values are not read.
        training: Whether to draw.

    Returns:
        `(1,)`.

    Reference:
        arXiv 2508.10104, Section 3.2.

    Example:

    >>> RotaryRescale(2.0)(keras.ops.ones((2, 5, 8)))
    [1.0]
    """

    def __init__(self, limit, seed=None, **kwargs):
        super().__init__(**kwargs)
        if limit < 1:
            raise ValueError(f"limit must be at least 1. Received: limit={limit!r}")
        self.limit = limit
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x, training=None):
        if not training:
            return ops.ones((1,), self.compute_dtype)
        most = math.log(self.limit)
        drawn = keras.random.uniform((1,), -most, most, "float32", self.seed_generator)
        return ops.cast(ops.exp(drawn), self.compute_dtype)  # (1,)

    def compute_output_spec(self, x, training=None):
        return keras.KerasTensor((1,), dtype=self.compute_dtype)

    def get_config(self):
        return {**super().get_config(), "limit": self.limit, "seed": self.seed}

"""PatchDropout: training on a random subset of the patches."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class PatchDropout(keras.layers.Layer):
    """Drops random patch tokens of each image in training, so that blocks cost less.

    Shapes: B batch, T tokens, k prefix tokens, N = T - k patches, n kept patches, D width.

    Kept patches stay in order; the class token and registers are always kept.

    Args:
        rate: Fraction of the patches to drop, in [0, 1).
        num_prefix_tokens: k, tokens before the patches.
        seed: Random seed.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens with position embeddings, `(B, T, D)`.
        training: Whether to drop patches.

    Returns:
        `(B, k + n, D)` in training with `n = max(1, int(N * (1 - rate)))`, else `x`.

    Reference:
        arXiv 2208.07220.

    Example:

    >>> PatchDropout(0.5)(keras.ops.ones((2, 16, 8)), training=True).shape
    (2, 8, 8)
    """

    def __init__(self, rate, num_prefix_tokens=0, seed=None, **kwargs):
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be in [0, 1). Received: rate={rate!r}")
        self.rate = rate
        self.num_prefix_tokens = num_prefix_tokens
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x, training=None):
        if not training or self.rate == 0:
            return x
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        batch, count = ops.shape(patches)[0], patches.shape[1]
        keep = max(1, int(count * (1 - self.rate)))
        noise = keras.random.uniform((batch, count), seed=self.seed_generator)
        index = ops.sort(ops.argsort(noise, axis=-1)[:, :keep], axis=-1)  # (B, n)
        patches = ops.take_along_axis(patches, ops.expand_dims(index, -1), axis=1)  # (B, n, D)
        return ops.concatenate([prefix, patches], axis=1)  # (B, k + n, D)

    def compute_output_shape(self, input_shape):
        # The graph is traced for inference, where nothing is dropped.
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "rate": self.rate,
            "num_prefix_tokens": self.num_prefix_tokens,
            "seed": self.seed,
        }

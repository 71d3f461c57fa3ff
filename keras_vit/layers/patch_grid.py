"""Patch tokens as a grid, for heads that work on feature maps."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class PatchGrid(keras.layers.Layer):
    """Drops the prefix tokens and reshapes the patch tokens to a grid.

    Shapes: B batch, T tokens, D width, (gh, gw) the grid.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Tokens before the patches (class token, registers).
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.

    Returns:
        `(B, gh, gw, D)`.

    Example:

    >>> PatchGrid(grid=(2, 3), num_prefix_tokens=1)(keras.ops.ones((2, 7, 8))).shape
    (2, 2, 3, 8)
    """

    def __init__(self, grid, num_prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        if len(tuple(grid)) != 2 or not all(isinstance(g, int) and g > 0 for g in grid):
            raise ValueError(f"grid must be two positive ints. Received: grid={grid!r}")
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def call(self, x):
        x = x[:, self.num_prefix_tokens :]  # (B, N, D)
        return ops.reshape(x, (-1, *self.grid, x.shape[-1]))  # (B, gh, gw, D)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], *self.grid, input_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
        }

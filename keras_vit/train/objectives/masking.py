"""Random masks: which patches of each image are hidden.

Shapes: B batch, N patches, n visible patches.
"""

import keras
from keras import ops


def ranks(noise):
    """The rank of each patch's noise among those of its image, from 0.

    Args:
        noise: `(B, N)`.

    Returns:
        The patches from the lowest noise to the highest, int `(B, N)`, and the inverse: the rank of
        each patch, int `(B, N)`.
    """
    order = ops.argsort(noise, axis=-1)  # (B, N)
    return order, ops.argsort(order, axis=-1)  # (B, N)


def random_mask(batch, num_patches, num_masked, seed):
    """Hides the same number of patches of each image, any of them with the same probability.

    Args:
        batch: B.
        num_patches: N.
        num_masked: How many of them to hide.
        seed: A seed of `keras.random`.

    Returns:
        float32 `(B, N)`: 1 where a patch is hidden, else 0.
    """
    noise = keras.random.uniform((batch, num_patches), seed=seed)
    _, rank = ranks(noise)
    return ops.cast(rank < num_masked, "float32")  # (B, N)


def random_block_mask(batch, grid, block, num_masked, seed):
    """Hides the same number of square blocks of patches of each image (SimMIM).

    Args:
        batch: B.
        grid: Rows and columns of patches, multiples of `block`.
        block: Rows and columns of patches in a block.
        num_masked: How many blocks to hide.
        seed: A seed of `keras.random`.

    Returns:
        float32 `(B, N)`: 1 where a patch is hidden, else 0.
    """
    rows, columns = grid[0] // block, grid[1] // block
    mask = random_mask(batch, rows * columns, num_masked, seed)
    mask = ops.reshape(mask, (-1, rows, columns))
    mask = ops.repeat(ops.repeat(mask, block, axis=1), block, axis=2)  # (B, gh, gw)
    return ops.reshape(mask, (-1, grid[0] * grid[1]))  # (B, N)

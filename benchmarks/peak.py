"""The matrix product of the ViT's own shape: the most that its framework can reach here."""

import keras
import numpy as np


def matrix_product(config, batch, dtype):
    """A function that computes (B * T, D) x (D, mlp_dim) once, and its number of operations."""
    rows, inner, columns = batch * config.num_tokens, config.width, config.mlp_dim
    compute = keras.dtype_policies.get(dtype).compute_dtype
    rng = np.random.default_rng(0)
    a, b = (
        keras.ops.convert_to_tensor(rng.standard_normal(shape, "float32"), dtype=compute)
        for shape in ((rows, inner), (inner, columns))
    )
    jax = keras.backend.backend() == "jax"

    def product():
        result = keras.ops.matmul(a, b)
        return result.block_until_ready() if jax else result  # JAX returns before it has a result

    return product, 2 * rows * inner * columns

"""EncoderBlock: stochastic depth and initialization."""

import numpy as np
import pytest
from conformance import to_numpy

from keras_vit import layers


@pytest.mark.parametrize(
    ("block_norm", "expected"),
    [("pre", [3.0, 7.0]), ("post", [-1.0, 1.0]), ("res_post", [3.0, 7.0])],
)
def test_encoder_block_by_hand(block_norm, expected):
    """With one token and zero MLP, the block adds the token's own value, which is made LN(x)."""
    block = layers.EncoderBlock(2, 1, 1, block_norm=block_norm, norm_epsilon=1e-9)
    x = np.array([[[4.0, 6.0]]], "float32")
    block.build(x.shape)
    for v in block.weights:
        if v.path.endswith("kernel") or v.path.endswith("bias"):
            v.assign(np.zeros(v.shape))
    block.attention.value_dense.kernel.assign(np.eye(2)[:, None])
    block.attention.output_dense.kernel.assign(np.eye(2)[None])
    # pre and res_post: x + LN(x) = (4, 6) + (-1, 1); post: LN(LN(x + x))
    np.testing.assert_allclose(to_numpy(block(x))[0, 0], expected, atol=1e-5)


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    block = layers.EncoderBlock(width=20, num_heads=5, mlp_dim=28, drop_path=0.5)
    x = np.ones((400, 3, 20), "float32")
    y = to_numpy(block.mlp_drop_path(x, training=True))
    per_image = y.reshape(400, -1)
    assert (per_image == per_image[:, :1]).all()  # one draw an image
    assert set(np.unique(y)) == {0.0, 2.0}
    assert abs(y.mean() - 1) < 0.2


def test_encoder_block_initializes_attention_as_a_matrix():
    """Glorot over (D, h * d), not over the three axes of the kernel."""
    block = layers.EncoderBlock(width=96, num_heads=4, mlp_dim=8)
    block.build((None, 5, 96))
    limit = np.sqrt(6 / (96 + 96))
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        kernel = to_numpy(getattr(block.attention, name).kernel)
        assert 0.95 * limit < np.abs(kernel).max() <= limit
    query, key = (
        to_numpy(getattr(block.attention, n).kernel) for n in ("query_dense", "key_dense")
    )
    assert np.abs(query - key).max() > 0


def test_encoder_block_refuses_another_width():
    with pytest.raises(ValueError, match="x must have width=20.*Received"):
        layers.EncoderBlock(width=20, num_heads=5, mlp_dim=28)(np.zeros((1, 3, 16), "float32"))

"""The decoder of a masked autoencoder."""

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.encoder_block import EncoderBlock
from keras_vit.layers.position_embedding import sincos_2d


@keras.saving.register_keras_serializable("keras_vit")
class MAEDecoder(Composite):
    """Predicts the pixels of all patches from the tokens of the visible ones.

    Shapes: B batch, k prefix tokens, N patches, n visible patches, D width of the encoder, D' width
    of the decoder, O numbers a patch.

    y = [z W; mask; ...] in the order of the image + E_pos, then blocks, a LayerNorm and a Dense.

    The positions are sines and cosines, zeros for the prefix tokens. They are a weight, because
    checkpoints hold the table; it is not trained.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: k.
        width: D'.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
        mlp_dim: Hidden size of the MLPs.
        output_dim: O.
        norm_epsilon: Epsilon of the LayerNorms.
        gelu: "exact", "tanh" or "quick".
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        z: Tokens of the encoder, `(B, k + n, D)`.
        rank: int `(B, N)`. Patch i of the image is visible if its rank is less than n; its token is
            then z[:, k + rank].
        training: Whether this is a step of training.

    Returns:
        `(B, N, O)`.

    Reference:
        arXiv 2111.06377, Section 3.
    """

    def __init__(
        self,
        grid,
        num_prefix_tokens,
        width,
        depth,
        num_heads,
        mlp_dim,
        output_dim,
        norm_epsilon=1e-6,
        gelu="exact",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.width = width
        self.depth = depth
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.output_dim = output_dim
        self.norm_epsilon = norm_epsilon
        self.gelu = gelu
        policy = self.dtype_policy
        self.embed = keras.layers.Dense(width, dtype=policy, name="embed")
        self.blocks = [
            EncoderBlock(
                width,
                num_heads,
                mlp_dim,
                norm_epsilon=norm_epsilon,
                gelu=gelu,
                dtype=policy,
                name=f"block_{i}",
            )
            for i in range(depth)
        ]
        self.norm = keras.layers.LayerNormalization(epsilon=norm_epsilon, dtype=policy, name="norm")
        self.pixels = keras.layers.Dense(output_dim, dtype=policy, name="pixels")

    def build(self, input_shape):
        rows, columns = self.grid
        count = self.num_prefix_tokens + rows * columns
        self.embed.build(input_shape)
        self.mask_token = self.add_weight(
            name="mask_token",
            shape=(1, 1, self.width),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )
        self.positions = self.add_weight(
            name="positions", shape=(count, self.width), initializer=self._table, trainable=False
        )
        for layer in (*self.blocks, self.norm, self.pixels):
            layer.build((None, count, self.width))
        self.built = True
        self._restore_trainable()

    def _table(self, shape, dtype):
        table = sincos_2d(self.grid, self.width, endpoint=False)  # (N, D')
        prefix = ops.zeros((self.num_prefix_tokens, self.width), dtype)
        return ops.concatenate([prefix, ops.convert_to_tensor(table, dtype)])  # (k + N, D')

    def call(self, z, rank, training=None):
        k, count = self.num_prefix_tokens, self.positions.shape[0]
        z = self.embed(z)  # (B, k + n, D')
        hidden = count - z.shape[1]
        masks = ops.cast(self.mask_token, z.dtype)
        masks = ops.broadcast_to(masks, (ops.shape(z)[0], hidden, self.width))
        patches = ops.concatenate([z[:, k:], masks], axis=1)  # (B, N, D'), by rank
        patches = ops.take_along_axis(patches, ops.expand_dims(rank, -1), axis=1)  # by place
        y = ops.concatenate([z[:, :k], patches], axis=1)  # (B, k + N, D')
        y = ops.add(y, ops.cast(self.positions, y.dtype))
        for block in self.blocks:
            y = block(y, training=training)
        return self.pixels(self.norm(y)[:, k:])  # (B, N, O)

    def compute_output_shape(self, z_shape, rank_shape=None):
        rows, columns = self.grid
        return (z_shape[0], rows * columns, self.output_dim)

    def get_config(self):
        return {
            **super().get_config(),
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
            "width": self.width,
            "depth": self.depth,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "output_dim": self.output_dim,
            "norm_epsilon": self.norm_epsilon,
            "gelu": self.gelu,
        }

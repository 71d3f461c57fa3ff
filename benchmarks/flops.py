"""The floating-point operations of a Vision Transformer, counted from its config.

Shapes: N patches, T tokens, D width, h heads, d head size, K classes. A product of (m, k) with
(k, n) costs 2 m k n. Only products count: norms, softmax and GELU are left out, as is usual.
"""

TRAINING = 3  # each forward product has two backward ones, for the inputs and for the weights


def forward(config):
    """Operations of one forward pass of one image."""
    tokens, width = config.num_tokens, config.width
    heads = config.num_heads * config.key_dim
    patch = config.patch_size[0] * config.patch_size[1] * config.in_channels
    patches = 2 * config.num_patches * patch * width
    projections = 4 * (2 * tokens * width * heads)  # query, key, value and output
    attention = 2 * (2 * tokens * tokens * heads)  # q k^T and A v
    mlp = 2 * (2 * tokens * width * config.mlp_dim)
    head = 2 * width * config.num_classes
    return patches + config.depth * (projections + attention + mlp) + head


def fused(config):
    """Operations of the fused graph, whose last block computes only the first token."""
    if config.pooling != "token":
        return forward(config)
    width, heads = config.width, config.num_heads * config.key_dim
    # Every other token saves its query, attention, output projection and MLP.
    each = 2 * (2 * width * heads) + 2 * (2 * config.num_tokens * heads)
    each += 2 * (2 * width * config.mlp_dim)
    return forward(config) - (config.num_tokens - 1) * each


def per_image(config, mode):
    """Operations of one image in "forward" or in "train"."""
    return forward(config) * (TRAINING if mode == "train" else 1)

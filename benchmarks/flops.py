"""What a Vision Transformer costs: floating-point operations, counted from its config.

Shapes: N patches, T tokens, D width, h heads, d head size, K classes. A product of (m, k) with
(k, n) costs 2 m k n. Only products count: norms, softmax and GELU are left out, as is usual.
"""

TRAINING = 3  # backward makes two products, for the inputs and for the weights, of each forward one


def forward(config):
    """Operations of one forward pass of one image."""
    tokens, width = config.num_tokens, config.width
    heads = config.num_heads * config.key_dim
    patch = config.patch_size[0] * config.patch_size[1] * config.in_channels
    patches = 2 * config.num_patches * patch * width
    projections = 4 * (2 * tokens * width * heads)  # query, key, value and output
    attention = 2 * (2 * tokens * tokens * heads)  # q k^T and A v
    mlp = 2 * (2 * tokens * width * config.mlp_dim)
    vectors = 2 if config.pooling in ("token_pair", "token_mean") else 1
    head = 2 * vectors * width * config.num_classes
    return patches + config.depth * (projections + attention + mlp) + _pooling(config) + head


def _pooling(config):
    """Operations of attention pooling, one query an image."""
    if not config.attention_pooling:
        return 0
    tokens, width = config.num_tokens, config.width
    tokens -= config.num_prefix_tokens if config.pooling == "map" else 0
    projections = 2 * (2 * tokens * width * width) + 2 * (2 * width * width)
    attention = 2 * (2 * tokens * width)
    return projections + attention + 2 * (2 * width * (config.pooling_mlp_dim or config.mlp_dim))


def fused(config):
    """Of the fused graph, whose last block computes what is read of it: the first token."""
    if config.pooling != "token":
        return forward(config)
    width, heads = config.width, config.num_heads * config.key_dim
    # Of each other token: query and output projection, its attention, its MLP.
    each = 2 * (2 * width * heads) + 2 * (2 * config.num_tokens * heads)
    each += 2 * (2 * width * config.mlp_dim)
    return forward(config) - (config.num_tokens - 1) * each


def per_image(config, mode):
    """Operations of one image in "forward" or in "train"."""
    return forward(config) * (TRAINING if mode == "train" else 1)

"""`python -m benchmarks.flops vit_b16 --image-size 224 384`: what a ViT costs, from its config.

Shapes: N patches, T tokens, D width, h heads, d head size, K classes. A product of (m, k) with
(k, n) costs 2 m k n operations. Only products count: norms, softmax and GELU are left out, as is
usual. A multiply-add is two operations; most papers and timm call a multiply-add a FLOP.
"""

import argparse
import itertools

TRAINING = 3  # each forward product has two backward ones, for the inputs and for the weights


def forward(config):
    """Operations of one forward pass of one image."""
    tokens, width = config.num_tokens, config.width
    heads = config.num_heads * config.key_dim
    projections = 4 * (2 * tokens * width * heads)  # query, key, value and output
    attention = 2 * (2 * tokens * tokens * heads)  # q k^T and A v
    attention += _relative_positions(config)
    blocks = config.depth * (projections + attention + tokens * _mlp(config))
    return _patches(config) + blocks + _pooling(config) + _head(config)


def _relative_positions(config):
    """Of relative positions in one block: keys of 2 T offsets, or an MLP on each offset."""
    if config.attention_positions == "relative":
        heads = config.num_heads * config.key_dim
        return 2 * config.num_tokens * 2 * config.num_tokens * heads
    if config.attention_positions == "relative_mlp":  # computed once for the whole batch
        rows, columns = config.grid
        each = 2 * config.relative_mlp_dim * (2 + config.num_heads)
        return (2 * rows - 1) * (2 * columns - 1) * each
    return 0


def _mlp(config):
    """Of the MLP of one token; a gated one has three products."""
    products = 3 if config.mlp == "swiglu" else 2
    return products * 2 * config.width * config.mlp_dim


def _patches(config):
    """Of the stem, and of the patch projection."""
    channels = config.in_channels * config.patch_copies
    count = {"resnet": _resnet_stem, "conv": _conv_stem}.get(config.stem)
    stem, channels = count(config) if count else (0, channels)
    rows, columns = config.patch_kernel
    return stem + 2 * config.num_patches * rows * columns * channels * config.width


def _conv_stem(config):
    """Of a stem of convolutions, and the channels of its feature map."""
    (height, width), channels, total = config.image_size, config.in_channels, 0
    for stage, depth in enumerate(config.stem_stages):
        height, width, filters = height // 2, width // 2, config.stem_width * 2**stage
        for _ in range(depth):
            total += 2 * height * width * 3 * 3 * channels * filters
            channels = filters
    return total, channels


def _resnet_stem(config):
    """Of a hybrid's ResNet, and the channels of its feature map."""
    height, width = (-(-side // 2) for side in config.image_size)
    channels = config.stem_width
    total = 2 * height * width * 7 * 7 * config.in_channels * channels
    height, width = -(-height // 2), -(-width // 2)  # max-pooling
    for stage, depth in enumerate(config.stem_depths):
        filters = config.stem_width * 2**stage
        for unit in range(depth):
            total += 2 * height * width * channels * filters
            if stage and not unit:
                height, width = -(-height // 2), -(-width // 2)
            each = 3 * 3 * filters * filters + filters * 4 * filters
            each += 0 if unit else channels * 4 * filters  # the shortcut
            total += 2 * height * width * each
            channels = 4 * filters
    return total, channels


def _pooling(config):
    """Of attention pooling: one query, keys and values of the tokens, an MLP."""
    if not config.attention_pooling:
        return 0
    ignored = config.num_prefix_tokens if config.pooling == "map" else 0
    tokens, width = config.num_tokens - ignored, config.width
    attention = 2 * width * width * (2 * tokens + 2) + 2 * (2 * tokens * width)
    return attention + 2 * (2 * width * (config.pooling_mlp_dim or config.mlp_dim))


def _head(config):
    """Of the head, which reads one vector, or every token where tokens are not pooled."""
    rows = {None: config.num_tokens, "token_pair": 2}.get(config.pooling, 1)
    inner = config.width * (2 if config.pooling == "token_mean" else 1)
    sizes = [inner, config.representation_size, config.num_classes]
    sizes = [size for size in sizes if size]
    return rows * sum(2 * inner * outer for inner, outer in itertools.pairwise(sizes))


def fused(config):
    """Operations of the fused graph, whose last block computes only the first token."""
    if config.pooling != "token":
        return forward(config)
    width, heads = config.width, config.num_heads * config.key_dim
    # Every other token saves its query, attention, output projection and MLP.
    each = 2 * (2 * width * heads) + 2 * (2 * config.num_tokens * heads)
    each += _mlp(config)
    return forward(config) - (config.num_tokens - 1) * each


def per_image(config, mode):
    """Operations of one image in "forward" or in "train"."""
    return forward(config) * (TRAINING if mode == "train" else 1)


def multiply_adds(config):
    """Multiply-adds of one forward pass of one image, which papers print as FLOPs."""
    return forward(config) // 2


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flops", description=__doc__)
    parser.add_argument("variants", nargs="+", help="names of `keras_vit.list_variants()`")
    parser.add_argument("--image-size", nargs="+", type=int, default=[224])
    parser.add_argument("--patch-size", type=int, help="the variant's own by default")
    parser.add_argument("--num-classes", type=int, default=1000)
    options = parser.parse_args()
    fields = {"patch_size": options.patch_size} if options.patch_size else {}
    print("variant              px  tokens  million parameters  G multiply-adds   GFLOP")
    for variant in options.variants:
        for size in options.image_size:
            config, parameters = described(variant, options.num_classes, image_size=size, **fields)
            print(
                f"{variant:17} {size:5} {config.num_tokens:7} {parameters / 1e6:19.2f} "
                f"{multiply_adds(config) / 1e9:16.2f} {forward(config) / 1e9:7.1f}"
            )


def described(variant, num_classes=1000, **fields):
    """The config of a published size, and the number of its weights."""
    import keras_vit
    from keras_vit.deferred import deferred

    if variant not in keras_vit.list_variants():
        known = ", ".join(keras_vit.list_variants())
        raise SystemExit(f"variants must be published sizes: {known}. Received: {variant!r}")
    with deferred():  # draws no random numbers
        model = getattr(keras_vit, variant)(num_classes, **fields)
    return model.config, model.count_params()


if __name__ == "__main__":
    main()

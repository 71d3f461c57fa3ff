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
    patch = config.patch_size[0] * config.patch_size[1] * config.in_channels
    patches = 2 * config.num_patches * patch * width
    projections = 4 * (2 * tokens * width * heads)  # query, key, value and output
    attention = 2 * (2 * tokens * tokens * heads)  # q k^T and A v
    mlp = 2 * (2 * tokens * width * config.mlp_dim)
    return patches + config.depth * (projections + attention + mlp) + _head(config)


def _head(config):
    """Of the head, which reads one vector, or every token where tokens are not pooled."""
    rows = config.num_tokens if config.pooling is None else 1
    sizes = [config.width, config.representation_size, config.num_classes]
    sizes = [size for size in sizes if size]
    return rows * sum(2 * inner * outer for inner, outer in itertools.pairwise(sizes))


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

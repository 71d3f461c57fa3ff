"""`python -m benchmarks.memory_estimate vit_s16 vit_b16`: memory of a training step, computed.

Nothing is measured. What a step of AdamW must keep is counted, from the config alone: the weights,
their gradients and the two averages in float32, and of each block what its backward pass reads.
Copies, workspaces and the framework come on top. `benchmarks.memory` measures on this machine.

Shapes: T tokens, D width, h heads, d head size, M hidden size of the MLP.
"""

import argparse

from benchmarks.flops import described

VALUE = {"float32": 4, "mixed_bfloat16": 2, "mixed_float16": 2}
STATE = 16  # bytes a parameter: the weight, its gradient, and two averages
PRECISIONS = ("float32", "mixed_bfloat16")
BATCHES = (8, 32, 128)
VARIANTS = ("vit_ti16", "vit_s16", "vit_b16", "vit_l16", "vit_h14")


def block(config, precision):
    """Bytes of one image that one block keeps for its backward pass."""
    size, heads = VALUE[precision], config.num_heads * config.key_dim
    hidden = (3 if config.mlp == "swiglu" else 2) * config.mlp_dim  # before and after the GELU
    # Both residuals and what their LayerNorms return; q, k, v and what attention returns.
    tokens = config.num_tokens * (4 * config.width + 4 * heads + hidden) * size
    # The softmax is in float32; the product with v reads it in the precision.
    copies = 4 if size == 4 else 4 + size
    return tokens + config.num_heads * config.num_tokens**2 * copies


def activations(config, precision, batch, remat=False):
    """Bytes that the encoder keeps for a batch; with `remat`, inputs of blocks, and one block."""
    if not remat:
        return batch * config.depth * block(config, precision)
    inputs = config.depth * config.num_tokens * config.width * VALUE[precision]
    return batch * (inputs + block(config, precision))


def state(parameters, precision):
    """Bytes of the weights, gradients and averages, and of the weights in half precision."""
    return parameters * (STATE + (VALUE[precision] if VALUE[precision] < 4 else 0))


def gigabytes(config, parameters, precision, batch, remat=False):
    """All of it."""
    return (state(parameters, precision) + activations(config, precision, batch, remat)) / 1e9


def table(variants, image_size=224):
    """A Markdown table."""
    columns = [f"{p}, batch {b}" for p in PRECISIONS for b in BATCHES]
    columns += [f"{PRECISIONS[-1]}, batch {BATCHES[-1]}, `remat`"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for variant in variants:
        size = described(variant, image_size=image_size)
        cells = [(p, b, False) for p in PRECISIONS for b in BATCHES]
        cells.append((PRECISIONS[-1], BATCHES[-1], True))
        found = [f"{gigabytes(*size, *cell):.1f}" for cell in cells]
        lines.append(f"| `{variant}` | {' | '.join(found)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_estimate")
    parser.add_argument("variants", nargs="*", default=VARIANTS, help="published sizes")
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    print(f"GB of a training step at {options.image_size} px, computed\n")
    print(table(options.variants, options.image_size))


if __name__ == "__main__":
    main()

"""The reference of the explanations: the paper's equations in NumPy, with access to their parts."""

import functools

import numpy as np
import reference
from conformance import arrays, images, tiny_model


@functools.cache
def case(kind, **changes):
    """A model, a batch for it and the reference's attention weights. Tests must not change them."""
    model = tiny_model(kind, **changes)
    x = images(model.config, count=2)
    return model, x, weights(model.config, arrays(model), x)


def weights(config, values, x):
    """The attention weights of Eq. 6 of every layer, `(L, B, h, T, T)` in float64."""
    seen = []
    run(config, values, x, lambda call, a: seen.append(a))
    seen = seen[: config.depth * config.num_heads]  # attention pooling comes after the blocks
    found = np.stack(seen).reshape(config.depth, config.num_heads, *seen[0].shape)
    return found.swapaxes(1, 2)


def run(config, values, x, look, before_block=None):
    """The reference's output; `look` receives each softmax and may return a replacement.

    Args:
        config: A `ViTConfig`.
        values: Arrays by path.
        x: Images.
        look: From the number of the call (all heads of a layer in turn) and its weights to None or
            other weights.
        before_block: From a block's index and its input to another input.
    """
    calls, blocks = iter(range(10_000)), iter(range(10_000))
    softmax, block = reference.softmax, reference.block

    def seen_softmax(logits):
        a = softmax(logits)
        other = look(next(calls), a)
        return a if other is None else other

    def seen_block(config, w, z):
        index = next(blocks)
        return block(config, w, before_block(index, z) if before_block else z)

    reference.softmax, reference.block = seen_softmax, seen_block
    try:
        return reference.forward(config, values, x)
    finally:
        reference.softmax, reference.block = softmax, block

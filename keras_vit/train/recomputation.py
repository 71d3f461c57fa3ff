"""Gradient checkpointing: encoder blocks are computed again in the backward pass, not remembered.

Keras' own `RematScope` (3.15) runs a layer again with the state that its first run left: on torch
its dropout draws other masks, so that gradients are wrong; with dropout it fails on TensorFlow and
JAX. Here a block is run as a function of its inputs, its weights and the state of its seed
generators, which is copied before the first run. So both runs draw the same masks, and the state
advances once.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.backend.common import variables as keras_variables  # no public name for autocasting

from keras_vit.model import ViT


def remat(model: ViT, blocks: Sequence[int] | None = None) -> None:
    """Makes a model remember only the inputs of its encoder blocks in training.

    The backward pass computes each block again. Losses, gradients and weights are those without it,
    also with dropout and stochastic depth; a training step computes about a third more. Nothing
    changes outside of training, in the config and in files: call this again after loading.

    Call it before the first `fit`, which compiles the training step. Every objective around the
    model uses it: `FlexiViT` at the model's own patch size alone, `DINO` for global views alone.

    Args:
        model: A `ViT`.
        blocks: Indices of the blocks to compute again; None means all. () switches it off.

    Example:

    >>> keras_vit.train.remat(model)
    >>> model.compile("adamw", "sparse_categorical_crossentropy")
    >>> model.fit(images, labels)
    """
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a keras_vit.ViT. Received: model={model!r}")
    if keras.backend.backend() not in _RECOMPUTED:
        raise ValueError(
            f"model must be trained on {', '.join(_RECOMPUTED)}. "
            f"Received: a model on {keras.backend.backend()}"
        )
    merged = model.config.token_merging
    if merged:
        raise ValueError(
            "model must not merge tokens (`keras_vit.with_token_merging(model, 0)`). "
            f"Received: token_merging={merged}"
        )
    depth = model.config.depth
    wanted = range(depth) if blocks is None else [*blocks]
    for i in wanted:
        if not isinstance(i, int) or not -depth <= i < depth:
            raise ValueError(
                f"blocks must be in [-{depth}, {depth - 1}]. Received: blocks={blocks!r}"
            )
    chosen = {i % depth for i in wanted}
    for i, block in enumerate(model.blocks):
        block.__dict__.pop("call", None)
        if i in chosen:
            # An attribute of the block hides its method; Keras looks it up in each call.
            block.__dict__["call"] = functools.partial(_call, block)


def _call(block, x, training=None, return_attention_scores=False, rope_scale=None):
    """`EncoderBlock.call` whose intermediate results are not kept for the backward pass."""
    call = functools.partial(type(block).call, block)
    if not training or return_attention_scores:
        return call(x, training, return_attention_scores, rope_scale)
    seeds = _seeds(block)
    learned = block.trainable_variables
    known = {id(v) for v in (*seeds, *learned)}
    frozen = [v for v in block.variables if id(v) not in known]
    scope = keras_variables.get_autocast_scope()
    dtype = None if scope is None else scope.dtype
    with keras_variables.AutocastScope(None):  # the weights in their own dtype
        values = [v.value for v in learned]
        fixed = [(v, v.value) for v in frozen]
        states = [v.value * 1 for v in seeds]  # copies, because torch assigns in place

    def run(x, rope_scale, values, states):
        pairs = zip([*learned, *seeds], [*values, *states], strict=True)
        with (
            keras.StatelessScope([*pairs, *fixed]) as scope,
            keras_variables.AutocastScope(dtype),
        ):
            y = call(x, training, False, rope_scale)
        return y, [scope.get_current_value(v) for v in seeds]

    recomputed = _RECOMPUTED[keras.backend.backend()]
    y, states = recomputed(run, x, rope_scale, values, states)
    for seed, state in zip(seeds, states, strict=True):
        seed.assign(state)
    return y


def _seeds(block) -> list:
    """The state of the seed generators of a block."""
    weights = {id(w) for w in block.weights}
    return [v for v in block.variables if id(v) not in weights]


def _on_tensorflow(run: Callable, x, rope_scale, values, states):
    import tensorflow as tf

    after = []

    # Gradients reach only what is passed; what is captured, and seeds, which have none, stay out.
    def recomputed(x, *rest):
        scale, weights = (None, rest) if rope_scale is None else (rest[0], rest[1:])
        y, new = run(x, scale, weights, states)
        after.append(new)
        return y

    scale = () if rope_scale is None else (rope_scale,)
    y = tf.recompute_grad(recomputed)(x, *scale, *values)
    return y, after[0]


def _on_jax(run: Callable, x, rope_scale, values, states):
    import jax

    # Not jax.checkpoint: XLA on a CPU drops its barriers, computes the blocks again before it needs
    # them, and saves no memory. Here what the second run reads depends on the gradient it is for.
    recomputed = jax.custom_vjp(run)

    def forward(*inputs):
        return run(*inputs), inputs

    def backward(inputs, gradients):
        x, rope_scale, values, states = inputs
        gradient, _ = gradients
        invalid = jax.numpy.isnan(gradient.ravel()[0])  # the result is NaN then in any case
        x = x + invalid.astype(x.dtype)
        states = [state + invalid.astype(state.dtype) for state in states]
        _, pull, _ = jax.vjp(
            lambda *inputs: run(*inputs, states), x, rope_scale, values, has_aux=True
        )
        return *pull(gradient), None  # seeds have no gradient

    recomputed.defvjp(forward, backward)
    return recomputed(x, rope_scale, values, states)


def _on_torch(run: Callable, x, rope_scale, values, states):
    from torch.utils import checkpoint

    # The backward pass of a GPU runs in another thread, without the offset that tells the seeds of
    # processes apart. torch itself restores its own generator, which most dropout reads.
    context: Any = contextvars.copy_context()

    def recomputed(*args):
        return context.copy().run(run, *args)

    return checkpoint.checkpoint(recomputed, x, rope_scale, values, states, use_reentrant=False)


_RECOMPUTED = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}

"""Maps of the evidence for a class, from gradients; the only file here with code per backend.

Shapes: B batch, h heads, T tokens, k prefix tokens, N = T - k patches, D width, rows x columns the
patch grid, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.explain import tokens
from keras_vit.explain.attention import patches_to_head
from keras_vit.model import ViT, head_logits


@takes_classifier
def grad_cam(
    model: ViT, images: Any, classes: int | Sequence[int] | None = None, block: int = -1
) -> np.ndarray:
    """Grad-CAM on the input tokens of a block.

    w = mean over patches of d logit / d z
    map = max(0, z w) for each patch token z

    It uses the block's input because the patch tokens after the last block do not affect the logits
    of a head that reads only the class token.

    Args:
        model: A `ViT` with a head. Its logits are explained, before any activation.
        images: `(B, H, W, C)`, preprocessed floats or uint8 pixels of the model's size.
        classes: The class to explain, one for all images or one per image; None means each image's
            top class. Without pooling, the logit is the mean over the patches.
        block: Index of the block; negative ones count from the end.

    Returns:
        float32 array `(B, rows, columns)`, 0 or greater, not normalized.

    Reference:
        arXiv 1610.02391, Eq. 1 and 2.
    """
    images, chosen = _checked(model, images, classes)
    config = model.config
    index = tokens.checked_block("block", block, config.depth)
    maps = np.zeros((len(images), config.num_patches), "float32")
    for part in tokens.batch_slices(images, config):
        inputs, gradient = _to_the_head(model, images[part], _of(chosen, part))
        for layer in reversed(range(index, config.depth)):
            gradient, _, _ = _through_block(model.blocks[layer], inputs[layer], gradient)
        patches = tokens.as_numpy(inputs[index])[:, config.num_prefix_tokens :]  # (B, N, D)
        weights = gradient[:, config.num_prefix_tokens :].mean(1)  # (B, D)
        maps[part] = np.maximum(np.einsum("bnd,bd->bn", patches, weights), 0)
    return maps.reshape(-1, *config.grid)


@takes_classifier
def attention_gradient(
    model: ViT, images: Any, classes: int | Sequence[int] | None = None
) -> np.ndarray:
    """Attention times its gradient, through all layers.

    A_l' = mean over heads of max(0, A_l * d logit / d A_l)
    R <- R + A_l' R, from R = I, first layer to last

    Args:
        model: A `ViT` with a head. Its logits are explained, before any activation.
        images: As in `grad_cam`.
        classes: As in `grad_cam`.

    Returns:
        float32 array `(B, rows, columns)`, 0 or greater, not normalized: the patches' columns of
        `R - I`, in the class token's row or the mean over the pooled tokens.

    Reference:
        arXiv 2103.15679, Eq. 5 and 6.
    """
    images, chosen = _checked(model, images, classes)
    config = model.config
    maps = np.zeros((len(images), *config.grid), "float32")
    for part in tokens.batch_slices(images, config):
        inputs, gradient = _to_the_head(model, images[part], _of(chosen, part))
        relevant: list[np.ndarray] = []
        for layer in reversed(range(config.depth)):
            gradient, weights, change = _through_block(model.blocks[layer], inputs[layer], gradient)
            relevant.insert(0, np.maximum(weights * change, 0).mean(1))  # (B, T, T)
        identity = np.eye(config.num_tokens, dtype="float32")
        relevance = np.tile(identity, (len(relevant[0]), 1, 1))
        for attended in relevant:
            relevance += attended @ relevance
        maps[part] = patches_to_head(relevance - identity, model, images[part])
    return maps


def _checked(model, images, classes):
    """Checks the arguments; returns images, and classes as an array (B,) or None."""
    tokens.check_vit(model)
    config = model.config
    if not config.num_classes:
        raise ValueError("model must have a head. Received: num_classes=0")
    images = tokens.checked_images(images, config)
    if classes is None:
        return images, None
    array = np.asarray(classes)
    fits = array.dtype.kind in "iu" and array.shape in ((), (len(images),))
    if not fits or array.min() < 0 or array.max() >= config.num_classes:
        raise ValueError(
            f"classes must be ints in [0, {config.num_classes - 1}], one or {len(images)} of them. "
            f"Received: classes={classes!r}"
        )
    return images, np.broadcast_to(array, len(images))


def _of(classes, part):
    return None if classes is None else classes[part]


def _to_the_head(model: ViT, images, classes) -> tuple[list[Any], np.ndarray]:
    """The input of each block, and the logit's gradient with respect to the last block's output."""
    z = tokens.embedded(model, images)
    inputs = []
    for block in model.blocks:
        inputs.append(z)
        z = tokens.after(block, z)
    if classes is None:
        classes = tokens.as_numpy(_logits(model, z)).argmax(-1)
    chosen = np.eye(model.config.num_classes, dtype="float32")[classes]  # (B, K)
    scale = max(_largest(tokens.as_numpy(kernel)) for kernel in _head_kernels(model))

    def total(x):
        return ops.sum(ops.multiply(_logits(model, x), chosen / scale)), None

    gradient, _, _ = _gradients(total, z)
    return inputs, gradient * scale


def _head_kernels(model: ViT) -> list[Any]:
    head = model.get_layer("head")
    if model.config.pooling == "token_pair":
        return [head.class_dense.kernel, head.distillation_dense.kernel]
    return [head.kernel]


def _logits(model: ViT, z):
    """Logits (B, K) in float32 from the last block's tokens (B, T, D), without activation."""
    config: ViTConfig = model.config
    layers = model.layers
    for layer in layers[layers.index(model.blocks[-1]) + 1 : -1]:
        z = layer(z, training=False)
    z = ops.cast(head_logits(model, z), "float32")
    return ops.mean(z[:, tokens.read_tokens(config)], axis=1) if config.pooling is None else z


def _through_block(block, z, upstream):
    """The gradient of a block's input from that of its output; its attention and its gradient."""
    scale = _largest(upstream)
    upstream = upstream / scale

    def weighted(x):
        y, scores = block(x, training=False, return_attention_scores=True)
        return ops.sum(ops.multiply(ops.cast(y, "float32"), upstream)), scores

    gradient, scores, change = _gradients(weighted, z)
    return gradient * scale, scores, change * scale


def _largest(values) -> np.float32:
    """The scale of a gradient, which is divided by it to avoid underflow in half precision."""
    return np.abs(values).max() or np.float32(1)


def _gradients(function: Callable, x: Any) -> tuple[np.ndarray, Any, Any]:
    """Gradients of a number with respect to the input and to an intermediate tensor.

    Args:
        function: Maps `x` to the number, and to an intermediate tensor or None.
        x: A tensor.

    Returns:
        The gradient of `x`; the intermediate tensor and its gradient, or None and None.
    """
    backend = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}
    found = backend[keras.backend.backend()](function, x)
    gradient, inner, change = (None if v is None else tokens.as_numpy(v) for v in found)
    return np.asarray(gradient), inner, change


def _tensorflow(function, x):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        number, inner = function(x)
    wanted = [x] if inner is None else [x, inner]
    gradient, *change = tape.gradient(number, wanted)
    return gradient, inner, change[0] if change else None


def _torch(function, x):
    import torch

    with torch.enable_grad():
        x = x.detach().requires_grad_()
        number, inner = function(x)
    wanted = [x] if inner is None else [x, inner]
    gradient, *change = torch.autograd.grad(number, wanted)
    return gradient, inner, change[0] if change else None


def _jax(function, x):
    import jax
    from jax.extend import core

    program = jax.make_jaxpr(function)(x)
    whole = program.jaxpr
    if len(whole.outvars) == 1:
        return jax.grad(lambda x: function(x)[0])(x), None, None
    # JAX has no tape: the program is cut at the inner tensor, which becomes another input.
    cut = whole.outvars[1]
    rest = whole.replace(
        invars=[*whole.invars, cut],
        eqns=[step for step in whole.eqns if cut not in step.outvars],
        debug_info=whole.debug_info.with_unknown_names(),
    )
    behind = core.jaxpr_as_fun(core.ClosedJaxpr(rest, program.consts))

    def number(x, shift):
        inner = function(x)[1]
        return behind(x, inner + shift)[0], inner

    zero = jax.numpy.zeros(cut.aval.shape, cut.aval.dtype)
    (gradient, change), inner = jax.grad(number, argnums=(0, 1), has_aux=True)(x, zero)
    return gradient, inner, change

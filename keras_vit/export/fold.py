"""A trained model, folded for inference: fewer and larger products, in NumPy, for any runtime.

A model is written to be read and trained; much of what it computes can be computed beforehand. Each
rule here is an identity, so that the folded model is the model up to rounding:

- `(n(x) * gamma + beta) W + b = n(x) (diag(gamma) W) + (beta W + b)`: the gain and the offset of a
  LayerNorm move into the Dense behind it. A post-norm stands on the residual stream and keeps them.
- `gamma * (x W + b) = x (W diag(gamma)) + gamma * b`: LayerScale moves into the Dense before it.
- `1 / sqrt(d)` moves into the query.
- Softmax does not see what is the same for every key: a key's bias or offset goes, and with q/k
  norms the gain of the keys moves to the queries.
- Attention weights sum to 1: the bias of the values moves into that of the output projection.
- A LayerNorm does not see the mean of its input. Where every reader of the residual stream is one,
  what is added to the stream is centred beforehand, and no mean is left to subtract.
- Query, key and value become one product; LoRA is added to its kernel; dropout is gone.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.model import ViT

FINAL_ACTIVATIONS = (None, "linear", "softmax", "log_softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class Product:
    """`x kernel + bias`."""

    kernel: np.ndarray
    bias: np.ndarray


@dataclasses.dataclass(frozen=True)
class Norm:
    """`(x - mean) / sqrt(variance + epsilon)` over the last axis, then `* scale + offset`."""

    epsilon: float
    scale: np.ndarray | None = None
    """None, and `offset` too, where both were folded away."""
    offset: np.ndarray | None = None
    centred: bool = False
    """Whether the mean of `x` is 0 already: to subtract it once more is allowed, and idle."""


@dataclasses.dataclass(frozen=True)
class Block:
    """An encoder block: `f` of Eq. 2 and of Eq. 3, each a norm and two products."""

    attention_norm: Norm
    qkv: Product
    """(D, 3 * h * d): the queries of all heads, then the keys, then the values."""
    query_norm: Norm | None
    key_norm: Norm | None
    output: Product
    """(h * d, D)."""
    mlp_norm: Norm
    mlp_1: Product
    mlp_2: Product


@dataclasses.dataclass(frozen=True)
class Folded:
    """A model for inference: arrays in float32, and what is to be done with them.

    Shapes: B batch, N patches, k tokens in front, T = k + N, D width, h heads, d head size.

    1. Cut the images into patches (B * N, P * P * C), rows before columns before channels;
       `patch_norm` if there is one; `patches`; `token_norm` if there is one; add `positions` (N, D)
       if there are any. Put `prefix` (k, D) in front of each image's patches.
    2. For each block, with `config.block_norm == "pre"`: `z += output(attention(qkv(norm(z))))`,
       `z += mlp_2(gelu(mlp_1(norm(z))))`; with "post" the norms follow the sums instead.
       Attention is `softmax(q k^T) v`: the scale is in the query.
       With `first_token_only`, the last block needs queries of the first token alone, and the sums
       and its MLP too.
    3. `final_norm` if there is one, before or after the pooling as `config.final_norm` says;
       `pre_logits` and tanh if there are any; `head` and `config.classifier_activation`.
    """

    config: ViTConfig
    patch_norm: Norm | None
    patches: Product
    token_norm: Norm | None
    positions: np.ndarray | None
    prefix: np.ndarray
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    pre_logits: Product | None
    head: Product | None

    @property
    def first_token_only(self) -> bool:
        """Whether nothing but the first token leaves the last block."""
        return self.config.pooling == "token"


def fold(model: ViT) -> Folded:
    """Reads a model's weights once and folds them.

    Args:
        model: A `ViT` of any configuration, on any backend. LoRA is merged; the model itself does
            not change.

    Returns:
        A `Folded`.

    Example:

    >>> folded = fold(keras_vit.vit_b16(num_classes=10))
    >>> folded.blocks[0].qkv.kernel.shape
    (768, 2304)
    """
    check_model(model)
    config = model.config
    layers = {layer.name: layer for layer in model.layers}
    patch_norm, patches, token_norm = _patches(layers["patches"])
    positions, prefix = _tokens(layers, config)
    final_norm = _norm(layers["encoder_norm"]) if config.final_norm != "none" else None
    pre_logits = _dense(layers["pre_logits"]) if config.representation_size is not None else None
    head = _dense(layers["head"]) if config.num_classes else None
    # The mean of tokens is linear, so a pooling between the norm and the Dense does not matter.
    if final_norm and pre_logits:
        final_norm, pre_logits = Norm(final_norm.epsilon), _behind(final_norm, pre_logits)
    elif final_norm and head:
        final_norm, head = Norm(final_norm.epsilon), _behind(final_norm, head)
    blocks = (_to_float32(_block(block)) for block in model.blocks)  # one at a time in float64
    if final_norm and config.block_norm == "pre" and not token_norm:
        patches, prefix = _centred(patches), _without_mean(prefix)
        positions = None if positions is None else _without_mean(positions)
        blocks = (_to_float32(_in_centred_stream(block)) for block in blocks)
        final_norm = dataclasses.replace(final_norm, centred=True)
    folded = Folded(
        config=config,
        patch_norm=patch_norm,
        patches=patches,
        token_norm=token_norm,
        positions=positions,
        prefix=prefix,
        blocks=tuple(blocks),
        final_norm=final_norm,
        pre_logits=pre_logits,
        head=head,
    )
    return _to_float32(folded)


def check_model(model: Any) -> None:
    """Raises where a model cannot be folded."""
    if not isinstance(model, ViT):
        hint = " (a model made by `features` or `clone_model` is not one)"
        raise ValueError(
            f"model must be a keras_vit.ViT{hint}. Received: model={type(model).__name__}"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "quantization_mode", None) is not None:
            raise ValueError(
                "model must not be quantised: fold the float model, and quantise what is exported "
                f"instead. Received: {layer.quantization_mode} in layer {layer.path!r}"
            )
    name = model.config.classifier_activation
    if name not in FINAL_ACTIVATIONS:
        raise ValueError(
            f"classifier_activation must be one of {FINAL_ACTIVATIONS} for inference; otherwise "
            f"leave it out and apply it to the logits. Received: classifier_activation={name!r}"
        )


# -- the parts of a model


def _patches(layer) -> tuple[Norm | None, Product, Norm | None]:
    kernel = _array(layer.projection.kernel)  # (P, P, C, D)
    patches = Product(kernel.reshape(-1, kernel.shape[-1]), _array(layer.projection.bias))
    if not layer.norm:
        return None, patches, None
    patch_norm = _norm(layer.norm_before)
    return Norm(patch_norm.epsilon), _behind(patch_norm, patches), _norm(layer.norm_after)


def _tokens(layers, config: ViTConfig) -> tuple[np.ndarray | None, np.ndarray]:
    """Positions of the patches, and the tokens in front with theirs."""
    positions: Any = None
    if config.position_embedding != "none":
        positions = _array(layers["position_embedding"]._table())  # (N, D) or (1 + N, D)
    prefix = np.zeros((0, config.width))
    if config.class_token:
        prefix = _array(layers["class_token"].tokens)[0]  # (1, D)
        if config.class_row:
            prefix, positions = prefix + positions[:1], positions[1:]
    if config.num_registers:
        prefix = np.concatenate([prefix, _array(layers["registers"].tokens)[0]])  # (k, D)
    return positions, prefix


def _block(block) -> Block:
    attention = block.attention
    query, key, value = (
        _dense(dense, split=1)
        for dense in (attention.query_dense, attention.key_dense, attention.value_dense)
    )
    output = _dense(attention.output_dense, split=2)
    mlp_1, mlp_2 = _dense(block.mlp.dense_1), _dense(block.mlp.dense_2)
    attention_norm, mlp_norm = _norm(block.attention_norm), _norm(block.mlp_norm)
    if block.block_norm == "pre":
        query, key, value = (_behind(attention_norm, p) for p in (query, key, value))
        mlp_1 = _behind(mlp_norm, mlp_1)
        attention_norm, mlp_norm = Norm(attention_norm.epsilon), Norm(mlp_norm.epsilon)

    output = Product(output.kernel, value.bias @ output.kernel + output.bias)
    value = Product(value.kernel, np.zeros_like(value.bias))
    scale = attention.key_dim**-0.5
    query_norm: Any = None
    key_norm: Any = None
    if attention.qk_norm:
        query_norm, key_norm = _norm(attention.query_norm), _norm(attention.key_norm)
        gain = scale * key_norm.scale
        query_norm = Norm(query_norm.epsilon, query_norm.scale * gain, query_norm.offset * gain)
        key_norm = Norm(key_norm.epsilon)
    else:
        query = _scaled(query, scale)
        key = Product(key.kernel, np.zeros_like(key.bias))
    qkv = Product(
        np.concatenate([query.kernel, key.kernel, value.kernel], axis=1),
        np.concatenate([query.bias, key.bias, value.bias]),
    )
    if block.layer_scale is not None:
        output = _scaled(output, _array(block.attention_scale.gamma))
        mlp_2 = _scaled(mlp_2, _array(block.mlp_scale.gamma))
    return Block(attention_norm, qkv, query_norm, key_norm, output, mlp_norm, mlp_1, mlp_2)


# -- the identities


def _behind(norm: Any, product: Product) -> Product:
    """The product behind a norm, with the norm's gain and offset in it."""
    kernel = norm.scale[:, None] * product.kernel
    return Product(kernel, norm.offset @ product.kernel + product.bias)


def _scaled(product: Product, gain: Any) -> Product:
    return Product(product.kernel * gain, product.bias * gain)


def _in_centred_stream(block: Block) -> Block:
    return dataclasses.replace(
        block,
        attention_norm=dataclasses.replace(block.attention_norm, centred=True),
        mlp_norm=dataclasses.replace(block.mlp_norm, centred=True),
        output=_centred(block.output),
        mlp_2=_centred(block.mlp_2),
    )


def _centred(product: Product) -> Product:
    return Product(_without_mean(product.kernel), _without_mean(product.bias))


def _without_mean(array: np.ndarray) -> np.ndarray:
    return array - array.mean(-1, keepdims=True, dtype="float64")


# -- reading


def _norm(layer) -> Norm:
    return Norm(layer.epsilon, _array(layer.gamma), _array(layer.beta))


def _dense(layer, split: int = 1) -> Product:
    """A Dense or EinsumDense as a matrix; the axes before `split` are its rows."""
    kernel = _array(layer.kernel)  # with the LoRA delta in it, where there is one
    rows = int(np.prod(kernel.shape[:split]))
    kernel = kernel.reshape(rows, -1)
    bias = np.zeros(kernel.shape[1]) if layer.bias is None else _array(layer.bias).reshape(-1)
    return Product(kernel, bias)


def _array(variable) -> np.ndarray:
    """In float64, so that folding rounds once, at its end."""
    value = keras.ops.cast(keras.ops.convert_to_tensor(variable), "float32")
    return np.asarray(keras.ops.convert_to_numpy(value), "float64")


def _to_float32(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part, "float32")
    if isinstance(part, tuple):
        return tuple(_to_float32(item) for item in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, ViTConfig):
        fields = {f.name: _to_float32(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return type(part)(**fields)
    return part

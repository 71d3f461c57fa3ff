"""A trained model, folded for inference: its weights in NumPy, with fewer products left to do.

A model is written to be read and trained, and much of what it computes can be computed beforehand.
Each rule here is an identity, so the folded model equals the model up to rounding:

- `(n(x) * gamma + beta) W + b = n(x) (diag(gamma) W) + (beta W + b)`: the gain and offset of a
  LayerNorm move into the Dense that follows it. A post-norm keeps them, because its output is the
  residual stream itself.
- `gamma * (x W + b) = x (W diag(gamma)) + gamma * b`: LayerScale moves into the Dense before it.
- `1 / sqrt(d)`, or the scale that each head learned, moves into the query. With q/k norms, whose
  gains all heads share, a learned one becomes a gain of the normalized queries.
- Softmax ignores what is equal for all keys, so the bias of the keys is dropped. With q/k norms,
  the offset of the keys is dropped, and their gain moves into the queries. Neither holds for keys
  that are rotated by their position, or by which tokens are merged.
- Rotary positions rotate pairs of numbers. Queries and keys are reordered alike, so that a pair is
  always i and i + d/2.
- What attention adds to its scores for two tokens' positions is computed beforehand, except what
  depends on the query.
- Attention weights sum to 1, so the bias of the values moves into that of the output projection.
- A LayerNorm ignores the mean of its input. Where only LayerNorms read the residual stream,
  whatever is added to the stream is centered beforehand, and no mean is left to subtract.
- The query of attention pooling is the same for all images. So the product of a token's key with it
  is one column a head: `(x W_k + b_k) q = x (W_k q) + b_k q`, where the last term is equal for all
  tokens.
- The mean of two heads is one head on both tokens side by side.
- QuickGELU is a SiLU between two scaled products: `x sigmoid(c x) = silu(c x) / c`.
- With "res_post" the LayerNorms read a branch instead, so what ends a branch is centered.
- LoRA is added to its kernel, and dropout is gone. The kernels of a stem are standardized.

What the result is, is in `folded.py`, and what is computed with it in `program.py`.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.fold_stem import fold_stem
from keras_vit.export.folded import (
    AttentionPool,
    Block,
    Folded,
    Gain,
    Norm,
    Product,
    Rotation,
    to_float32,
)
from keras_vit.model import ViT

FINAL_ACTIVATIONS = (None, "linear", "softmax", "log_softmax", "sigmoid")


def fold(model: ViT) -> Folded:
    """Reads a model's weights once and folds them.

    Args:
        model: A `ViT` of any configuration, on any backend. LoRA is merged into the folded weights;
            the model itself does not change.

    Returns:
        A `Folded`.

    Example:

    >>> folded = fold(keras_vit.vit_b16(num_classes=10))
    >>> folded.blocks[0].mlp_1.kernel.shape
    (768, 3072)
    """
    check_model(model)
    config = model.config
    layers = {layer.name: layer for layer in model.layers}
    patch_norm, patches, token_norm = _patches(layers["patches"])
    positions, prefix = _tokens(layers, config)
    final_norm: Any = _norm(layers["encoder_norm"]) if config.final_norm != "none" else None
    pre_logits = _dense(layers["pre_logits"]) if config.representation_size is not None else None
    head = _head(layers["head"], config) if config.num_classes else None
    feature_gain = None
    pool = _attention_pool(layers["pooling"]) if config.attention_pooling else None
    # A mean over tokens between the norm and the Dense changes nothing: it is linear.
    if final_norm and pool and config.final_norm == "before_pooling":
        final_norm, pool = _bare(final_norm), _pool_behind(final_norm, pool)
    elif final_norm and pre_logits:
        read = _read_by(pre_logits, final_norm)
        final_norm, pre_logits = _bare(final_norm), _behind(read, pre_logits)
    elif final_norm and head:
        read = _read_by(head, final_norm)
        feature_gain = Gain(read.name, read.scale, read.offset)
        final_norm, head = _bare(final_norm), _behind(read, head)
    # One at a time in float64.
    blocks = (to_float32(_block(block, config.token_merging > 0)) for block in model.blocks)
    # Attention pooling reads the stream itself if no norm comes before it.
    normed = final_norm and not (pool and config.final_norm == "after_pooling")
    # Whether only norms read the residual stream, which ignore its mean.
    stream = normed and config.block_norm == "pre" and config.norm == "layer"
    embedding_norm: Any = _norm(layers["embedding_norm"]) if config.embedding_norm else None
    first = stream or (embedding_norm and config.norm == "layer")
    if first and not token_norm:
        patches, prefix = _centered(patches), _without_mean(prefix)
        positions = None if positions is None else _without_mean(positions)
    if embedding_norm:  # whose output is not centered
        embedding_norm = dataclasses.replace(
            embedding_norm, centered=config.norm == "layer" and not token_norm
        )
    elif stream and not token_norm:
        blocks = (to_float32(_in_centered_stream(block)) for block in blocks)
        final_norm = dataclasses.replace(final_norm, centered=True)
    folded = Folded(
        config=config,
        stem=fold_stem(layers["stem"], config.stem) if config.stem else None,
        patch_norm=patch_norm,
        patches=patches,
        token_norm=token_norm,
        positions=positions,
        prefix=prefix,
        embedding_norm=embedding_norm,
        blocks=tuple(blocks),
        final_norm=final_norm,
        attention_pool=None if pool is None else _without_value_bias(pool),
        pre_logits=pre_logits,
        head=head,
        feature_gain=feature_gain,
    )
    return to_float32(folded)


def check_model(model: Any) -> None:
    """Raises `ValueError` for a model that cannot be folded."""
    if not isinstance(model, ViT):
        hint = " (`features` and `clone_model` return another class)"
        raise ValueError(
            f"model must be a keras_vit.ViT{hint}. Received: model={type(model).__name__}"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "quantization_mode", None) is not None:
            raise ValueError(
                "model must not be quantized: export the float model, and quantize the export "
                f"instead. Received: {layer.quantization_mode} in layer {layer.path!r}"
            )
    name = model.config.classifier_activation
    if name not in FINAL_ACTIVATIONS:
        raise ValueError(
            f"classifier_activation must be one of {FINAL_ACTIVATIONS} for inference; apply any "
            f"other to the logits yourself. Received: classifier_activation={name!r}"
        )


# -- the parts of a model


def _patches(layer) -> tuple[Norm | None, Product, Norm | None]:
    kernel = _array(layer.projection.kernel)  # (P, P, C, D)
    bias = np.zeros(kernel.shape[-1])
    if layer.use_bias:
        bias = _array(layer.projection.bias)
    patches = Product(layer.projection.path, kernel.reshape(-1, kernel.shape[-1]), bias)
    token_norm = None if layer.norm_after is None else _norm(layer.norm_after)
    if layer.norm_before is None:
        return None, patches, token_norm
    patch_norm = _norm(layer.norm_before)
    return _bare(patch_norm), _behind(patch_norm, patches), token_norm


def _tokens(layers, config: ViTConfig) -> tuple[np.ndarray | None, np.ndarray]:
    """The positions of the patches, and the tokens in front with their own positions."""
    positions: Any = None
    if config.position_table:
        positions = _array(layers["position_embedding"]._table())  # (N, D) or (1 + N, D)
    prefix = np.zeros((0, config.width))
    if config.class_token:
        prefix = _array(layers["class_token"].tokens)[0]  # (1, D)
        if config.distillation_token:
            prefix = np.concatenate([prefix, _array(layers["distillation_token"].tokens)[0]])
        if rows := config.num_prefix_rows:
            prefix, positions = prefix + positions[:rows], positions[rows:]
    if config.num_registers:
        prefix = np.concatenate([prefix, _array(layers["registers"].tokens)[0]])  # (k, D)
    return positions, prefix


def _block(block, merging: bool) -> Block:
    """An encoder block; with `merging`, its keys are kept as they are."""
    attention = block.attention
    query, key, value = (
        _dense(dense, split=1)
        for dense in (attention.query_dense, attention.key_dense, attention.value_dense)
    )
    output = _dense(attention.output_dense, split=2)
    mlp_1, mlp_2 = _dense(block.mlp.dense_1), _dense(block.mlp.dense_2)
    mlp_gate = _dense(block.mlp.gate) if block.mlp.kind == "swiglu" else None
    mlp_inner_norm = _norm(block.mlp.norm) if block.mlp.inner_norm else None
    if block.gelu == "quick" and not mlp_gate:
        mlp_1, mlp_2, mlp_inner_norm = _with_silu(block.mlp.QUICK, mlp_1, mlp_2, mlp_inner_norm)
    attention_norm, mlp_norm = _norm(block.attention_norm), _norm(block.mlp_norm)
    if block.block_norm == "pre":
        query, key, value = (_behind(attention_norm, p) for p in (query, key, value))
        mlp_1 = _behind(mlp_norm, mlp_1)
        mlp_gate = _behind(mlp_norm, mlp_gate) if mlp_gate else None
        attention_norm, mlp_norm = _bare(attention_norm), _bare(mlp_norm)

    inner_norm: Any = _norm(attention.heads_norm) if attention.inner_norm else None
    if inner_norm:  # which is not linear, so the bias of the values stays in front of it
        inner_norm, output = _bare(inner_norm), _behind(inner_norm, output)
    else:
        output = dataclasses.replace(output, bias=value.bias @ output.kernel + output.bias)
        value = _without_bias(value)
    learned = attention.score_scale == "learned"
    scale: Any = _array(attention.scale) if learned else attention.key_dim**-0.5  # (h,) or a number
    query_gain: Any = None
    query_norm: Any = None
    key_norm: Any = None
    rotation = _rotation(attention)
    score_bias = offset_keys = None
    if attention.relative and attention.relative["kind"] == "relative":
        offset_keys = _array(attention.relative_positions.offset_keys("float32")).swapaxes(0, 1)
    elif attention.relative:
        score_bias = _array(attention.relative_positions.bias())  # (h, T, T)
    if attention.qk_norm:
        query_norm, key_norm = _norm(attention.query_norm), _norm(attention.key_norm)
        # Keys that are rotated, and those of offsets, do not have this gain.
        movable = not (rotation or merging) and offset_keys is None
        gain = key_norm.scale if movable else np.ones_like(key_norm.scale)  # (d,)
        gain = np.multiply.outer(scale, gain)  # (h, d) or (d,)
        gain = gain[:, None] if learned else gain
        query_norm = dataclasses.replace(
            query_norm, scale=query_norm.scale * gain, offset=query_norm.offset * gain
        )
        key_norm = _bare(key_norm) if movable else key_norm
    else:
        query = _scaled(query, np.repeat(scale, attention.key_dim) if learned else scale)
        key = key if rotation or merging else _without_bias(key)
    if rotation and attention.rotary.pairs == "neighbors":
        query, key, query_norm, key_norm = (
            part and _halves(part, attention.key_dim) for part in (query, key, query_norm, key_norm)
        )
    if query_norm and learned:  # a norm of all heads has no gain of each
        query_gain = Gain(query_norm.name, query_norm.scale, query_norm.offset)
        query_norm = _bare(query_norm)
    if mlp_inner_norm:
        mlp_inner_norm, mlp_2 = _bare(mlp_inner_norm), _behind(mlp_inner_norm, mlp_2)
    if block.layer_scale is not None:
        output = _scaled(output, _array(block.attention_scale.gamma))
        mlp_2 = _scaled(mlp_2, _array(block.mlp_scale.gamma))
    if block.block_norm == "res_post" and block.norm_kind == "layer":
        output, mlp_2 = _centered(output), _centered(mlp_2)
        attention_norm, mlp_norm = (
            dataclasses.replace(norm, centered=True) for norm in (attention_norm, mlp_norm)
        )
    return Block(
        name=block.path,
        attention_norm=attention_norm,
        query=query,
        key=key,
        value=value,
        query_norm=query_norm,
        key_norm=key_norm,
        query_gain=query_gain,
        rotation=rotation,
        score_bias=score_bias,
        offset_keys=offset_keys,
        attention_inner_norm=inner_norm,
        output=output,
        mlp_norm=mlp_norm,
        mlp_gate=mlp_gate,
        mlp_1=mlp_1,
        mlp_inner_norm=mlp_inner_norm,
        mlp_2=mlp_2,
    )


def _head(layer, config: ViTConfig) -> Product:
    """The head; of two whose logits are averaged, one product of both tokens side by side."""
    if config.pooling != "token_pair":
        return _dense(layer)
    one, other = _dense(layer.class_dense), _dense(layer.distillation_dense)
    kernel = np.concatenate([one.kernel, other.kernel]) / 2  # (2 D, K)
    return Product(layer.path, kernel, (one.bias + other.bias) / 2)


def _attention_pool(layer) -> AttentionPool:
    attention = layer.attention
    heads, size = attention.num_heads, attention.key_dim
    query, key, value = (
        _dense(dense, split=1)
        for dense in (attention.query_dense, attention.key_dense, attention.value_dense)
    )
    probe = _array(layer.probe)[0, 0]  # (D,)
    q = (probe @ query.kernel + query.bias).reshape(heads, size) * size**-0.5
    scores = np.einsum("dhk,hk->dh", key.kernel.reshape(-1, heads, size), q)
    mlp_norm, mlp_1, mlp_2 = _norm(layer.norm), _dense(layer.mlp.dense_1), _dense(layer.mlp.dense_2)
    if layer.mlp.gelu == "quick":
        mlp_1, mlp_2, _ = _with_silu(layer.mlp.QUICK, mlp_1, mlp_2, None)
    return AttentionPool(
        name=layer.path,
        scores=Product(key.name, scores, np.zeros(heads)),
        value=value,
        output=_dense(attention.output_dense, split=2),
        norm=_bare(mlp_norm),
        mlp_1=_behind(mlp_norm, mlp_1),
        mlp_2=mlp_2,
    )


def _rotation(attention) -> Rotation | None:
    if attention.rope is None:
        return None
    rotary = attention.rotary
    cos, sin = (_array(table).swapaxes(0, 1) for table in rotary.tables())  # (1 or h, T, d/2)
    cos, sin = np.concatenate([cos, cos], axis=-1), np.concatenate([-sin, sin], axis=-1)
    name = rotary.path if rotary.learned else "rotary"
    return Rotation(name, cos, sin) if rotary.learned else Rotation(name, cos[0], sin[0])


# -- the identities


def _pool_behind(norm: Any, pool: AttentionPool) -> AttentionPool:
    """Attention pooling that follows a norm, with the norm's gain and offset in it."""
    scores = _without_bias(_behind(norm, pool.scores))  # a bias would be equal for all tokens
    return dataclasses.replace(pool, scores=scores, value=_behind(norm, pool.value))


def _without_value_bias(pool: AttentionPool) -> AttentionPool:
    """The weights sum to 1, so that the bias of the values is added once, to the output."""
    output, value = pool.output, pool.value
    bias = value.bias @ output.kernel + output.bias
    output = dataclasses.replace(output, bias=bias)
    return dataclasses.replace(pool, output=output, value=_without_bias(value))


def _behind(norm: Any, product: Product) -> Product:
    """The product that follows a norm, with the norm's gain and offset in it."""
    kernel = norm.scale[:, None] * product.kernel
    return Product(product.name, kernel, norm.offset @ product.kernel + product.bias)


def _read_by(product: Product, norm: Any) -> Any:
    """The norm of what a product reads: of two normalized vectors side by side, both."""
    count = len(product.kernel) // len(norm.scale)
    return dataclasses.replace(
        norm, scale=np.tile(norm.scale, count), offset=np.tile(norm.offset, count)
    )


def _bare(norm: Any) -> Norm:
    """The norm without its gain and offset."""
    return dataclasses.replace(norm, scale=None, offset=None)


def _with_silu(c: float, first: Product, second: Product, norm: Any) -> tuple[Any, Any, Any]:
    """The products around a QuickGELU, and the norm behind it, for a SiLU in its place.

    x sigmoid(c x) = silu(c x) / c. A norm ignores the c but for its epsilon.
    """
    first = _scaled(first, c)
    if norm is None:
        return first, dataclasses.replace(second, kernel=second.kernel / c), None
    return first, second, dataclasses.replace(norm, epsilon=norm.epsilon * c**2)


def _scaled(product: Product, gain: Any) -> Product:
    return Product(product.name, product.kernel * gain, product.bias * gain)


def _without_bias(product: Product) -> Product:
    return dataclasses.replace(product, bias=np.zeros_like(product.bias))


def _halves(part: Any, size: int) -> Any:
    """A product or norm whose pairs of neighbors, 2i and 2i + 1, become i and i + size/2."""

    def ordered(array: np.ndarray) -> np.ndarray:
        pairs = array.reshape(*array.shape[:-1], -1, size // 2, 2)
        return pairs.swapaxes(-1, -2).reshape(array.shape)

    if isinstance(part, Product):
        return Product(part.name, ordered(part.kernel), ordered(part.bias))
    return dataclasses.replace(part, scale=ordered(part.scale), offset=ordered(part.offset))


def _in_centered_stream(block: Block) -> Block:
    return dataclasses.replace(
        block,
        attention_norm=dataclasses.replace(block.attention_norm, centered=True),
        mlp_norm=dataclasses.replace(block.mlp_norm, centered=True),
        output=_centered(block.output),
        mlp_2=_centered(block.mlp_2),
    )


def _centered(product: Product) -> Product:
    return Product(product.name, _without_mean(product.kernel), _without_mean(product.bias))


def _without_mean(array: np.ndarray) -> np.ndarray:
    return array - array.mean(-1, keepdims=True, dtype="float64")


# -- reading


def _norm(layer) -> Norm:
    gamma, rms = _array(layer.gamma), not hasattr(layer, "beta")
    offset = np.zeros_like(gamma) if rms else _array(layer.beta)
    return Norm(layer.path, layer.epsilon, gamma, offset, rms=rms)


def _dense(layer, split: int = 1) -> Product:
    """A Dense or EinsumDense as a matrix whose rows are the axes before `split`."""
    kernel = _array(layer.kernel)  # with LoRA merged
    rows = int(np.prod(kernel.shape[:split]))
    kernel = kernel.reshape(rows, -1)
    bias = np.zeros(kernel.shape[1]) if layer.bias is None else _array(layer.bias).reshape(-1)
    return Product(layer.path, kernel, bias)


def _array(variable) -> np.ndarray:
    """In float64, so that folding rounds only once, at the end."""
    value = keras.ops.cast(keras.ops.convert_to_tensor(variable), "float32")
    return np.asarray(keras.ops.convert_to_numpy(value), "float64")

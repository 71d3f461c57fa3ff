"""The weights of a `ViT` by path and shape, from its config alone: no model is built."""

from keras_vit.config import ViTConfig

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: ViTConfig) -> Shapes:
    """Every weight of `ViT(config)` and its shape, in the model's order.

    Example:

    >>> weight_shapes(ViTConfig())["head/kernel"]
    (768, 1000)
    """
    width, (ph, pw) = config.width, config.patch_size
    pixels = ph * pw * config.in_channels
    shapes: Shapes = {}
    shapes |= _dense("patches/projection", (ph, pw, config.in_channels), (width,))
    if config.patch_norm:
        shapes |= _norm("patches/norm_before", pixels) | _norm("patches/norm_after", width)
    if config.class_token:
        shapes["class_token/tokens"] = (1, 1, width)
    shapes |= _positions(config)
    if config.num_registers:
        shapes["registers/tokens"] = (1, config.num_registers, width)
    for i in range(config.depth):
        shapes |= {f"encoder_block_{i}/{k}": v for k, v in _block(config).items()}
    if config.final_norm != "none":
        shapes |= _norm("encoder_norm", width)
    features = width
    if config.representation_size is not None:
        shapes |= _dense("pre_logits", (features,), (config.representation_size,))
        features = config.representation_size
    if config.num_classes:
        shapes |= _dense("head", (features,), (config.num_classes,))
    return shapes


def _positions(config: ViTConfig) -> Shapes:
    rows, columns = config.grid
    kind, width = config.position_embedding, config.width
    if kind == "learned":
        return {"position_embedding/table": (config.num_patches + config.class_row, width)}
    if kind == "learned_2d":
        shapes: Shapes = {
            "position_embedding/rows": (rows, width // 2),
            "position_embedding/columns": (columns, width // 2),
        }
        return shapes | ({"position_embedding/class_row": (1, width)} if config.class_row else {})
    return {}


def _block(config: ViTConfig) -> Shapes:
    width, heads = config.width, (config.num_heads, config.key_dim)
    shapes = _norm("attention_norm", width)
    if config.qk_norm:
        shapes |= _norm("attention/query_norm", config.key_dim)
        shapes |= _norm("attention/key_norm", config.key_dim)
    for name in ("query", "key", "value"):
        dense = _dense(f"attention/{name}", (width,), heads)
        if not config.qkv_bias:
            del dense[f"attention/{name}/bias"]
        shapes |= dense
    shapes |= _dense("attention/attention_output", heads, (width,))
    shapes |= _norm("mlp_norm", width)
    shapes |= _dense("mlp/dense_1", (width,), (config.mlp_dim,))
    shapes |= _dense("mlp/dense_2", (config.mlp_dim,), (width,))
    if config.layer_scale is not None:
        shapes |= {f"{branch}_scale/gamma": (width,) for branch in ("attention", "mlp")}
    return shapes


def _dense(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Shapes:
    return {f"{name}/kernel": (*inputs, *outputs), f"{name}/bias": outputs}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}/gamma": (size,), f"{name}/beta": (size,)}

"""What vision_transformer's `models_vit.py` and big_vision's `vit.py` compute, in float64 NumPy.

Written from their published code: flax' LayerNorm has epsilon 1e-6 and `nn.gelu` is the tanh form.
"""

import numpy as np

SIZE = {"width": 20, "heads": 5, "mlp": 28, "depth": 2, "classes": 3, "patch": (8, 8), "rows": 9}


def random_google(
    seed=0, *, token=True, representation=None, prefix="", resnet=None, old=False, **size
):
    """A random checkpoint with the names of google-research/vision_transformer.

    `resnet` are the depths of a hybrid's stages; `old` GroupNorms have three more axes.
    """
    s = {**SIZE, **size}
    shapes = _stem(s, token)
    if resnet is not None:
        channels, stem = _resnet_shapes(resnet, (1, 1, 1) if old else ())
        shapes |= stem | {"embedding/kernel": (*s["patch"], channels, s["width"])}
    positions = s["rows"] + token
    shapes["Transformer/posembed_input/pos_embedding"] = (1, positions, s["width"])
    names = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
    for i in range(s["depth"]):
        block = _block(s, *names).items()
        shapes |= {f"Transformer/encoderblock_{i}/{k}": v for k, v in block}
    shapes |= _head(s, representation)
    return {prefix + name: array for name, array in _fill(shapes, seed).items()}


def random_big_vision(
    seed=0, *, token=False, old=False, scan=False, positions=True, pooling=None, **size
):
    """A random checkpoint with the names of google-research/big_vision, without a prefix.

    `pooling` precedes the names of a MAP head; None means no such head.
    """
    s = {**SIZE, **size}
    shapes = _stem(s, token)
    if positions:
        shapes["pos_embedding"] = (1, s["rows"] + old, s["width"])
    names = ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
    block = _block(s, *names).items()
    if scan:
        depth = s["depth"]
        shapes |= {f"Transformer/encoderblock/{k}": (depth, *v) for k, v in block}
    else:
        for i in range(s["depth"]):
            shapes |= {f"Transformer/encoderblock_{i}/{k}": v for k, v in block}
    if pooling is not None:
        of = {"heads": s.get("pooling_heads", s["heads"]), "mlp": s.get("pooling_mlp", s["mlp"])}
        head = _block(s | of, names[0], "LayerNorm_0", names[2]) | {"probe": (1, 1, s["width"])}
        shapes |= {f"{pooling}{k}": v for k, v in head.items()}
    return _fill(shapes | _head(s, None), seed)


def _stem(s, token):
    shapes = {
        "embedding/kernel": (*s["patch"], 3, s["width"]),
        "embedding/bias": (s["width"],),
        "Transformer/encoder_norm/scale": (s["width"],),
        "Transformer/encoder_norm/bias": (s["width"],),
    }
    return shapes | ({"cls": (1, 1, s["width"])} if token else {})


def _resnet_shapes(depths, axes, width=32):
    shapes = {"conv_root/kernel": (7, 7, 3, width)}
    shapes |= {f"gn_root/{part}": (*axes, width) for part in ("scale", "bias")}
    channels = width
    for stage, depth in enumerate(depths, 1):
        inner = width * 2 ** (stage - 1)
        for unit in range(1, depth + 1):
            parts = {
                "1": (1, 1, channels, inner),
                "2": (3, 3, inner, inner),
                "3": (1, 1, inner, 4 * inner),
            }
            if unit == 1:
                parts["_proj"] = (1, 1, channels, 4 * inner)
            for name, shape in parts.items():
                base = f"block{stage}/unit{unit}"
                shapes[f"{base}/conv{name}/kernel"] = shape
                for part in ("scale", "bias"):
                    shapes[f"{base}/gn{name}/{part}"] = (*axes, shape[-1])
            channels = 4 * inner
    return channels, shapes


def _block(s, attention, norm, mlp):
    width, heads = s["width"], (s["heads"], s["width"] // s["heads"])
    shapes = {f"{n}/{k}": (width,) for n in ("LayerNorm_0", norm) for k in ("scale", "bias")}
    for name in ("query", "key", "value"):
        shapes[f"{attention}/{name}/kernel"] = (width, *heads)
        shapes[f"{attention}/{name}/bias"] = heads
    shapes[f"{attention}/out/kernel"], shapes[f"{attention}/out/bias"] = (*heads, width), (width,)
    shapes[f"{mlp}/Dense_0/kernel"], shapes[f"{mlp}/Dense_0/bias"] = (width, s["mlp"]), (s["mlp"],)
    shapes[f"{mlp}/Dense_1/kernel"], shapes[f"{mlp}/Dense_1/bias"] = (s["mlp"], width), (width,)
    return shapes


def _head(s, representation):
    shapes, width = {}, s["width"]
    if representation:
        shapes["pre_logits/kernel"] = (width, representation)
        shapes["pre_logits/bias"] = (representation,)
        width = representation
    if s["classes"]:
        shapes["head/kernel"], shapes["head/bias"] = (width, s["classes"]), (s["classes"],)
    return shapes


def _fill(shapes, seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.5 if np.prod(shape) < 10_000 else 0.05, shape).astype("float32")
        for name, shape in shapes.items()
    }


def google(params, images):
    """Logits of `VisionTransformer`, whose class token takes part in the position table."""
    x = _embed(params, resnet(params, images) if "conv_root/kernel" in params else images)
    token = "cls" in params
    if token:
        x = _prepend(params["cls"], x)
    x = x + params["Transformer/posembed_input/pos_embedding"]
    names = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
    x = _encoder(params, x, names)
    return _logits(params, x[:, 0] if token else x.mean(axis=1))


def big_vision(params, images):
    """Logits of `_Model` with pool_type "tok" or "gap", after `fix_old_checkpoints`."""
    x = _embed(params, images)
    height, width = x.shape[1], params["cls" if "cls" in params else "embedding/bias"].shape[-1]
    cls = params.get("cls")
    table = params.get("pos_embedding")
    if table is None:
        sides = zip(images.shape[1:3], params["embedding/kernel"].shape[:2], strict=True)
        table = _sincos(*(side // patch for side, patch in sides), width)
    elif table.shape[1] == height + 1:
        cls, table = cls + table[:, :1], table[:, 1:]
    x = x + table
    if cls is not None:
        x = _prepend(cls, x)
    names = ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
    x = _encoder(params, x, names)
    for prefix in ("MAPHead_0/", ""):
        if f"{prefix}probe" in params:
            head = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
            return _logits(params, _map_head(head, x))
    return _logits(params, x[:, 0] if cls is not None else x.mean(axis=1))


def resnet(params, images):
    """The feature map of `models_resnet.py`."""

    def conv(x, name, stride=1):
        w = params[f"{name}/kernel"].astype("float64")
        w = w - np.mean(w, axis=(0, 1, 2))
        w = w / (np.std(w, axis=(0, 1, 2)) + 1e-5)
        size, rows, columns = len(w), -(-x.shape[1] // stride), -(-x.shape[2] // stride)
        x = _same(x, size, stride, 0.0)
        return sum(
            x[:, i : i + stride * rows : stride, j : j + stride * columns : stride] @ w[i, j]
            for i in range(size)
            for j in range(size)
        )

    def norm(x, name):
        batch, rows, columns, channels = x.shape
        y = x.reshape(batch, rows * columns, 32, channels // 32)
        y = y - y.mean(axis=(1, 3), keepdims=True)
        y = y / np.sqrt((y**2).mean(axis=(1, 3), keepdims=True) + 1e-6)
        gain, offset = (params[f"{name}/{part}"].reshape(-1) for part in ("scale", "bias"))
        return y.reshape(x.shape) * gain + offset

    def relu(x):
        return np.where(x > 0, x, 0)

    x = relu(norm(conv(images.astype("float64"), "conv_root", 2), "gn_root"))
    rows, columns = x.shape[1] // 2, x.shape[2] // 2
    x = _same(x, 3, 2, -np.inf)
    taps = [(i, j) for i in range(3) for j in range(3)]
    x = np.max([x[:, i : i + 2 * rows : 2, j : j + 2 * columns : 2] for i, j in taps], axis=0)
    stage = 1
    while f"block{stage}/unit1/conv1/kernel" in params:
        unit = 1
        while f"block{stage}/unit{unit}/conv1/kernel" in params:
            name, stride = f"block{stage}/unit{unit}", 2 if unit == 1 < stage else 1
            y = relu(norm(conv(x, f"{name}/conv1"), f"{name}/gn1"))
            y = relu(norm(conv(y, f"{name}/conv2", stride), f"{name}/gn2"))
            y = norm(conv(y, f"{name}/conv3"), f"{name}/gn3")
            if f"{name}/conv_proj/kernel" in params:
                x = norm(conv(x, f"{name}/conv_proj", stride), f"{name}/gn_proj")
            x, unit = relu(x + y), unit + 1
        stage += 1
    return x


def _same(x, size, stride, value):
    """XLA's padding "SAME"."""
    pads = []
    for side in x.shape[1:3]:
        total = max((-(-side // stride) - 1) * stride + size - side, 0)
        pads.append((total // 2, total - total // 2))
    return np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=value)


def _map_head(head, x):
    """`MAPHead`: the attention of a probe, then an MLP around which alone there is a residual."""
    attention = "MultiHeadDotProductAttention_0"
    probe = np.broadcast_to(head["probe"], (len(x), 1, x.shape[-1]))
    q, k, v = (
        np.einsum("btd,dhe->bhte", y, head[f"{attention}/{n}/kernel"])
        + head[f"{attention}/{n}/bias"][:, None]
        for n, y in (("query", probe), ("key", x), ("value", x))
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = scores / scores.sum(axis=-1, keepdims=True) @ v
    x = np.einsum("bhte,hed->btd", y, head[f"{attention}/out/kernel"])
    x = x + head[f"{attention}/out/bias"]
    y = _norm(head, "LayerNorm_0", x)
    y = y @ head["MlpBlock_0/Dense_0/kernel"] + head["MlpBlock_0/Dense_0/bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return (x + y @ head["MlpBlock_0/Dense_1/kernel"] + head["MlpBlock_0/Dense_1/bias"])[:, 0]


def _embed(params, images):
    kernel = params["embedding/kernel"].astype("float64")
    ph, pw, channels, width = kernel.shape
    batch, height, across, _ = images.shape
    x = images.astype("float64").reshape(batch, height // ph, ph, across // pw, pw, channels)
    x = np.einsum("bhpwqc,pqcd->bhwd", x, kernel) + params["embedding/bias"]
    return x.reshape(batch, -1, width)


def _prepend(cls, x):
    return np.concatenate([np.broadcast_to(cls, (len(x), 1, x.shape[-1])), x], axis=1)


def _encoder(params, x, names):
    stacked = "Transformer/encoderblock/LayerNorm_0/scale" in params
    depth = 0
    if stacked:
        depth = len(params["Transformer/encoderblock/LayerNorm_0/scale"])
    else:
        while f"Transformer/encoderblock_{depth}/LayerNorm_0/scale" in params:
            depth += 1
    for i in range(depth):
        base = "Transformer/encoderblock/" if stacked else f"Transformer/encoderblock_{i}/"
        block = {
            name.removeprefix(base): array[i] if stacked else array
            for name, array in params.items()
            if name.startswith(base)
        }
        x = _encoder_block(block, x, *names)
    return _norm(params, "Transformer/encoder_norm", x)


def _encoder_block(block, x, attention, norm, mlp):
    y = _norm(block, "LayerNorm_0", x)
    q, k, v = (
        np.einsum("btd,dhe->bhte", y, block[f"{attention}/{n}/kernel"])
        + block[f"{attention}/{n}/bias"][:, None]
        for n in ("query", "key", "value")
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = scores / scores.sum(axis=-1, keepdims=True) @ v
    y = np.einsum("bhte,hed->btd", y, block[f"{attention}/out/kernel"])
    x = x + y + block[f"{attention}/out/bias"]
    y = _norm(block, norm, x)
    y = y @ block[f"{mlp}/Dense_0/kernel"] + block[f"{mlp}/Dense_0/bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return x + y @ block[f"{mlp}/Dense_1/kernel"] + block[f"{mlp}/Dense_1/bias"]


def _norm(params, name, x):
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return x * params[f"{name}/scale"] + params[f"{name}/bias"]


def _logits(params, x):
    if "pre_logits/kernel" in params:
        x = np.tanh(x @ params["pre_logits/kernel"] + params["pre_logits/bias"])
    if "head/kernel" in params:
        x = x @ params["head/kernel"] + params["head/bias"]
    return x


def _sincos(height, width, size):
    y, x = np.mgrid[:height, :width]
    omega = 1 / 10_000 ** (np.arange(size // 4) / (size // 4 - 1))
    y, x = np.outer(y.ravel(), omega), np.outer(x.ravel(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]

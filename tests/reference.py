"""Eq. 1-8 of arXiv 2010.11929 in NumPy, written from the paper: what the model is held against."""

import numpy as np
from scipy.special import erf


def forward(config, weights, images):
    """Logits of `images` by the paper's equations.

    Args:
        config: A `ViTConfig`.
        weights: Every array of the model by its path.
        images: `(B, H, W, C)`.

    Returns:
        What the model returns, in float64.
    """
    w = {path: np.asarray(value, "float64") for path, value in weights.items()}
    z = embed(config, w, np.asarray(images, "float64"))
    for i in range(config.depth):
        z = block(config, _under(w, f"encoder_block_{i}/"), z)
    eps = config.norm_epsilon
    if config.final_norm == "before_pooling":
        z = norm(z, _under(w, "encoder_norm/"), eps)  # Eq. 4
    if config.pooling == "token":
        z = z[:, 0]
    elif config.pooling == "token_pair":
        z = np.concatenate([z[:, 0], z[:, 1]], axis=1)
    elif config.pooling == "token_mean":
        z = np.concatenate([z[:, 0], z[:, config.num_prefix_tokens :].mean(1)], axis=1)
    elif config.pooling == "mean":
        z = z[:, config.num_prefix_tokens :].mean(1)
    elif config.pooling == "mean_all":
        z = z.mean(1)
    elif config.pooling in ("map", "map_all"):
        k = config.num_prefix_tokens if config.pooling == "map" else 0
        z = attention_pooling(config, _under(w, "pooling/"), z[:, k:])
    if config.final_norm == "after_pooling":
        z = norm(z, _under(w, "encoder_norm/"), eps)
    if config.representation_size:
        z = np.tanh(z @ w["pre_logits/kernel"] + w["pre_logits/bias"])
    if config.num_classes and config.pooling == "token_pair":
        one, two = (
            token @ w[f"head/{name}/kernel"] + w[f"head/{name}/bias"]
            for name, token in zip(("class", "distillation"), np.split(z, 2, axis=1), strict=True)
        )
        z = (one + two) / 2
    elif config.num_classes:
        z = z @ w["head/kernel"] + w.get("head/bias", 0.0)
    return z


def embed(config, w, images):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos, Eq. 1."""
    (gh, gw), (ph, pw) = config.grid, config.patch_size
    eps = config.norm_epsilon
    patches = [
        images[:, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw].reshape(len(images), -1)
        for r in range(gh)
        for c in range(gw)
    ]
    x = np.stack(patches, axis=1)
    if config.patch_norm:
        x = norm(x, _under(w, "patches/norm_before/"), eps)
    kernel = w["patches/projection/kernel"]
    x = x @ kernel.reshape(-1, config.width) + w["patches/projection/bias"]
    if config.patch_norm:
        x = norm(x, _under(w, "patches/norm_after/"), eps)

    table = positions(config, w)
    if config.class_token:
        token = np.repeat(w["class_token/tokens"], len(x), axis=0)
        if config.distillation_token:
            other = np.repeat(w["distillation_token/tokens"], len(x), axis=0)
            token = np.concatenate([token, other], axis=1)
        if config.class_row:
            x = np.concatenate([token, x], axis=1) + table
        else:
            x = np.concatenate([token, x + table], axis=1)
    else:
        x = x + table
    if config.num_registers:
        registers = np.repeat(w["registers/tokens"], len(x), axis=0)
        k = int(config.class_token) + int(config.distillation_token)
        x = np.concatenate([x[:, :k], registers, x[:, k:]], axis=1)
    return x


def positions(config, w):
    gh, gw = config.grid
    if config.position_embedding == "learned":
        return w["position_embedding/table"]
    if config.position_embedding == "learned_2d":
        rows, columns = w["position_embedding/rows"], w["position_embedding/columns"]
        table = [np.concatenate([rows[r], columns[c]]) for r in range(gh) for c in range(gw)]
        if config.class_row:
            table = [*w["position_embedding/class_row"], *table]
        return np.stack(table)
    if config.position_embedding == "sincos_2d":
        quarter = config.width // 4
        table = np.zeros((gh * gw, config.width))
        for r in range(gh):
            for c in range(gw):
                for i in range(quarter):
                    f = 1 / 10000 ** (i / (quarter - 1))
                    values = np.sin(c * f), np.cos(c * f), np.sin(r * f), np.cos(r * f)
                    table[r * gw + c, i::quarter] = values
        return table
    return np.zeros((1, config.width))


def block(config, w, z):
    eps = config.norm_epsilon

    def attend(x):
        x = attention(config, _under(w, "attention/"), x)
        return x * w.get("attention_scale/gamma", 1.0)

    def mlp(x):
        x = gelu(x @ w["mlp/dense_1/kernel"] + w["mlp/dense_1/bias"], config.gelu)
        x = x @ w["mlp/dense_2/kernel"] + w["mlp/dense_2/bias"]
        return x * w.get("mlp_scale/gamma", 1.0)

    norm_1, norm_2 = _under(w, "attention_norm/"), _under(w, "mlp_norm/")
    if config.block_norm == "pre":
        z = attend(norm(z, norm_1, eps)) + z  # Eq. 2
        return mlp(norm(z, norm_2, eps)) + z  # Eq. 3
    z = norm(attend(z) + z, norm_1, eps)
    return norm(mlp(z) + z, norm_2, eps)


def attention(config, w, z):
    """Eq. 5-8, one head after the other."""
    heads = []
    for h in range(config.num_heads):
        q, k, v = (
            z @ w[f"{name}/kernel"][:, h] + (w[f"{name}/bias"][h] if config.qkv_bias else 0.0)
            for name in ("query", "key", "value")
        )  # Eq. 5
        if config.qk_norm:
            q = norm(q, _under(w, "query_norm/"), config.norm_epsilon)
            k = norm(k, _under(w, "key_norm/"), config.norm_epsilon)
        a = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(config.key_dim))  # Eq. 6
        heads.append(a @ v)  # Eq. 7
    joined = np.concatenate(heads, axis=-1)
    kernel = w["attention_output/kernel"].reshape(-1, config.width)
    return joined @ kernel + w["attention_output/bias"]  # Eq. 8


def attention_pooling(config, w, x):
    """z = MHA(probe; x, x), y = z + MLP(LN(z)), one head after the other."""
    heads, a = [], _under(w, "attention/")
    for h in range(config.pooling_heads or config.num_heads):
        q, k, v = (
            z @ a[f"{name}/kernel"][:, h] + a[f"{name}/bias"][h]
            for name, z in (("query", w["probe"]), ("key", x), ("value", x))
        )
        scores = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
        heads.append(scores @ v)
    kernel = a["attention_output/kernel"].reshape(-1, config.width)
    z = np.concatenate(heads, axis=-1)[:, 0] @ kernel + a["attention_output/bias"]
    y = norm(z, _under(w, "norm/"), config.norm_epsilon)
    y = gelu(y @ w["mlp/dense_1/kernel"] + w["mlp/dense_1/bias"], config.gelu)
    return z + y @ w["mlp/dense_2/kernel"] + w["mlp/dense_2/bias"]


def norm(x, w, eps):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w["gamma"] + w["beta"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x, kind):
    if kind == "exact":
        return 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _under(w, prefix):
    return {path.removeprefix(prefix): v for path, v in w.items() if path.startswith(prefix)}

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
    if config.token_merging:
        z, sizes = merged(config, w, z)
        if config.pooling in ("mean", "mean_all", "token_mean"):  # a token for each patch again
            z = repeated(z, sizes)
    else:
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
    if config.stem:
        images = stem(config, _under(w, "stem/"), images)
    if config.patch_shift:
        images = shifted(images, config.patch_size)
    (gh, gw), (ph, pw) = config.grid, (s // config.stem_stride for s in config.patch_size)
    eps = config.norm_epsilon
    patches = [
        images[:, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw].reshape(len(images), -1)
        for r in range(gh)
        for c in range(gw)
    ]
    x = np.stack(patches, axis=1)
    if config.patch_norm in (True, "before"):
        x = norm(x, _under(w, "patches/norm_before/"), eps)
    kernel = w["patches/projection/kernel"]
    x = x @ kernel.reshape(-1, config.width)
    if config.patch_bias:
        x = x + w["patches/projection/bias"]
    if config.patch_norm in (True, "after"):
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
    return norm(x, _under(w, "embedding_norm/"), eps) if config.embedding_norm else x


def shifted(images, patch):
    """Section 3.2 of arXiv 2112.13492, one pixel after the other: [x, lu, ru, lb, rb]."""
    count, height, width, channels = images.shape
    s, t = patch[0] // 2, patch[1] // 2
    copies = np.zeros((count, height, width, 5 * channels))
    for i, j in np.ndindex(height, width):
        for n, (down, right) in enumerate(((0, 0), (-s, -t), (-s, t), (s, -t), (s, t))):
            if 0 <= i + down < height and 0 <= j + right < width:
                part = slice(n * channels, (n + 1) * channels)
                copies[:, i, j, part] = images[:, i + down, j + right]
    return copies


def stem(config, w, images):
    """Section 3.1, "Hybrid Architecture": the feature map of a ResNet. Or of convolutions."""
    if config.stem == "conv":
        stages = config.stem_depths or (1,) * int(np.log2(config.patch_size[0]))
        steps = [(2 if not i else 1) for depth in stages for i in range(depth)]
        for i, strides in enumerate(steps):
            conv, norm = (
                (f"conv_{i}/kernel", f"norm_{i}/") if i else ("root_conv/kernel", "root_norm/")
            )
            x = convolve(images, w[conv], strides)
            x = group_norm(x, _under(w, norm), config.stem_epsilon, x.shape[-1] // 16)
            images = np.maximum(x, 0)
        return images

    def unit(x, name, strides):
        u = _under(w, f"{name}/")
        shortcut = x
        if "shortcut_conv/kernel" in u:
            shortcut = conv_norm(x, u, "shortcut_conv", "shortcut_norm", strides)
        x = np.maximum(conv_norm(x, u, "conv_1", "norm_1", 1), 0)
        x = np.maximum(conv_norm(x, u, "conv_2", "norm_2", strides), 0)
        return np.maximum(conv_norm(x, u, "conv_3", "norm_3", 1) + shortcut, 0)

    def conv_norm(x, w, conv, norm, strides):
        x = convolve(x, standardize(config, w[f"{conv}/kernel"]), strides)
        return group_norm(x, _under(w, f"{norm}/"), config.stem_epsilon)

    x = np.maximum(conv_norm(images, w, "root_conv", "root_norm", 2), 0)
    # At the edge a window of 3 x 3 is cut off, below and on the right.
    x = np.stack([_shifted(x, r, c) for r in range(3) for c in range(3)]).max(0)
    for stage, depth in enumerate(config.stem_depths):
        for i in range(depth):
            x = unit(x, f"stage_{stage}_unit_{i}", 2 if stage and not i else 1)
    return x


def _shifted(x, rows, columns):
    """Each second cell from (rows, columns) on, and less than any other beyond the edge."""
    padded = np.pad(x, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=-np.inf)
    height, width = x.shape[1:3]
    return padded[:, rows : rows + height : 2, columns : columns + width : 2]


def standardize(config, kernel):
    centered = kernel - kernel.mean((0, 1, 2))
    if config.stem_standardization == "deviation":
        return centered / (kernel.std((0, 1, 2)) + 1e-5)
    return centered / np.sqrt(kernel.var((0, 1, 2)) + 1e-8)


def convolve(x, kernel, strides):
    """One output cell after the other, with TensorFlow's padding "SAME"."""
    k, (height, width) = len(kernel), x.shape[1:3]
    assert height % strides == 0 and width % strides == 0
    before = (k - strides) // 2 if k > 1 else 0
    after = k - strides - before if k > 1 else 0
    x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
    rows = [
        [np.tensordot(x[:, r : r + k, c : c + k], kernel, 3) for c in range(0, width, strides)]
        for r in range(0, height, strides)
    ]
    return np.moveaxis(np.array(rows), 2, 0)


def group_norm(x, w, eps, groups=32):
    parts = np.split(x, groups, axis=-1)
    parts = [
        (p - p.mean((1, 2, 3), keepdims=True)) / np.sqrt(p.var((1, 2, 3), keepdims=True) + eps)
        for p in parts
    ]
    return np.concatenate(parts, axis=-1) * w["gamma"] + w["beta"]


def positions(config, w):
    gh, gw = config.grid
    if config.position_table == "learned":
        return w["position_embedding/table"]
    if config.position_table == "learned_2d":
        rows, columns = w["position_embedding/rows"], w["position_embedding/columns"]
        table = [np.concatenate([rows[r], columns[c]]) for r in range(gh) for c in range(gw)]
        if config.class_row:
            table = [*w["position_embedding/class_row"], *table]
        return np.stack(table)
    if config.position_table == "sincos_2d":
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


def block(config, w, z, size=None, seen=None, between=lambda z: z):
    eps = config.norm_epsilon

    def attend(x):
        x = attention(config, _under(w, "attention/"), x, size, seen)
        return x * w.get("attention_scale/gamma", 1.0)

    def mlp(x):
        hidden = x @ w["mlp/dense_1/kernel"] + w.get("mlp/dense_1/bias", 0.0)
        if config.mlp == "swiglu":
            gate = x @ w["mlp/gate/kernel"] + w.get("mlp/gate/bias", 0.0)
            x = gate / (1 + np.exp(-gate)) * hidden
        else:
            x = gelu(hidden, config.gelu)
        if config.mlp_inner_norm:
            x = norm(x, _under(w, "mlp/inner_norm/"), eps)
        x = x @ w["mlp/dense_2/kernel"] + w.get("mlp/dense_2/bias", 0.0)
        return x * w.get("mlp_scale/gamma", 1.0)

    norm_1, norm_2 = _under(w, "attention_norm/"), _under(w, "mlp_norm/")
    if config.block_norm == "pre":
        z = between(attend(norm(z, norm_1, eps)) + z)  # Eq. 2
        return mlp(norm(z, norm_2, eps)) + z  # Eq. 3
    if config.block_norm == "res_post":
        z = between(norm(attend(z), norm_1, eps) + z)
        return norm(mlp(z), norm_2, eps) + z
    z = between(norm(attend(z) + z, norm_1, eps))
    return norm(mlp(z) + z, norm_2, eps)


def merged(config, w, z):
    """Eq. 2 and 3 with token merging between them, arXiv 2210.09461, one image after the other.

    Returns lists of the images' tokens and of their sizes.
    """
    rows, sizes = [], []
    for image in z:
        tokens, size = image, np.ones(len(image))
        for i in range(config.depth):
            tokens, size = merged_block(config, _under(w, f"encoder_block_{i}/"), i, tokens, size)
        rows.append(tokens)
        sizes.append(size)
    return np.stack(rows), np.stack(sizes)


def merged_block(config, w, i, tokens, size):
    keys = []
    z = block(config, w, tokens[None], size, keys, lambda x: merge(config, i, x, size, keys))
    return z[0], config_sizes(config, i, size, keys)


def merge(config, i, x, size, keys):
    """What is left of the tokens of one image, [1, T, D]."""
    groups = merge_groups(config, i, len(size), keys)
    rows = [np.average(x[0, group], axis=0, weights=size[group]) for group in groups]
    return np.stack(rows)[None]


def config_sizes(config, i, size, keys):
    return np.array([size[group].sum() for group in merge_groups(config, i, len(size), keys)])


def merge_groups(config, i, count, keys):
    """The old tokens in each new one: Section 3, "Bipartite Soft Matching", an edge at a time."""
    metric = np.mean([k[0] for k in keys], axis=0)  # over the heads
    r, depth, k = config.token_merging, config.depth, config.num_prefix_tokens
    if config.token_merging_schedule == "decreasing":
        r = int(np.floor(2 * r * (1 - i / (depth - 1)) + 1e-9))
    r = min(r, (count - k) // 2)
    patches = range(k, count)
    even, odd = [p for p in patches if p % 2 == 0], [p for p in patches if p % 2 == 1]
    edges = []
    for p in even:
        similar = [
            metric[p] @ metric[q] / np.linalg.norm(metric[p]) / np.linalg.norm(metric[q])
            for q in odd
        ]
        edges.append((max(similar, default=0), p, odd[int(np.argmax(similar))] if odd else None))
    chosen = {p: q for _, p, q in sorted(edges, key=lambda edge: -edge[0])[:r]}
    groups = [[p] for p in range(k)] + [[p] for p in even if p not in chosen]
    return groups + [[q, *(p for p in chosen if chosen[p] == q)] for q in odd]


def repeated(z, sizes):
    """Each token as often as its size says, so that a plain mean over patches is theirs."""
    return np.stack(
        [np.repeat(x, np.round(n).astype(int), axis=0) for x, n in zip(z, sizes, strict=True)]
    )


def attention(config, w, z, size=None, seen=None):
    """Eq. 5-8, one head after the other; `size` is of merged tokens, `seen` gets the keys."""
    heads = []
    for h in range(config.num_heads):
        q, k, v = (
            z @ w[f"{name}/kernel"][:, h] + (w[f"{name}/bias"][h] if f"{name}/bias" in w else 0.0)
            for name in ("query", "key", "value")
        )  # Eq. 5
        if config.qk_norm:
            q = norm(q, _under(w, "query_norm/"), config.norm_epsilon)
            k = norm(k, _under(w, "key_norm/"), config.norm_epsilon)
        if config.attention_positions in ("rope", "rope_mixed"):
            frequencies = w["rotary/frequencies"][:, h] if "rotary/frequencies" in w else None
            q, k = rotated(config, q, frequencies), rotated(config, k, frequencies)
        scale = 1 / np.sqrt(config.key_dim)
        if config.score_scale == "learned":
            scale = w["score_scale"][h]
        scores = scale * q @ k.transpose(0, 2, 1) + relative(config, w, scale * q, h)
        if not config.score_diagonal:
            scores = np.where(np.eye(config.num_tokens), -np.inf, scores)
        if size is not None:  # as if a token were there as often as its size says
            scores = scores + np.log(size)
        if seen is not None:
            seen.append(k)
        a = softmax(scores)  # Eq. 6
        heads.append(a @ v)  # Eq. 7
    joined = np.concatenate(heads, axis=-1)
    if config.attention_inner_norm:
        joined = norm(joined, _under(w, "inner_norm/"), config.norm_epsilon)
    kernel = w["attention_output/kernel"].reshape(-1, config.width)
    return joined @ kernel + w.get("attention_output/bias", 0.0)  # Eq. 8


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


def rotated(config, x, frequencies):
    """Each patch's pairs of numbers as complex numbers, turned by the angles of its position."""
    x, size = x.copy(), config.key_dim
    for n in range(config.num_patches):
        place = divmod(n, config.grid[1])
        where = []
        for axis in (0, 1) if config.rope_order == "rows_first" else (1, 0):
            number, count = place[axis] + config.rope_offset, config.grid[axis]
            if config.rope_coordinates == "centered":
                where.append(2 * np.pi * ((number + 0.5) / count * 2 - 1))
            else:
                where.append(number / count * (config.rope_grid or config.grid)[axis])
        for i in range(size // 2):
            if frequencies is not None:
                angle = where[0] * frequencies[0, i] + where[1] * frequencies[1, i]
            else:
                axis, j = divmod(i, size // 4)
                angle = where[axis] / config.rope_base ** (j / (size // 4))
            a, b = (i, i + size // 2) if config.rope_pairs == "halves" else (2 * i, 2 * i + 1)
            token = config.num_prefix_tokens + n
            turned = (x[:, token, a] + 1j * x[:, token, b]) * np.exp(1j * angle)
            x[:, token, a], x[:, token, b] = turned.real, turned.imag
    return x


def relative(config, w, q, h):
    """What the scores of head h get for each pair of tokens; `q` is scaled already."""
    kind, (gh, gw), k = config.attention_positions, config.grid, config.num_prefix_tokens
    w = _under(w, "relative_positions/")
    tokens = q.shape[1]
    scores = np.zeros((len(q), tokens, tokens))
    for i in range(tokens) if w else ():
        for j in range(tokens):
            if kind == "relative":  # Appendix D.4: an extra query-key product
                key = w["keys"][i - j + tokens - 1, h]
                scores[:, i, j] = q[:, i] @ key
            elif i >= k and j >= k:
                (yi, xi), (yj, xj) = divmod(i - k, gw), divmod(j - k, gw)
                if kind == "relative_bias":
                    table = w["table"][: (2 * gh - 1) * (2 * gw - 1), h]
                    table = table.reshape(2 * gh - 1, 2 * gw - 1)
                    scores[:, i, j] = table[yi - yj + gh - 1, xi - xj + gw - 1]
                else:
                    offset = np.array([yi - yj, xi - xj])
                    x = np.sign(offset) * np.log(1 + abs(offset))
                    x = np.maximum(x @ w["hidden_kernel"] + w["hidden_bias"], 0)
                    scores[:, i, j] = x @ w["bias_kernel"][:, h] + w["bias_bias"][h]
            elif kind == "relative_bias":  # class to patch, patch to class, class to class
                scores[:, i, j] = w["table"][-1 if i < k and j < k else -2 if j < k else -3, h]
    return scores


def norm(x, w, eps):
    if "beta" not in w:  # an RMSNorm
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w["gamma"]
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w["gamma"] + w["beta"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x, kind):
    if kind == "exact":
        return 0.5 * x * (1 + erf(x / np.sqrt(2)))
    if kind == "quick":
        return x / (1 + np.exp(-1.702 * x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _under(w, prefix):
    return {path.removeprefix(prefix): v for path, v in w.items() if path.startswith(prefix)}

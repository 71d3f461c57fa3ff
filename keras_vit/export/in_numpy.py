"""The operators of `Program` in plain NumPy: what each of them means."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.export.fold_stem import Convolution, GroupNorm, same_padding
from keras_vit.export.folded import Gain, Norm, Product, Rotation
from keras_vit.layers.token_merging import LEAST_SQUARE, halves

_erf = np.vectorize(math.erf, otypes=["float64"])


class NumpyOperators:
    """The operators on arrays, in float64: slow, exact and short.

    Example:

    >>> logits = Program(fold(model), NumpyOperators()).output(images)
    """

    def scope(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def crop(self, images: np.ndarray, height: int, width: int) -> np.ndarray:
        return images[:, :height, :width]

    def shift(self, images: np.ndarray, rows: int, columns: int) -> np.ndarray:
        height, width = images.shape[1:3]
        x = np.pad(images, ((0, 0), (rows, rows), (columns, columns), (0, 0)))
        starts = [(top, left) for top in (0, 2 * rows) for left in (0, 2 * columns)]
        copies = [x[:, top : top + height, left : left + width] for top, left in starts]
        return np.concatenate([images, *copies], axis=-1)

    def to_map(self, images: np.ndarray) -> np.ndarray:
        return images.astype("float64")

    def from_map(self, x: np.ndarray) -> np.ndarray:
        return x

    def convolve(self, x: np.ndarray, c: Convolution) -> np.ndarray:
        windows = _windows(x, len(c.kernel), c.stride, 0.0)
        return np.tensordot(windows, c.kernel.transpose(2, 0, 1, 3), axes=3)

    def group_norm(self, x: np.ndarray, n: GroupNorm) -> np.ndarray:
        z = x.reshape(len(x), -1, n.groups, x.shape[-1] // n.groups)
        z = z - z.mean((1, 3), keepdims=True)
        z = z / np.sqrt((z * z).mean((1, 3), keepdims=True) + n.epsilon)
        return z.reshape(x.shape) * n.scale + n.offset

    def relu(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    def max_pool(self, x: np.ndarray) -> np.ndarray:
        return _windows(x, 3, 2, -np.inf).max((4, 5))

    def patches(self, images: Any, grid: tuple[int, int], patch: tuple[int, int]) -> np.ndarray:
        (rows, columns), (height, length) = grid, patch
        count, *_, channels = images.shape
        x = images.astype("float64").reshape(count, rows, height, columns, length, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5)  # (B, rows, columns, P, P, C)
        return x.reshape(count * rows * columns, -1)  # (B * N, P * P * C)

    def sequence(
        self, x: np.ndarray, prefix: np.ndarray, positions: np.ndarray | None, num_patches: int
    ) -> np.ndarray:
        x = self.by_image(x, num_patches)  # (B, N, D)
        x = x if positions is None else x + positions
        front = np.broadcast_to(prefix, (len(x), *prefix.shape))
        return np.concatenate([front, x], axis=1).reshape(-1, x.shape[-1])  # (B * T, D)

    def product(self, x: np.ndarray, p: Product) -> np.ndarray:
        return x @ p.kernel + p.bias

    def norm(self, x: np.ndarray, n: Norm) -> np.ndarray:
        x = x if n.rms else x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + n.epsilon)
        return x if n.scale is None or n.offset is None else x * n.scale + n.offset

    def heads(
        self, x: np.ndarray, products: Sequence[Product], tokens: int, num_heads: int
    ) -> list[np.ndarray]:
        shape = (len(x) // tokens, tokens, num_heads, -1)
        return [self.product(x, p).reshape(shape).swapaxes(1, 2) for p in products]  # (B, h, T, d)

    def rotate(self, x: np.ndarray, r: Rotation) -> np.ndarray:
        swapped = np.roll(x, x.shape[-1] // 2, axis=-1)
        return x * r.cos + swapped * r.sin

    def offset_scores(self, q: np.ndarray, name: str, keys: np.ndarray) -> np.ndarray:
        scores = q @ keys.swapaxes(1, 2)  # (B, h, T, 2T)
        tokens = q.shape[2]
        if tokens == 1:
            return scores
        rows = [scores[:, :, i, tokens - 1 - i : 2 * tokens - 1 - i] for i in range(tokens)]
        return np.stack(rows, axis=2)  # (B, h, T, T)

    def bias(self, name: str, array: np.ndarray) -> np.ndarray:
        return array

    def attend(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows_of: Any, bias: np.ndarray | None
    ) -> np.ndarray:
        scores = q @ k.swapaxes(2, 3)  # (B, h, T, T)
        scores = scores if bias is None else scores + bias
        z = self.activate(scores, "softmax") @ v  # (B, h, T, d)
        return z.swapaxes(1, 2).reshape(len(rows_of), -1)  # (B * T, h * d)

    def merge(
        self, x: np.ndarray, k: np.ndarray, sizes: np.ndarray | None, start: int, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = k.shape[2]
        x = self.by_image(x, tokens)  # (B, T, D)
        sizes = np.ones(x.shape[:2]) if sizes is None else sizes
        m = k.mean(1)  # (B, T, d)
        m = m / np.sqrt(np.maximum((m * m).sum(-1, keepdims=True), LEAST_SQUARE))
        a, b = halves(start, tokens)
        merged = []
        for x_i, s_i, m_i in zip(x, sizes, m, strict=True):
            scores = m_i[a] @ m_i[b].T
            order = np.argsort(-scores.max(1), kind="stable")
            target = b[scores.argmax(1)]  # of each token in a
            sums, s_i = x_i * s_i[:, None], s_i.copy()
            for place in order[:count]:
                sums[target[place]] += sums[a[place]]
                s_i[target[place]] += s_i[a[place]]
            kept = np.concatenate([np.arange(start), a[np.sort(order[count:])], b])
            merged.append((sums[kept] / s_i[kept, None], s_i[kept]))
        x, sizes = (np.stack(part) for part in zip(*merged, strict=True))
        return x.reshape(-1, x.shape[-1]), sizes

    def size_bias(self, sizes: np.ndarray) -> np.ndarray:
        return np.log(sizes)[:, None, None]

    def mean_by_size(self, x: np.ndarray, sizes: np.ndarray, start: int, total: int) -> np.ndarray:
        x = self.by_image(x, sizes.shape[1])[:, start:]
        return (x * sizes[:, start:, None]).sum(1) / total

    def weigh(self, scores: np.ndarray, values: np.ndarray, start: int, tokens: int) -> np.ndarray:
        heads = scores.shape[-1]
        scores = self.by_image(scores, tokens)[:, start:].swapaxes(1, 2)  # (B, h, T)
        v = self.by_image(values, tokens)[:, start:]  # (B, T, h * d)
        v = v.reshape(*v.shape[:2], heads, -1)  # (B, T, h, d)
        z = np.einsum("bht,bthd->bhd", self.activate(scores, "softmax"), v)
        return z.reshape(len(z), -1)  # (B, h * d)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    def multiply(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x * y

    def gain(self, x: np.ndarray, g: Gain) -> np.ndarray:
        return x * g.scale + g.offset

    def gelu(self, x: np.ndarray, kind: str) -> np.ndarray:
        if kind == "tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)))

    def activate(self, x: np.ndarray, name: str) -> np.ndarray:
        if name == "tanh":
            return np.tanh(x)
        if name == "sigmoid":
            return np.exp(-np.logaddexp(0, -x))
        if name == "silu":
            return x * np.exp(-np.logaddexp(0, -x))
        x = x - np.logaddexp.reduce(x, axis=-1, keepdims=True)
        return x if name == "log_softmax" else np.exp(x)

    def token(self, x: np.ndarray, index: int, tokens: int) -> np.ndarray:
        return self.by_image(x, tokens)[:, index]

    def mean(self, x: np.ndarray, start: int, tokens: int) -> np.ndarray:
        return self.by_image(x, tokens)[:, start:].mean(1)

    def concat(self, xs: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(xs, axis=-1)

    def by_image(self, x: np.ndarray, tokens: int) -> np.ndarray:
        return x.reshape(-1, tokens, x.shape[-1])

    def to_float32(self, x: np.ndarray) -> np.ndarray:
        return x  # it is more exact already


def _windows(x: np.ndarray, size: int, stride: int, beyond: float) -> np.ndarray:
    """What a kernel sees at each place, padded with `beyond`: (B, rows, columns, C, k, k)."""
    pads = [same_padding(side, size, stride) for side in x.shape[1:3]]
    x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=beyond)
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return view[:, ::stride, ::stride]

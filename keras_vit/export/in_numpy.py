"""The operators of `Program` in plain NumPy: what each of them means."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.export.fold import Gain, Norm, Product

_erf = np.vectorize(math.erf, otypes=["float64"])


class NumpyOperators:
    """The operators on arrays, in float64: slow, exact and short.

    Example:

    >>> logits = Program(fold(model), NumpyOperators()).output(images)
    """

    def scope(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

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
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + n.epsilon)
        return x if n.scale is None or n.offset is None else x * n.scale + n.offset

    def heads(
        self, x: np.ndarray, products: Sequence[Product], tokens: int, num_heads: int
    ) -> list[np.ndarray]:
        shape = (len(x) // tokens, tokens, num_heads, -1)
        return [self.product(x, p).reshape(shape).swapaxes(1, 2) for p in products]  # (B, h, T, d)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows_of: Any) -> np.ndarray:
        z = self.activate(q @ k.swapaxes(2, 3), "softmax") @ v  # (B, h, T, d)
        return z.swapaxes(1, 2).reshape(len(rows_of), -1)  # (B * T, h * d)

    def weigh(self, scores: np.ndarray, values: np.ndarray, start: int, tokens: int) -> np.ndarray:
        heads = scores.shape[-1]
        scores = self.by_image(scores, tokens)[:, start:].swapaxes(1, 2)  # (B, h, T)
        v = self.by_image(values, tokens)[:, start:]  # (B, T, h * d)
        v = v.reshape(*v.shape[:2], heads, -1)  # (B, T, h, d)
        z = np.einsum("bht,bthd->bhd", self.activate(scores, "softmax"), v)
        return z.reshape(len(z), -1)  # (B, h * d)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

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

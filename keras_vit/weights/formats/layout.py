"""`Layout`: how an array of ours is transposed and reshaped in another library's file."""

import math
import re

import numpy as np


class Layout:
    """A transpose and a reshape in both directions; the values stay bit-identical.

    The left side names the axes of our array, the right side those of the source's. Parentheses
    join axes, and `1` is an axis of length one.

    Args:
        pattern: For example "i h d -> (h d) i"; "" if both layouts are the same.

    Example:

    >>> Layout("i h d -> (h d) i").source_shape((20, 5, 4))
    (20, 20)
    """

    def __init__(self, pattern: str):
        left, _, right = pattern.partition("->")
        self.pattern = pattern
        self.names = left.split()
        self.groups = _groups(right)
        order = [name for group in self.groups for name in group]
        named = [name for name in self.names if name != "1"]
        if sorted(order) != sorted(named) or len(set(order)) != len(order):
            raise ValueError(
                f"pattern must name the same axes on both sides. Received: pattern={pattern!r}"
            )
        self.order = [named.index(name) for name in order]

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The source's shape for an array of ours of shape `shape`."""
        if not self.names:
            return tuple(shape)
        sizes = dict(zip(self.names, shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def to_source(self, array: np.ndarray) -> np.ndarray:
        """Our array in the source's layout."""
        if not self.names:
            return array
        axes = self._named(array.shape)
        return array.reshape(axes).transpose(self.order).reshape(self.source_shape(array.shape))

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The source's array in our layout, with shape `shape`."""
        if not self.names:
            return array.reshape(shape)
        axes = self._named(shape)
        moved = array.reshape([axes[i] for i in self.order])
        return moved.transpose(np.argsort(self.order)).reshape(shape)

    def _named(self, shape: tuple[int, ...]) -> list[int]:
        pairs = zip(self.names, shape, strict=True)
        return [size for name, size in pairs if name != "1"]


def _groups(text: str) -> list[list[str]]:
    """The axes that each word or pair of parentheses joins; none for a `1`."""
    words = re.findall(r"\(.*?\)|\S+", text)
    return [[] if word == "1" else word.strip("()").split() for word in words]

"""The operators of `Program` that a SavedModel and a TFLite file have in common."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


class PlainTensorFlow:
    """Operators that need no other form for speed on either target.

    Attributes:
        tf: TensorFlow.
    """

    tf: Any

    def scope(self, name: str) -> AbstractContextManager:
        return self.tf.name_scope(f"{name}/")  # not inside the scope that is open now

    def crop(self, images: Any, height: int, width: int) -> Any:
        return images[:, :height, :width]

    def shift(self, images: Any, rows: int, columns: int) -> Any:
        tf, (_, height, width, _) = self.tf, images.shape
        x = tf.pad(images, [[0, 0], [rows, rows], [columns, columns], [0, 0]])
        starts = [(top, left) for top in (0, 2 * rows) for left in (0, 2 * columns)]
        copies = [x[:, top : top + height, left : left + width] for top, left in starts]
        return tf.concat([images, *copies], axis=-1)  # (B, H, W, 5 C)

    def from_map(self, x: Any) -> Any:
        return x

    def _group_mean(self, z: Any) -> Any:
        """(B, places, groups, c) to (B, 1, groups, 1), over the places first: they are more."""
        z = self.tf.reduce_mean(z, axis=1, keepdims=True)
        return self.tf.reduce_mean(z, axis=3, keepdims=True)

    def relu(self, x: Any) -> Any:
        return self.tf.nn.relu(x)

    def max_pool(self, x: Any) -> Any:
        return self.tf.nn.max_pool2d(x, 3, 2, "SAME")

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def activate(self, x: Any, name: str) -> Any:
        if name == "silu":  # that of TensorFlow brings an operator for its gradient
            return x * self.tf.sigmoid(x)
        return getattr(self.tf.nn, name)(x)

    def concat(self, xs: Sequence[Any]) -> Any:
        return self.tf.concat(xs, axis=-1)

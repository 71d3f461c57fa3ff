"""The operators of `Program` that a SavedModel and a TFLite file have in common."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from keras_vit.export.program import LEAST_SQUARE


class PlainTensorFlow:
    """Operators that need no other form for speed on either target.

    Attributes:
        tf: TensorFlow.
        by_image: See `Operators`; each target has its own.
    """

    tf: Any
    by_image: Any

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

    def size_bias(self, sizes: Any) -> Any:
        return self.tf.math.log(sizes)[:, None, None]

    def mean_by_size(self, x: Any, sizes: Any, start: int, total: int) -> Any:
        tf = self.tf
        x = self.by_image(x, sizes.shape[1])[:, start:]
        return tf.reduce_sum(x * sizes[:, start:, None], axis=1) / total  # (B, D)

    def _matched(self, k: Any, a: Any, b: Any, count: int) -> tuple[Any, Any, Any]:
        """Numbers in `a` of the tokens that merge and of the others, and where those go in `b`."""
        tf = self.tf
        m = tf.reduce_mean(tf.cast(k, tf.float32), axis=1)  # (B, T, d)
        square = tf.reduce_sum(m * m, axis=-1, keepdims=True)
        m *= tf.math.rsqrt(tf.maximum(square, LEAST_SQUARE))
        scores = tf.matmul(tf.gather(m, a, axis=1), tf.gather(m, b, axis=1), transpose_b=True)
        order = tf.math.top_k(tf.reduce_max(scores, axis=-1), len(a)).indices  # the best first
        source, rest = order[:, :count], order[:, count:]
        target = tf.argmax(scores, axis=-1, output_type=tf.int32)  # (B, A)
        return source, rest, tf.gather(target, source, batch_dims=1)  # (B, r)

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

"""A ViT at another image size or patch size, whose weights are another's, resized in each call."""

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from numpy.typing import NDArray

from keras_vit.config import ViTConfig
from keras_vit.deferred import deferred
from keras_vit.model import ViT
from keras_vit.resample import resizing_matrix


@dataclass(frozen=True)
class ResizedView:
    """Runs a ViT as `vit.resized` would, so that its own weights learn from it.

    For another image size or patch size, the position table and the patch kernel are products of
    constant matrices with the model's own: E_p = R E_pos, w_p = B w. The gradient passes through
    the products; the other weights are the same at each size.

    Example:

    >>> view = ResizedView.of(vit, resized_config(vit, 96))
    >>> outputs = view(vit, small_images, training=True)  # differentiable by vit's weights
    """

    model: keras.Model
    """What is called."""
    weights: list[Any]
    """Its weights, in the order of the ViT's. They have no values of their own."""
    seeds: list[Any]
    """The states of its dropout, in the order of the ViT's."""
    matrices: dict[str, NDArray[Any]]
    """By the path of the weight."""

    @classmethod
    def of(cls, vit: ViT, config: ViTConfig, *, features: bool = False) -> "ResizedView":
        """Makes a view.

        Args:
            vit: The model whose weights are used.
            config: What `keras_vit.model.resized_config` returns.
            features: Whether the view returns `vit.features()` instead of the ViT's outputs.
        """
        with deferred():
            model = ViT(config, name=vit.name, dtype=vit.dtype_policy)
            called = model.features() if features else model
        matrices = {}
        for weight in vit.weights:
            matrix = resizing_matrix(weight.path, weight.shape, vit.config, config)
            if matrix is not None:
                matrices[weight.path] = matrix
        return cls(called, model.weights, _seeds(model), matrices)

    def __call__(self, vit: ViT, images: Any, training: bool | None) -> Any:
        """The outputs for images of the view's size.

        Args:
            vit: The ViT that the view is of, or one with the same config.
            images: `(B, h, w, C)`.
            training: Whether dropout is on.
        """
        weights = [
            (ours, self._weight(ours, theirs))
            for ours, theirs in zip(self.weights, vit.weights, strict=True)
        ]
        # Dropout's seeds are the other's too, and change in a call.
        seeds = list(zip(self.seeds, _seeds(vit), strict=True))
        with keras.StatelessScope([*weights, *seeds]) as scope:
            outputs = self.model(images, training=training)
        for ours, theirs in seeds:
            theirs.assign(scope.get_current_value(ours))
        return outputs

    def _weight(self, ours, theirs):
        matrix = self.matrices.get(theirs.path)
        if matrix is None:
            return theirs.value
        matrix = ops.convert_to_tensor(matrix, theirs.dtype)
        lines = ops.reshape(theirs.value, (matrix.shape[1], -1))  # (P^2, C D) or (rows, D)
        return ops.reshape(ops.matmul(matrix, lines), ours.shape)


def _seeds(model: ViT) -> list:
    weights = {id(weight) for weight in model.weights}
    return [v for v in model.variables if id(v) not in weights]

"""A layer of a student beside a layer of its teacher: made comparable, and the loss of the two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_vit.config import ViTConfig
from keras_vit.train.objectives.teacher import LOGITS


@dataclass(frozen=True)
class FeaturePair:
    """What a `keras.distillation.FeatureDistillation` says, for one layer of each model.

    Keras' own `compute_loss` takes the mean of a batch at once, which no `sample_weight` can enter.

    Shapes: B batch, T tokens, D width, h x w rows and columns of a map, C channels.
    """

    student: str
    teacher: str
    loss: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, feature: Any) -> "FeaturePair":
        if not isinstance(feature, keras.distillation.FeatureDistillation):
            raise ValueError(
                "features must be one or more keras.distillation.FeatureDistillation. "
                f"Received: features={feature!r}"
            )
        loss = feature.loss
        if not callable(loss):
            raise ValueError(
                "features must have one loss each, because a layer has one output. "
                f"Received: loss={loss!r}"
            )
        # A Loss reduces over the batch in `__call__`, and not in `call`.
        loss = loss.call if isinstance(loss, keras.losses.Loss) else loss
        return cls(feature.student_layer_name or LOGITS, feature.teacher_layer_name or LOGITS, loss)

    def aligned(self, ours, theirs, config: ViTConfig, teacher: ViTConfig | None):
        """Both features, equal in all axes but the last one.

        Args:
            ours: The student's, `(B, D)`, `(B, T, D)` or `(B, h, w, D)`.
            theirs: The teacher's.
            config: The student's config.
            teacher: The teacher's, if it is a `ViT`.

        Returns:
            Two tensors `(B, ..., D)` and `(B, ..., C)`; tokens become the map of the patches.
        """
        ranks = len(ours.shape), len(theirs.shape)
        if ranks == (2, 2):
            return ours, theirs
        if 2 not in ranks:
            ours, theirs = _map(ours, config), _map(theirs, teacher)
        if not len(ours.shape) == len(theirs.shape) == 4:
            raise ValueError(
                "features must be vectors of both models, or tokens or maps of both; "
                "'pooling' is the layer of a ViT that returns a vector. Received: shape "
                f"{tuple(ours.shape)} of {self.student!r}, {tuple(theirs.shape)} of "
                f"{self.teacher!r}"
            )
        size = tuple(ours.shape[1:3])
        if tuple(theirs.shape[1:3]) != size:
            theirs = ops.image.resize(theirs, size, antialias=True, data_format="channels_last")
        return ours, theirs

    def losses(self, ours, theirs):
        """The loss of each image, `(B,)`: the mean over the map."""
        losses = self.loss(theirs, ours)
        return ops.mean(ops.reshape(losses, (ops.shape(losses)[0], -1)), axis=-1)


def _map(features, config: ViTConfig | None):
    """The tokens of a ViT without prefix tokens, as a map of its grid; a map as it is."""
    if config is None or len(features.shape) != 3:
        return features
    _, tokens, width = features.shape
    prefix = {config.num_tokens: config.num_prefix_tokens, config.num_patches: 0}.get(tokens)
    if prefix is None:  # dropped in training
        return features
    return ops.reshape(features[:, prefix:], (-1, *config.grid, width))

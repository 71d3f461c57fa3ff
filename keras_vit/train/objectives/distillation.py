"""Distillation: a ViT learns from labels and from another model, as DeiT does."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_number, require
from keras_vit.layers import DistilledHead
from keras_vit.model import ViT, head_logits
from keras_vit.train.objectives.feature_pair import FeaturePair
from keras_vit.train.objectives.objective import Objective, refuse
from keras_vit.train.objectives.teacher import LOGITS, Teacher, check_teacher, layer_output

KINDS = ("hard", "soft")


@keras.saving.register_keras_serializable("keras_vit")
class Distillation(Objective):
    """Trains a ViT on labels and on what a teacher says about the same images.

    With z the student's logits, t the teacher's, H the cross-entropy and tau the temperature:

    hard: L = (1 - alpha) H(y, z_class) + alpha H(argmax t, z_dist)
    soft: L = (1 - alpha) H(y, z_class) + alpha tau^2 KL(softmax(t / tau) || softmax(z_dist / tau))

    A DeiT (`distillation_token=True, pooling="token_pair"`) has two classifiers: z_class is that of
    the class token, z_dist that of the distillation token, and the trained model returns their
    mean. For any other ViT both are its logits.

    The teacher sees the images that the student sees, augmented and mixed, for inference, without
    gradients. With mixed labels y is what `mix_batch` returns.

    `features` adds losses between layers. Each is a `keras.distillation.FeatureDistillation`, which
    names a layer of each model and a loss. Where the widths differ, a Dense that is trained too
    projects the student's features. Tokens of a ViT are compared as the grid of its patches,
    without prefix tokens, to whose size the teacher's map is resized; pass the layer "pooling" for
    the pooled token.

    `predict` of this model runs the teacher too; `objective.vit.predict` does not. Its `.keras`
    file holds the teacher, as that of `keras.distillation.Distiller` does, so that the loaded
    objective trains on; `objective.vit.save` writes the student alone.

    Shapes: B batch, H x W pixels, C channels, K classes.

    Args:
        vit: The student, a `ViT` with a head. It is trained in place: `objective.vit`.
        teacher: A trained `keras.Model` that returns `(B, K)`. It is frozen.
        kind: "hard" or "soft".
        alpha: Weight of the teacher, in [0, 1].
        temperature: tau of kind "soft".
        label_smoothing: Share of the labels spread evenly over the classes. It is not applied to
            the teacher's classes.
        mean_over_classes: Whether the divergence of kind "soft" is divided by K too, as in DeiT's
            code; Hinton et al. (arXiv 1503.02531) do not.
        teacher_preprocessing: From the student's pixels to the teacher's: a layer or another
            callable; to save the objective, one that Keras can serialize. None converts range and
            size exactly for a `ViT`, and changes nothing for another model.
        teacher_from_logits: False if the teacher returns probabilities.
        features: A `keras.distillation.FeatureDistillation`, or several.
        feature_weights: A weight for all of `features`, or one for each.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed for the student.
        training: Whether the student's dropout is on.

    Returns:
        A dict: "logits", what the trained model returns; "class_logits" and "distillation_logits",
        which the losses read; "teacher_logits", each `(B, K)`; and for each of `features`
        "student_features_0" and "teacher_features_0", and so on.

    Reference:
        arXiv 2012.12877, Section 4.

    Example:

    >>> vit = keras_vit.vit_s16(distillation_token=True, pooling="token_pair", num_classes=10)
    >>> objective = keras_vit.train.Distillation(vit, teacher)
    >>> objective.compile("adamw", metrics=["accuracy"])
    >>> objective.fit(images, labels)
    """

    reads = "logits"
    loss_reads_images = False

    def __init__(
        self,
        vit: ViT,
        teacher: keras.Model,
        *,
        kind: str = "hard",
        alpha: float = 0.5,
        temperature: float = 3.0,
        label_smoothing: float = 0.0,
        mean_over_classes: bool = True,
        teacher_preprocessing: Callable[[Any], Any] | None = None,
        teacher_from_logits: bool = True,
        features: Any = (),
        feature_weights: float | Sequence[float] = 1.0,
        name: str = "distillation",
        **kwargs: Any,
    ):
        self._check_arguments(kind, alpha, temperature, label_smoothing)
        super().__init__(vit, name=name, **kwargs)
        check_teacher(teacher, vit, teacher_preprocessing, teacher_from_logits)
        self.kind = kind
        self.alpha = alpha
        self.temperature = temperature
        self.label_smoothing = label_smoothing
        self.mean_over_classes = mean_over_classes
        self.features = tuple(features) if isinstance(features, list | tuple) else (features,)
        self.feature_weights = _weights(feature_weights, len(self.features))
        self._pairs = tuple(FeaturePair.of(feature) for feature in self.features)
        self.teacher = Teacher(
            teacher,
            vit.config,
            teacher_preprocessing,
            from_logits=teacher_from_logits,
            layer_names=tuple(sorted({p.teacher for p in self._pairs} - {LOGITS})),
        )
        names = sorted({p.student for p in self._pairs} - {LOGITS})
        self._student = _Student(vit, names)
        self.projections = self._make_projections()

    def _check_arguments(self, kind, alpha, temperature, label_smoothing):
        require(kind in KINDS, "kind", "be 'hard' or 'soft'", kind)
        rule = "be a number in [0, 1]"
        require(is_number(alpha) and 0 <= alpha <= 1, "alpha", rule, alpha)
        positive = is_number(temperature) and temperature > 0
        require(positive, "temperature", "be a positive number", temperature)
        share = is_number(label_smoothing) and 0 <= label_smoothing < 1
        require(share, "label_smoothing", "be a number in [0, 1)", label_smoothing)

    def _check_vit(self, vit: ViT) -> None:
        super()._check_vit(vit)
        config = vit.config
        refuse(config.num_classes < 2, "num_classes", "be at least 2", config.num_classes)
        refuse(config.pooling is None, "pooling", "be set: labels are of images", config.pooling)

    def _make_projections(self):
        """A Dense for each pair of features whose widths differ, else None."""
        config = self.vit.config
        heard = self.teacher(keras.KerasTensor((None, *config.input_shape)))
        logits = (None, config.num_classes)
        if tuple(heard[LOGITS].shape) != logits:
            raise ValueError(
                f"teacher must return {logits}, as vit does. "
                f"Received: a teacher that returns {tuple(heard[LOGITS].shape)}"
            )
        said = {**self._student.outputs, LOGITS: heard[LOGITS]}
        layers = []
        for i, pair in enumerate(self._pairs):
            merged = config.token_merging and _is_of_tokens(said[pair.student])
            refuse(merged, "token_merging", "be 0 for features of tokens", config.token_merging)
            ours, theirs = self._aligned(pair, said, heard)
            dropped = config.patch_dropout and len(ours.shape) == 4
            refuse(dropped, "patch_dropout", "be 0 for features of tokens", config.patch_dropout)
            layer = None
            if ours.shape[-1] != theirs.shape[-1]:
                layer = keras.layers.Dense(
                    theirs.shape[-1], dtype=self.vit.dtype_policy, name=f"projection_{i}"
                )
                layer.build(ours.shape)
            layers.append(layer)
        return layers

    def _aligned(self, pair, said, heard):
        teacher = self.teacher.model
        config = teacher.config if isinstance(teacher, ViT) else None
        return pair.aligned(said[pair.student], heard[pair.teacher], self.vit.config, config)

    def call(self, images, training=None):
        said = self._student.model(images, training=training)
        head, read = self.vit.get_layer("head"), said[LOGITS]
        if isinstance(head, DistilledHead):
            both = head(read, separate=True)  # (B, 2, K)
            own, dist = both[:, 0], both[:, 1]
            logits = ops.multiply(ops.add(own, dist), 0.5)
        else:
            own = dist = logits = head_logits(self.vit, read)  # (B, K)
        heard = self.teacher(images, training=False)
        outputs = {
            "logits": logits,
            "class_logits": own,
            "distillation_logits": dist,
            "teacher_logits": heard[LOGITS],
        }
        said = {**said, LOGITS: dist}
        for i, (pair, layer) in enumerate(zip(self._pairs, self.projections, strict=True)):
            ours, theirs = self._aligned(pair, said, heard)
            ours = ours if layer is None else layer(ours)
            outputs[f"student_features_{i}"] = ops.cast(ours, "float32")
            outputs[f"teacher_features_{i}"] = theirs
        return outputs

    def image_losses(self, images, labels, outputs):
        heard = outputs["teacher_logits"]
        dist = ops.cast(outputs["distillation_logits"], "float32")
        classes = self.vit.config.num_classes
        if self.kind == "hard":
            chosen = ops.one_hot(ops.argmax(heard, axis=-1), classes, dtype="float32")
            taught = _cross_entropy(chosen, dist)  # (B,)
        else:
            log_t = ops.log_softmax(ops.divide(heard, self.temperature), axis=-1)  # (B, K)
            log_s = ops.log_softmax(ops.divide(dist, self.temperature), axis=-1)
            taught = ops.sum(ops.exp(log_t) * (log_t - log_s), axis=-1)  # (B,)
            scale = self.temperature**2 / (classes if self.mean_over_classes else 1)
            taught = ops.multiply(taught, scale)
        total = ops.multiply(taught, self.alpha)
        if self.alpha < 1:
            if labels is None:
                raise ValueError(
                    f"alpha must be 1 for data without labels. Received: alpha={self.alpha!r}"
                )
            y = self._targets(labels)
            own = _cross_entropy(y, ops.cast(outputs["class_logits"], "float32"))
            total = ops.add(total, ops.multiply(own, 1 - self.alpha))
        for i, (pair, weight) in enumerate(zip(self._pairs, self.feature_weights, strict=True)):
            ours, theirs = outputs[f"student_features_{i}"], outputs[f"teacher_features_{i}"]
            total = ops.add(total, ops.multiply(pair.losses(ours, theirs), weight))
        return total

    def _targets(self, labels):
        """Labels as a distribution over the classes, smoothed: `(B, K)`."""
        classes = self.vit.config.num_classes
        if len(labels.shape) == 2 and labels.shape[-1] == classes:
            y = ops.cast(labels, "float32")
        else:
            y = ops.one_hot(ops.cast(ops.reshape(labels, (-1,)), "int32"), classes, dtype="float32")
        return y * (1 - self.label_smoothing) + self.label_smoothing / classes

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        # The metrics of `compile` are those of the student.
        return super().compute_metrics(x, y, y_pred["logits"], sample_weight)

    # -- saving

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["seed"]  # nothing is drawn but the student's dropout
        save = keras.saving.serialize_keras_object
        preprocessing = self.teacher.preprocessing
        return {
            **config,
            "teacher": save(self.teacher.model),
            "kind": self.kind,
            "alpha": self.alpha,
            "temperature": self.temperature,
            "label_smoothing": self.label_smoothing,
            "mean_over_classes": self.mean_over_classes,
            "teacher_preprocessing": None if preprocessing is None else save(preprocessing),
            "teacher_from_logits": self.teacher.from_logits,
            "features": [save(feature) for feature in self.features],
            "feature_weights": list(self.feature_weights),
        }


class _Student:
    """The ViT with the outputs that losses read. Inside this, Keras does not save it again."""

    def __init__(self, vit: ViT, names: Sequence[str]):
        self.outputs = {name: layer_output(vit, name, "student") for name in names}
        self.outputs[LOGITS] = vit.features().output  # the head follows
        self.model = keras.Model(vit.inputs, self.outputs)


def _weights(weights: Any, count: int) -> tuple[float, ...]:
    """A weight for each feature."""
    values = tuple(weights) if isinstance(weights, list | tuple) else (weights,) * count
    holds = len(values) == count and all(is_number(v) and v >= 0 for v in values)
    rule = f"be a number of at least 0, or {count} of them, one for each of features"
    require(holds, "feature_weights", rule, weights)
    return values


def _is_of_tokens(features) -> bool:
    """Whether a layer's output has an axis of tokens; a block that merges them has two outputs."""
    return isinstance(features, list | tuple) or len(features.shape) > 2


def _cross_entropy(y, logits):
    """H(y, softmax(z)) of each image, `(B,)`."""
    return ops.negative(ops.sum(ops.multiply(y, ops.log_softmax(logits, axis=-1)), axis=-1))

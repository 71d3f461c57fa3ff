"""DINO: a ViT learns without labels from a moving average of itself."""

import dataclasses
import math
import os
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.config_rules import is_int, is_number, require
from keras_vit.deferred import deferred
from keras_vit.model import ViT, resized_config
from keras_vit.train.objectives.dino_head import DINOHead
from keras_vit.train.objectives.objective import Objective, refuse
from keras_vit.train.resized_view import ResizedView
from keras_vit.weights.load import from_pretrained, local_path
from keras_vit.weights.training_parts import find_head, read_values

VIEWS = ("global", "local")


@keras.saving.register_keras_serializable("keras_vit")
class DINO(Objective):
    """Self-distillation without labels.

    Student and teacher are the same ViT with the same head. The teacher sees the two global views
    of an image, the student these and the local ones. Each student view is to say what the teacher
    says of each other view:

    p_t(x) = softmax((g_t(x) - c) / tau_t),    p_s(x) = softmax(g_s(x) / tau_s)
    L = mean over (x, x') of H(p_t(x), p_s(x')),    x a global view, x' any other one

    No gradient reaches the teacher: after each step it is m teacher + (1 - m) student, with m from
    `teacher_momentum` to 1 by a cosine. The center c is a moving average of the teacher's logits;
    it keeps the outputs from collapsing into one prototype, and the low tau_t from collapsing into
    a uniform distribution.

    Both trained ViTs are plain ones: `dino.vit` is the student; `dino.update_teacher()` returns the
    teacher, whose features are the better ones, and those that the authors publish.

    A step updates the teacher when it begins, from the weights that the previous step left, and not
    when it ends: Keras' own training steps of all backends can do that. The order of the updates is
    the authors'. After `fit` only the last one is missing; `update_teacher` makes it.

    Use the authors' optimizer, AdamW with a warm-up and a cosine, gradients clipped to a norm of 3
    for each weight (`clipnorm=3`), and no decay for biases and LayerNorms:
    `optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "gain"])`. They raise
    the weight decay from .04 to .4 by a cosine. Keras' optimizers have no schedule for it, so
    choose one value.

    Shapes: B batch, H x W pixels, C channels, L local views, h x w pixels of these, K prototypes.

    Args:
        vit: A `ViT` with weights in float32 that returns one vector for each image. The head of a
            classifier is not trained.
        steps: Batches of the whole run, for the teacher's momentum.
        local_size: An int or (height, width) of the local views, multiples of the patch size; None
            if there are none. The position table is resampled in each call, and learns from them.
        num_prototypes: K.
        hidden_dim: Width of the head's hidden layers.
        bottleneck_dim: Width of what its prototypes are compared with.
        norm_last_layer: Whether all prototypes have the norm 1. False trains better with a small
            ViT, and may be less stable.
        student_temp: tau_s.
        teacher_temp: tau_t after its warm-up.
        warmup_teacher_temp: tau_t at the start; None means no warm-up.
        warmup_steps: Batches in which tau_t rises linearly. (The authors raise it epoch by epoch.)
        teacher_momentum: m at the start. Nearer to 1 for small batches, as .9995 for 256.
        center_momentum: The share of c that stays in each step.
        freeze_last_layer: Batches at the start in which the prototypes get no gradient, in the
            paper an epoch. Weight decay shrinks them all the same, which changes nothing that they
            compute. Adam counts these steps, so the first ones after them are larger.
        seed: As for any objective; DINO itself draws nothing. `multi_crop` makes the views.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        views: A dict of "global" `(B, 2, H, W, C)` and, with a `local_size`, "local"
            `(B, L, h, w, C)`, as `keras_vit.train.multi_crop_batches` yields.
        training: Whether this is a step of training.

    Returns:
        A dict of float32 logits: "student" `(B, 2 + L, K)`, "teacher" `(B, 2, K)`.

    Reference:
        arXiv 2104.14294.

    Example:

    >>> vit = keras_vit.vit_s16(num_classes=0, drop_path=0.1)
    >>> dino = keras_vit.train.DINO(vit, steps=100_000, local_size=96)
    >>> dino.compile(keras.optimizers.AdamW(5e-4, weight_decay=0.04, clipnorm=3.0))
    >>> dino.fit(views, epochs=100, steps_per_epoch=1000)
    >>> dino.update_teacher().save("features.keras")
    """

    reads = "pre_logits"
    loss_reads_images = False

    def __init__(
        self,
        vit: ViT,
        steps: int,
        *,
        local_size: int | tuple[int, int] | None = None,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        norm_last_layer: bool = True,
        student_temp: float = 0.1,
        teacher_temp: float = 0.04,
        warmup_teacher_temp: float | None = None,
        warmup_steps: int = 0,
        teacher_momentum: float = 0.996,
        center_momentum: float = 0.9,
        freeze_last_layer: int = 0,
        seed: int | None = None,
        name: str = "dino",
        **kwargs: Any,
    ):
        require(is_int(steps) and steps > 0, "steps", "be a positive int", steps)
        for field, value in (
            ("warmup_steps", warmup_steps),
            ("freeze_last_layer", freeze_last_layer),
        ):
            require(is_int(value) and value >= 0, field, "be an int of at least 0", value)
        if warmup_teacher_temp is None:
            warmup_teacher_temp = teacher_temp
        for field, value in (
            ("student_temp", student_temp),
            ("teacher_temp", teacher_temp),
            ("warmup_teacher_temp", warmup_teacher_temp),
        ):
            require(is_number(value) and value > 0, field, "be a positive number", value)
        for field, value in (
            ("teacher_momentum", teacher_momentum),
            ("center_momentum", center_momentum),
        ):
            rule = "be a number of at least 0 and at most 1"
            require(is_number(value) and 0 <= value <= 1, field, rule, value)
        super().__init__(vit, seed=seed, name=name, **kwargs)
        self.steps, self.local_size = steps, local_size
        self.student_temp, self.teacher_temp = student_temp, teacher_temp
        self.warmup_teacher_temp, self.warmup_steps = warmup_teacher_temp, warmup_steps
        self.teacher_momentum, self.center_momentum = teacher_momentum, center_momentum
        self.freeze_last_layer = freeze_last_layer
        self.head, self.teacher_head = (
            DINOHead(
                num_prototypes,
                hidden_dim=hidden_dim,
                bottleneck_dim=bottleneck_dim,
                norm_last_layer=norm_last_layer,
                dtype=vit.dtype_policy,
                name=name,
            )
            for name in ("head", "teacher_head")
        )
        with deferred() as weights:
            self.teacher = ViT(vit.config, name=f"{vit.name}_teacher", dtype=vit.dtype_policy)
        for ours, theirs in zip(self.teacher.weights, vit.weights, strict=True):
            weights.fill(ours, _copy(theirs))
        weights.initialize_rest()
        self._student_backbone = _Backbone.of(vit, local_size)
        self._teacher_backbone = _Backbone.of(self.teacher, None)
        for head in (self.head, self.teacher_head):
            head.build(self._student_backbone.features.output.shape)
        for ours, theirs in zip(self.teacher_head.weights, self.head.weights, strict=True):
            ours.assign(_copy(theirs))
        self.teacher.trainable = self.teacher_head.trainable = False
        # Of several replicas each has the logits of its own part.
        self.center = self._state("center", (num_prototypes,), "float32", "mean")
        self.step = self._state("step", (), "int32", "only_first_replica")
        self.teacher_step = self._state("teacher_step", (), "int32", "only_first_replica")

    def _state(self, name, shape, dtype, aggregation):
        return self.add_weight(
            shape=shape,
            initializer="zeros",
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation=aggregation,
            name=name,
        )

    def _check_vit(self, vit: ViT) -> None:
        super()._check_vit(vit)
        rule = "be another than None: DINO reads one vector for each image"
        refuse(vit.config.pooling is None, "pooling", rule, vit.config.pooling)
        policy = vit.dtype_policy
        if policy.variable_dtype not in ("float32", "float64"):
            raise ValueError(
                "vit must have weights in float32, where a small share of an average is not "
                f"rounded off: use mixed_{policy.name}. Received: a vit of dtype {policy.name!r}"
            )

    @property
    def trained_vit(self) -> ViT:
        """The teacher; see `update_teacher`."""
        return self.teacher

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike, steps: int, *, dtype: Any = None, **arguments: Any
    ) -> "DINO":
        """Student and teacher with the teacher and the head of a published "full checkpoint".

        The center begins at zero, and follows the teacher's outputs within some tens of steps.

        Args:
            source: As for `keras_vit.from_pretrained`: a file of facebookresearch/dino, converted
                to safetensors with the command that the error for a .pth file prints.
            steps: As for the class.
            dtype: dtype policy.
            **arguments: Other arguments of the class, but the head's sizes, which the file shows.
                `norm_last_layer` is False by default if the file's gains are not all 1.

        Returns:
            A `DINO`.

        Example:

        >>> dino = keras_vit.train.DINO.from_pretrained("dino_vits16_full.safetensors", 10_000)
        """
        path = local_path(source)
        head = find_head(path)
        vit = from_pretrained(path, num_classes=0, dtype=dtype)
        values = read_values(path, head.rows, head.shapes, r"head\.")
        arguments.setdefault("norm_last_layer", bool((values["gain"] == 1).all()))
        dino = cls(vit, steps, **head.sizes, **arguments)
        for layer in (dino.head, dino.teacher_head):
            for weight in layer.weights:
                weight.assign(np.array(values[weight.path.split("/", 1)[1]]))  # a copy for each
        return dino

    # -- a step

    def call(self, views, training=None):
        self._check_views(views)
        if training:
            self.update_teacher()
        seen = [views[name] for name in VIEWS if name in views]
        features = self._student_backbone(self.vit, seen, training)  # (B, 2 + L, D)
        frozen = self.step < self.freeze_last_layer if self.freeze_last_layer else False
        student = self.head(features, frozen=frozen)  # (B, 2 + L, K)
        # The teacher has no dropout.
        features = self._teacher_backbone(self.teacher, seen[:1], False)  # (B, 2, D)
        teacher = ops.stop_gradient(self.teacher_head(features))  # (B, 2, K)
        return {"student": student, "teacher": teacher}

    def image_losses(self, images, labels, outputs):
        logits = (outputs["teacher"] - self.center) / self._teacher_temp()
        targets = ops.stop_gradient(ops.softmax(logits, axis=-1))  # (B, 2, K)
        log_p = ops.log_softmax(outputs["student"] / self.student_temp, axis=-1)  # (B, 2 + L, K)
        others = ops.sum(log_p, axis=1, keepdims=True) - log_p[:, :2]  # (B, 2, K)
        pairs = 2 * (outputs["student"].shape[1] - 1)
        return -ops.sum(targets * others, axis=(1, 2)) / pairs  # (B,)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if training:
            self._update_center(y_pred["teacher"], sample_weight)
            self.step.assign(self.step + 1)
        return loss

    def update_teacher(self) -> ViT:
        """Makes the teacher's update after the last step of training, unless it is made already.

        Returns:
            The teacher, a plain `ViT`. Further training changes it.
        """
        # m rises from `teacher_momentum` to 1, so 1 - m falls to 0: by half a cosine.
        done = ops.minimum(ops.cast(self.step - 1, "float32") / self.steps, 1.0)
        rate = (1 - self.teacher_momentum) * (1 + ops.cos(math.pi * done)) / 2
        rate = ops.where(self.step > self.teacher_step, rate, 0.0)
        for teacher, student in (
            *zip(self.teacher.weights, self.vit.weights, strict=True),
            *zip(self.teacher_head.weights, self.head.weights, strict=True),
        ):
            old, new = teacher.value, ops.stop_gradient(student.value)
            teacher.assign(old + ops.cast(rate, old.dtype) * (new - old))
        self.teacher_step.assign(ops.copy(self.step))  # JAX donates the buffer of each variable
        return self.teacher

    def _update_center(self, logits, sample_weight):
        means = ops.mean(logits, axis=1)  # (B, K)
        if sample_weight is None:
            center = ops.mean(means, axis=0)  # (K,)
        else:
            shares = ops.reshape(ops.cast(sample_weight, means.dtype), (-1, 1))
            total = ops.maximum(ops.sum(shares), keras.config.epsilon())
            center = ops.sum(shares * means, axis=0) / total
        share = self.center_momentum
        self.center.assign(share * self.center + (1 - share) * ops.stop_gradient(center))

    def _teacher_temp(self):
        if not self.warmup_steps:
            return self.teacher_temp
        done = ops.minimum(ops.cast(self.step, "float32") / self.warmup_steps, 1.0)
        first = self.warmup_teacher_temp
        return first + (self.teacher_temp - first) * done

    def _check_views(self, views):
        names = VIEWS[: 1 + (self.local_size is not None)]
        if not isinstance(views, dict) or {*views} != {*names}:
            received = sorted(views) if isinstance(views, dict) else type(views).__name__
            raise ValueError(
                f"views must be a dict of {' and '.join(names)} for "
                f"local_size={self.local_size!r}, as multi_crop makes it. Received: {received}"
            )
        backbone = self._student_backbone
        for name, size in zip(names, backbone.sizes, strict=True):
            count = views[name].shape[1] if len(views[name].shape) == 5 else None
            shape = (2 if name == "global" else count, *size)
            if tuple(views[name].shape[1:]) != shape:
                raise ValueError(
                    f"views must have the shape (batch, {'2' if name == 'global' else 'any'}, "
                    f"{', '.join(map(str, size))}) in {name!r}. "
                    f"Received: shape {tuple(views[name].shape)}"
                )

    # -- saving

    def get_config(self) -> dict[str, Any]:
        head = self.head
        return {
            **super().get_config(),
            "steps": self.steps,
            "local_size": self.local_size,
            "num_prototypes": head.num_prototypes,
            "hidden_dim": head.hidden_dim,
            "bottleneck_dim": head.bottleneck_dim,
            "norm_last_layer": head.norm_last_layer,
            "student_temp": self.student_temp,
            "teacher_temp": self.teacher_temp,
            "warmup_teacher_temp": self.warmup_teacher_temp,
            "warmup_steps": self.warmup_steps,
            "teacher_momentum": self.teacher_momentum,
            "center_momentum": self.center_momentum,
            "freeze_last_layer": self.freeze_last_layer,
        }


def _copy(weight) -> np.ndarray:
    # JAX and torch would share the memory of the array that `convert_to_numpy` returns.
    return np.array(ops.convert_to_numpy(weight.value))


@dataclasses.dataclass(frozen=True)
class _Backbone:
    """The features of a ViT for views of one or two sizes. Keras does not look for layers here."""

    features: keras.Model
    sizes: tuple[tuple[int, int, int], ...]
    local: ResizedView | None

    @classmethod
    def of(cls, vit: ViT, local_size: int | tuple[int, int] | None) -> "_Backbone":
        if local_size is None:
            return cls(vit.features(), (vit.config.input_shape,), None)
        try:
            config = resized_config(vit, local_size)
        except ValueError as error:
            raise ValueError(
                f"local_size must be an image size of the vit: {error}. "
                f"Received: local_size={local_size!r}"
            ) from error
        local = ResizedView.of(vit, config, features=True)
        return cls(vit.features(), (vit.config.input_shape, config.input_shape), local)

    def __call__(self, vit: ViT, views: list, training: bool | None):
        """The features `(B, V, D)` of all views, each of which is `(B, V_i, H_i, W_i, C)`."""
        outputs = []
        for number, images in enumerate(views):
            flat = ops.reshape(images, (-1, *images.shape[2:]))  # (B V_i, H_i, W_i, C)
            if number and self.local is not None:
                y = self.local(vit, flat, training)
            else:
                y = self.features(flat, training=training)  # (B V_i, D)
            outputs.append(ops.reshape(y, (-1, images.shape[1], y.shape[-1])))
        return ops.concatenate(outputs, axis=1)

"""FlexiViT: one model for many patch sizes, by training each batch with another."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.config import ViTConfig
from keras_vit.model import ViT, resized_config
from keras_vit.train.resized_view import ResizedView

PATCH_SIZES = (8, 10, 12, 15, 16, 20, 24, 30, 40, 48)


@keras.saving.register_keras_serializable("keras_vit")
class FlexiViT(keras.Model):
    """Trains a ViT with a random patch size for each batch.

    For a patch size p, the patch kernel and the position table are the model's own, resized:

    w_p = pinv(B_p^T) w,    E_p = R_p E_pos

    with constant matrices B_p, which resizes a patch, and R_p, which resizes a grid. They are those
    of `ViT.resized`. The gradient passes through the products, so that the model's own kernel and
    table learn from all patch sizes; the other weights are the same at each. `evaluate`, `predict`
    and a call use `eval_patch_size`.

    The draw is a function of the state of a seed generator, which is among `variables`; so
    `keras_vit.train.Checkpoint` resumes it. Each patch size has a compiled training step of its
    own, with `steps_per_execution` one for as many batches.

    Shapes: B batch, H x W pixels, C channels, K classes.

    Args:
        model: A `ViT` without LoRA and quantization. It is trained in place: `flexi.vit`.
        patch_sizes: The sizes to draw from, each an int or (height, width).
        eval_patch_size: The size outside of training; None means the model's own.
        seed: Random seed.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, of the model's image size.
        training: Whether dropout is on. The patch size is drawn by `fit` and `train_on_batch`.

    Returns:
        What the ViT returns: logits `(B, K)`.

    Reference:
        arXiv 2212.08013, Section 3.3 and 3.4.

    Example:

    >>> vit = keras_vit.vit_b16(num_classes=10, image_size=240, interpolation="flexivit")
    >>> flexi = keras_vit.train.FlexiViT(vit)
    >>> flexi.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> flexi.fit(images, labels)
    >>> small = flexi.vit.resized(240, patch_size=30)
    """

    def __init__(
        self,
        model: ViT,
        patch_sizes: Sequence[int | tuple[int, int]] = PATCH_SIZES,
        *,
        eval_patch_size: int | tuple[int, int] | None = None,
        seed: int | None = None,
        name: str = "flexivit",
        **kwargs: Any,
    ):
        if not isinstance(model, ViT):
            raise ValueError(f"model must be a keras_vit.ViT. Received: model={model!r}")
        if not isinstance(patch_sizes, Sequence) or not patch_sizes:
            raise ValueError(
                "patch_sizes must be a sequence of at least one patch size. "
                f"Received: patch_sizes={patch_sizes!r}"
            )
        # The products are computed in the dtype of the weights, whatever the layers compute in.
        kwargs.setdefault("dtype", model.dtype_policy.variable_dtype)
        super().__init__(name=name, **kwargs)
        self.vit = model
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.patch_sizes = tuple(_config_at(model, p).patch_size for p in patch_sizes)
        own = model.config.patch_size
        self.eval_patch_size = _config_at(model, eval_patch_size or own).patch_size
        sizes = {*self.patch_sizes, self.eval_patch_size} - {own}
        self._resized = {p: ResizedView.of(model, _config_at(model, p)) for p in sorted(sizes)}
        self._drawn: tuple[int, int] | None = None  # while a training step runs or is compiled
        self._seed = self._step = 0
        self.built = True

    def call(self, images, training=None):
        patch_size = self._drawn or self.eval_patch_size
        if self._drawn:
            self.seed_generator.next()  # counts the steps, for `_draw`
        if patch_size == self.vit.config.patch_size:
            return self.vit(images, training=training)  # (B, K)
        return self._resized[patch_size](self.vit, images, training)  # (B, K)

    def compute_output_shape(self, input_shape):
        return self.vit.compute_output_shape(input_shape)

    # -- training

    @property
    def train_step(self):
        """A new function each time: JAX compiles equal functions once, for one patch size."""
        step = super().train_step

        def train_step(*args):
            return step(*args)

        return train_step

    def make_train_function(self, force=False):
        """Makes a training function that draws a patch size, and calls the one compiled for it."""
        resized_config(self.vit, self.vit.config.image_size)  # LoRA may have been enabled since
        state = ops.convert_to_numpy(self.seed_generator.state)  # its dtype varies by backend
        self._seed, self._step = state.astype("uint32").tolist()
        if self.train_function is not None and not force:
            return
        functions = {}
        for patch_size in self.patch_sizes:
            super().make_train_function(force=True)
            functions[patch_size] = self.train_function

        def train_function(*args):
            self._drawn = self._draw()
            try:
                return functions[self._drawn](*args)
            finally:
                self._drawn = None

        self.train_function = train_function

    def _draw(self) -> tuple[int, int]:
        rng = np.random.default_rng((self._seed, self._step))
        self._step += self.steps_per_execution
        return self.patch_sizes[rng.integers(len(self.patch_sizes))]

    # -- saving

    def get_config(self) -> dict[str, Any]:
        return {
            "model": keras.saving.serialize_keras_object(self.vit),
            "patch_sizes": self.patch_sizes,
            "eval_patch_size": self.eval_patch_size,
            "seed": self.seed,
            "name": self.name,
            "trainable": self.trainable,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "FlexiViT":
        return cls(**keras.saving.deserialize_keras_object(config))


def _config_at(model: ViT, patch_size: int | tuple[int, int]) -> ViTConfig:
    return resized_config(model, model.config.image_size, patch_size)

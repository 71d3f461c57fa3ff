"""What every training objective around a ViT has in common."""

from typing import Any

import keras
from keras import ops

from keras_vit.config_rules import is_int, is_number, require
from keras_vit.model import ViT


class Objective(keras.Model):
    """Base class of models that train a ViT for something else than the labels of its head.

    A subclass builds its layers in `__init__`, with `dtype=vit.dtype_policy`, returns a dict of
    named tensors from `call`, each of which begins with the axis of the batch, and a loss for each
    image from `image_losses`. Keras' own steps do the rest: `compile(optimizer)` without a loss,
    then `fit(images)` or `fit(images, labels)`. The loss is Keras' mean of these losses, each times
    its `sample_weight`, plus regularization losses. (Keras ignores the `sample_weight` of arrays
    without labels: pass any labels with it.)

    What of the vit the objective reads is the class attribute `reads`: "tokens", "pre_logits" or
    "logits". The layers behind it, such as the head, are not among the trainable variables: they
    have no gradient, and weight decay would change them all the same.

    An objective whose `image_losses` do not read the images says so by `loss_reads_images = False`:
    several processes then do not send them to each other.

    What is random in training draws from `seed_generator`, whose state is among `variables`; so
    `keras_vit.train.Checkpoint` resumes it. What is random outside of training is the same in each
    call (`seed_for`): the `val_loss` of two epochs can be compared, and an evaluation does not
    change the training that follows.

    Layers compute in the vit's dtype policy; the objective itself casts nothing, so that `call`
    and `image_losses` get the pixels as they are.

    Shapes: B batch, H x W pixels, C channels.

    Args:
        vit: A `ViT` without LoRA and quantization. It is trained in place: `objective.vit`.
        seed: Random seed of the training; None draws one.
        name: Name of the model.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed for the vit.
        training: Whether this is a step of training.

    Returns:
        A dict of tensors `(B, ...)`.
    """

    vit: ViT
    reads = "tokens"
    loss_reads_images = True

    def __init__(self, vit: ViT, *, seed: int | None = None, name: str | None = None, **kwargs):
        self._check_vit(vit)
        rule = "be None or an int of at least 0"
        require(seed is None or (is_int(seed) and seed >= 0), "seed", rule, seed)
        # Inputs would be cast to the compute dtype, and with them the pixels of the loss.
        super().__init__(name=name, dtype=vit.dtype_policy, autocast=False, **kwargs)
        self.vit = vit
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        read = vit if self.reads == "logits" else vit.features(self.reads)
        used = {id(weight) for weight in read.weights}
        self._idle = frozenset(id(weight) for weight in vit.weights) - used
        self.built = True

    def _check_vit(self, vit: ViT) -> None:
        """Refuses a vit that cannot be trained. Subclasses add their own rules with `refuse`."""
        if not isinstance(vit, ViT):
            raise ValueError(f"vit must be a keras_vit.ViT. Received: vit={vit!r}")
        for layer in vit._flatten_layers():
            if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
                raise ValueError(
                    "vit must be without LoRA and quantization: save it and load it again to merge "
                    f"LoRA, and quantize after training. Received: layer {layer.path!r}"
                )

    @property
    def trained_vit(self) -> ViT:
        """The ViT to use after training: `vit`, or what a subclass prefers."""
        return self.vit

    # -- what a subclass defines

    def image_losses(self, images: Any, labels: Any, outputs: dict[str, Any]) -> Any:
        """The loss of each image.

        Args:
            images: What was passed to `call`.
            labels: The labels, or None where the data has none.
            outputs: What `call` returned.

        Returns:
            float32 tensor `(B,)`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define image_losses")

    def seed_for(self, training: bool | None, draw: int = 0) -> Any:
        """The seed of a random operation of `keras.random`.

        Args:
            training: Whether this is a step of training.
            draw: A number for each random operation of a call, so that they differ outside of
                training.

        Returns:
            `seed_generator` in training, else an int.
        """
        return self.seed_generator if training else draw

    # -- what Keras calls

    @property
    def trainable_variables(self):
        return [v for v in super().trainable_variables if id(v) not in self._idle]

    @property
    def non_trainable_variables(self):
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.variables if id(v) not in trained]

    @property
    def trainable_weights(self):
        return [v for v in super().trainable_weights if id(v) not in self._idle]

    @property
    def non_trainable_weights(self):
        trained = {id(v) for v in self.trainable_weights}
        return [v for v in self.weights if id(v) not in trained]

    def compute_loss(self, x=None, y=None, y_pred: Any = None, sample_weight=None, training=True):
        if self.loss is not None:
            raise ValueError(
                f"loss must be None: {type(self).__name__} computes its own. "
                f"Received: loss={self.loss!r} in compile()"
            )
        if x is not None:
            x = keras.tree.map_structure(ops.convert_to_tensor, x)
        losses = self.image_losses(x, y, y_pred)  # (B,)
        # As Keras does it for any loss, with several devices too.
        total = _Mean(name="mean", dtype="float32")(losses, losses, sample_weight)
        for loss in self.losses:
            total = total + ops.cast(ops.sum(loss), total.dtype)
        return total

    def get_config(self) -> dict[str, Any]:
        return {
            "vit": keras.saving.serialize_keras_object(self.vit),
            "seed": self.seed,
            "name": self.name,
            "trainable": self.trainable,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None):
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects))


class _Mean(keras.losses.Loss):
    """Reduces the losses of the images as Keras reduces those of samples."""

    def call(self, y_true, y_pred):
        return y_pred


def refuse(condition: Any, field: str, rule: str, value: Any) -> None:
    """Raises `ValueError` if a vit's config cannot be trained.

    Args:
        condition: Whether to refuse it.
        field: The field of the config.
        rule: What the field must do.
        value: The value that it has.
    """
    require(not condition, f"vit.config.{field}", rule, value)


def check_share(name: str, value: Any) -> None:
    """Raises `ValueError` unless a value is a number strictly between 0 and 1."""
    holds = is_number(value) and 0 < value < 1
    require(holds, name, "be a number greater than 0 and less than 1", value)

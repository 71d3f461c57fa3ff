"""The frozen model that a student learns from, and the pixels that it sees."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.config import ViTConfig
from keras_vit.config_rules import in_other_order
from keras_vit.model import ViT, head_logits
from keras_vit.preprocessing import KERAS_METHODS

LOGITS = "logits"


class Teacher(keras.layers.Layer):
    """A trained model that always runs for inference and never learns.

    Its weights are among `variables`, so that JAX passes them to the compiled step, and files hold
    them. They stay out of `trainable_variables`, also if a model around this layer is made
    trainable. No gradient flows through it.

    Shapes: B batch, H x W pixels, C channels, K classes.

    Args:
        model: A built `keras.Model` that returns `(B, K)`. It is frozen.
        student: The config of the ViT whose pixels are passed.
        preprocessing: From the student's pixels to the teacher's: a layer or another callable.
            None converts exactly for a `ViT`, whose config states its pixels, and passes the
            pixels as they are to another model.
        from_logits: Whether the model returns logits; False if it returns probabilities.
        layer_names: Layers whose outputs are returned too. They need a functional model.

    Call arguments:
        images: `(B, H, W, C)`, the student's pixels.

    Returns:
        A dict of float32 tensors: "logits" `(B, K)`, and an output for each of `layer_names`.
    """

    def __init__(
        self,
        model: keras.Model,
        student: ViTConfig,
        preprocessing: Callable[[Any], Any] | None = None,
        *,
        from_logits: bool = True,
        layer_names: tuple[str, ...] = (),
        name: str = "teacher",
    ):
        # Its model casts its inputs itself: until then the pixels stay exact.
        super().__init__(name=name, dtype="float32", autocast=False)
        self.from_logits = from_logits
        self.preprocessing = preprocessing
        exact = preprocessing is None
        self._conversion = _conversion(model, student) if exact else None
        self.model = model
        self._outputs = _Outputs(model, layer_names)
        self._freeze()
        self.built = True

    def _freeze(self) -> None:
        # Each by itself: on TensorFlow, setting a flag to what it is does not reach inner layers.
        for layer in self.model._flatten_layers():
            layer.trainable = False
        for weight in self.model.weights:
            weight.trainable = False

    @property
    def trainable(self) -> bool:
        return False

    @trainable.setter
    def trainable(self, value: bool) -> None:
        """Does nothing: a model that is made trainable passes this on to its layers."""

    def call(self, images, training=None):
        # `training` is False: Keras passes it on to layers that are called without it.
        convert: Any = self.preprocessing if self._conversion is None else self._conversion
        outputs = self._outputs(convert(images))
        outputs = {k: ops.stop_gradient(ops.cast(v, "float32")) for k, v in outputs.items()}
        if not self.from_logits:  # equal to the logits, up to a number for each image
            outputs[LOGITS] = ops.log(ops.maximum(outputs[LOGITS], 1e-30))
        return outputs


class _Outputs:
    """Calls a model for its logits and the outputs of some layers. Keras tracks no copy of it."""

    def __init__(self, model: keras.Model, layer_names: tuple[str, ...]):
        self.model = model
        self.is_vit = isinstance(model, ViT)
        self.function = None
        if not (layer_names or self.is_vit):
            return
        if getattr(model, "inputs", None) is None:
            raise ValueError(
                "teacher must be a functional or Sequential model, whose layers can be read by "
                f"name. Received: teacher={model!r} for the layers {', '.join(layer_names)}"
            )
        outputs = {name: layer_output(model, name, "teacher") for name in layer_names}
        if isinstance(model, ViT):
            outputs[LOGITS] = model.features().output  # its head follows
        else:
            outputs[LOGITS] = model.outputs[0]
        self.function = keras.Model(model.inputs, outputs)

    def __call__(self, images) -> dict[str, Any]:
        if self.function is None:
            return {LOGITS: self.model(images, training=False)}
        outputs = dict(self.function(images, training=False))
        if self.is_vit:
            outputs[LOGITS] = head_logits(self.model, outputs[LOGITS])
        return outputs


def layer_output(model: keras.Model, name: str, whose: str) -> Any:
    """The symbolic output of a layer, or the error that names the layers."""
    try:
        return model.get_layer(name).output
    except ValueError:
        names = ", ".join(layer.name for layer in model.layers)
        raise ValueError(
            f"{whose}_layer_name must be a layer of the {whose}: {names}. "
            f"Received: {whose}_layer_name={name!r}"
        ) from None


def check_teacher(model: Any, vit: ViT, preprocessing: Any, from_logits: bool) -> None:
    """Raises `ValueError` if a model cannot teach a ViT."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(f"teacher must be a built keras.Model. Received: teacher={model!r}")
    ours = {id(weight) for weight in vit.weights}
    if any(id(weight) in ours for weight in model.weights):
        raise ValueError(
            "teacher must share no weights with vit, which is trained: copy it with "
            f"keras.models.clone_model or load it again. Received: teacher={model!r}"
        )
    if preprocessing is not None and not callable(preprocessing):
        raise ValueError(
            "teacher_preprocessing must be None or callable. "
            f"Received: teacher_preprocessing={preprocessing!r}"
        )
    if isinstance(model, ViT):
        if in_other_order(vit.config.labels, model.config.labels):
            raise ValueError(
                "teacher must have its classes in the order of vit.config.labels: "
                f"{', '.join(vit.config.labels)}. Received: {', '.join(model.config.labels)}"
            )
        if model.config.num_classes and not from_logits:
            raise ValueError(
                "teacher_from_logits must be True for a ViT, whose logits are read before its "
                f"classifier_activation. Received: teacher_from_logits={from_logits!r}"
            )
    elif getattr(model, "layers", None):
        ends = getattr(model.layers[-1], "activation", None)
        if from_logits and ends is keras.activations.softmax:
            raise ValueError(
                f"teacher_from_logits must be False for a teacher that ends in a softmax, as "
                f"{model.name!r} does. Received: teacher_from_logits={from_logits!r}"
            )
    if preprocessing is not None:
        return
    shape = model.config.input_shape if isinstance(model, ViT) else _input_shape(model)
    given = vit.config.input_shape
    free = range(2) if isinstance(model, ViT) else ()  # resized
    for axis, (wanted, size) in enumerate(zip(shape, given, strict=True)):
        if axis not in free and wanted not in (None, size):
            raise ValueError(
                f"teacher_preprocessing must convert images {given} of the student to {shape} of "
                "the teacher. Received: teacher_preprocessing=None"
            )


def _input_shape(model: keras.Model) -> tuple:
    """Height, width and channels; None is any."""
    inputs = getattr(model, "inputs", None)
    if not inputs or len(inputs[0].shape) != 4:
        return None, None, None
    return tuple(inputs[0].shape[1:])


def _conversion(model: keras.Model, student: ViTConfig) -> Callable[[Any], Any]:
    """From the pixels of a student to those of its teacher.

    With p the pixels from 0 to 255, m the mean and s the deviation of each:

    x_student = (p / 255 - m) / s,    x_teacher = x_student (s / s_t) + (m - m_t) / s_t
    """
    if not isinstance(model, ViT):
        return _unchanged
    mean, std, mean_t, std_t = (
        np.broadcast_to(np.asarray(value, "float64"), student.in_channels)
        for config in (student, model.config)
        for value in (config.pixel_mean, config.pixel_std)
    )
    scale = (std / std_t).astype("float32")
    offset = ((mean - mean_t) / std_t).astype("float32")
    size, method = model.config.image_size, model.config.resize_method

    def convert(images):
        images = ops.cast(images, "float32")
        if size != student.image_size:  # the student's crop, as a whole
            images = ops.image.resize(
                images,
                size,
                interpolation=KERAS_METHODS.get(method, method),
                antialias=method != "nearest",
                data_format="channels_last",
            )
        return ops.add(ops.multiply(images, scale), offset)

    return convert


def _unchanged(images):
    return images

"""A ViT with its preprocessing inside: raw pixels into `fit` and `predict`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.images import read_image
from keras_vit.model import ViT
from keras_vit.paths import is_path
from keras_vit.preprocessing import Preprocessing, check_pixels, preprocess
from keras_vit.probabilities import probabilities_of, probability_function

F = TypeVar("F", bound=Callable)
CHECKED = 64
"""Images of an array that are checked; of a dataset it is the first batch."""


@keras.saving.register_keras_serializable("keras_vit")
class Classifier(keras.Model):
    """A `ViT` behind its `Preprocessing`, as one functional Keras model.

    It takes pixels from 0 to 255, integers or floats, in batches of any size, as
    `keras.utils.image_dataset_from_directory` yields them. The exports, explanations, runtimes and
    `save_pretrained` take it like the ViT inside, which it shares: `classifier.vit`.

    `fit`, `evaluate` and `predict` check the first batch, and their `_on_batch` forms every batch:
    pixels that are normalized already are an error, and would be black otherwise. A dataset is
    therefore asked for one batch more. A call in a graph of your own checks nothing.

    Args:
        model: A `ViT`.
        name: Name of the model.
        trainable: Whether the weights are trainable; None leaves them as they are.

    Call arguments:
        images: `(B, H, W, C)`, pixels from 0 to 255, of any height and width.

    Returns:
        What the ViT returns: logits `(B, K)`.

    Example:

    >>> model = keras_vit.Classifier(keras_vit.vit_s16(labels=folder.class_names, weights=...))
    >>> model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> model.fit(folder, epochs=5)
    >>> model.classify("cat.jpg")
    [[('cat', 0.98)]]
    """

    vit: ViT

    def __init__(self, model: ViT, *, name: str = "classifier", trainable: bool | None = None):
        if not isinstance(model, ViT):
            raise ValueError(f"model must be a ViT. Received: model={model!r}")
        images = keras.Input((None, None, model.config.in_channels), name="pixels")
        pixels = Preprocessing(model.config, dtype="float32", name="preprocessing")(images)
        super().__init__(inputs=images, outputs=model(pixels), name=name)  # (B, K)
        self.vit = model
        if trainable is not None:
            self.trainable = trainable

    @property
    def config(self) -> ViTConfig:
        """The config of the ViT."""
        return self.vit.config

    def classify(self, images: Any, top_k: int = 1) -> list[list[tuple[str, float]]]:
        """The best classes of images, by name.

        Args:
            images: Files, or what `keras_vit.preprocessing.preprocess` takes: images of different
                sizes too.
            top_k: Number of classes.

        Returns:
            For each image pairs of a label and its probability, the best one first. Without
            labels, it is the number of the class. A model of one logit gives the probability of
            its one class: 0.9 and 0.1 are equally sure.
        """
        config = self.config
        if not config.num_classes or config.pooling is None:
            raise ValueError(
                "classify must be called on a model with a head and with pooling. Received: "
                f"num_classes={config.num_classes}, pooling={config.pooling!r}"
            )
        several = isinstance(images, list | tuple)
        items = [read_image(x) if is_path(x) else x for x in (images if several else [images])]
        outputs = self.vit.predict(preprocess(items if several else items[0], config), verbose=0)
        if config.classifier_activation in (None, "linear"):
            outputs = probabilities_of(outputs, probability_function(config))
        labels = config.labels or tuple(map(str, range(config.num_classes)))
        best = np.argsort(-outputs, axis=-1, kind="stable")[:, :top_k]
        return [
            [(labels[k], float(row[k])) for k in order]
            for row, order in zip(outputs, best, strict=True)
        ]

    # -- checks of what is passed

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        if (validation := kwargs.get("validation_data")) is not None:
            if isinstance(validation, tuple | list):
                self._check(validation[0], "validation_data")
            else:
                kwargs["validation_data"] = self._checked(validation, "validation_data")
        return super().fit(self._checked(x, "x"), y, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        return super().evaluate(self._checked(x, "x"), y, **kwargs)

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return super().predict(self._checked(x, "x"), **kwargs)

    def train_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(x, "x")
        return super().train_on_batch(x, *args, **kwargs)

    def test_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(x, "x")
        return super().test_on_batch(x, *args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        self._check(x, "x")
        return super().predict_on_batch(x)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, np.ndarray):
            self._check(x, "x")
        return super().__call__(x, *args, **kwargs)

    def _checked(self, data: Any, name: str) -> Any:
        """The same data. Its first batch is checked, and of an iterator put back."""
        if data is None or hasattr(data, "shape"):
            self._check(data, name)
        elif isinstance(data, keras.utils.PyDataset):
            self._check(_images(data[0]), name)
        elif hasattr(data, "__iter__"):
            iterator = iter(data)
            first = next(iterator, None)
            self._check(_images(first), name)
            if iterator is data and first is not None:
                return _put_back(first, iterator)
        return data

    def _check(self, images: Any, name: str) -> None:
        """Raises for images that are not pixels. What is not an array, Keras judges."""
        if hasattr(images, "shape") and hasattr(images, "dtype"):
            part = images[:CHECKED]
            check_pixels([keras.ops.convert_to_numpy(part)], name)

    # -- saving

    def get_config(self) -> dict[str, Any]:
        return {"model": keras.saving.serialize_keras_object(self.vit), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "Classifier":
        config = dict(config)
        config["model"] = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        return cls(**config)


def vit_of(model: Any) -> Any:
    """The ViT inside a `Classifier` or a `Sequential` of `Preprocessing` and a `ViT`.

    Any other model is returned unchanged.

    Raises:
        ValueError: The `Preprocessing` makes other pixels than the ViT was trained on.
    """
    if isinstance(model, Classifier):
        return model.vit
    if not isinstance(model, keras.Sequential):
        return model
    match model.layers:
        case [Preprocessing() as pixels, ViT() as vit]:
            ours, theirs = (_pixel_fields(config) for config in (vit.config, pixels.config))
            if ours != theirs:
                wrong = ", ".join(f"{k}={v!r}" for k, v in theirs.items() if v != ours[k])
                raise ValueError(
                    "model must preprocess by the config of its ViT: "
                    f"Preprocessing(vit.config). Received: Preprocessing with {wrong}"
                )
            return vit
    return model


def takes_classifier(function: F) -> F:
    """Lets a function whose first argument is `model`, a `ViT`, take what `vit_of` takes."""

    @functools.wraps(function)
    def with_vit(model: Any, *args: Any, **kwargs: Any) -> Any:
        return function(vit_of(model), *args, **kwargs)

    return with_vit  # type: ignore[return-value]


def _pixel_fields(config: ViTConfig) -> dict[str, Any]:
    names = ("image_size", "in_channels", "resize_method", "crop_fraction")
    fields: dict[str, Any] = {name: getattr(config, name) for name in names}
    for name in ("pixel_mean", "pixel_std"):  # one value, or one per channel
        values = np.broadcast_to(getattr(config, name), config.in_channels)
        fields[name] = tuple(values.tolist())
    return fields


def _images(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch


def _put_back(first: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from iterator

"""A trained stem, folded for inference: the kernels of a ResNet are standardized once.

A group norm stays: its statistics are those of one image.
"""

import dataclasses
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution without bias, with TensorFlow's padding "SAME"."""

    name: str
    """The path of the model's layer, such as "stem/root_conv"."""
    kernel: np.ndarray
    """(k, k, C, F), standardized if the layer does so."""
    stride: int


@dataclasses.dataclass(frozen=True)
class GroupNorm:
    """`(x - mean) / sqrt(variance + epsilon) * scale + offset`, for each image and group.

    The mean and the variance are those of a group of neighboring channels at all places.
    """

    name: str
    """The path of the model's layer."""
    groups: int
    epsilon: float
    scale: np.ndarray
    offset: np.ndarray


Step = tuple[Convolution, GroupNorm]
"""A convolution and the norm that follows it."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """The weights of a bottleneck."""

    name: str
    """The path of the model's layer."""
    steps: tuple[Step, Step, Step]
    """With a ReLU after each; after the last one once the shortcut is added."""
    shortcut: Step | None
    """None where the shortcut is the input itself."""


@dataclasses.dataclass(frozen=True)
class Stem:
    """The weights of a few convolutions, or of a ResNet without its pooling and its head."""

    steps: tuple[Step, ...]
    """With a ReLU after each: the root of a ResNet, or all convolutions."""
    pooled: bool
    """Whether a max-pooling follows the steps."""
    units: tuple[Unit, ...]
    """Those of a ResNet."""


def fold_stem(layer: Any, kind: str) -> Stem:
    """Reads the weights of a stem once.

    Args:
        layer: A `ResNetStem` or a `ConvStem`.
        kind: "resnet" or "conv", what it is.

    Example:

    >>> fold_stem(model.get_layer("stem"), "resnet").steps[0][0].kernel.shape
    (7, 7, 3, 64)
    """
    if kind == "conv":
        steps = tuple(map(_step, layer.convs, layer.norms))
        return Stem(steps, pooled=False, units=())
    root = _step(layer.root_conv, layer.root_norm)
    return Stem((root,), pooled=True, units=tuple(_unit(unit) for unit in layer.units))


def same_padding(side: int, size: int, stride: int) -> tuple[int, int]:
    """What "SAME" adds before and after a side for a kernel of `size`.

    Example:

    >>> same_padding(224, 7, 2)
    (2, 3)
    """
    total = max((-(-side // stride) - 1) * stride + size - side, 0)
    return total // 2, total - total // 2


def _unit(unit: Any) -> Unit:
    shortcut = None
    if unit.shortcut_conv is not None:
        shortcut = _step(unit.shortcut_conv, unit.shortcut_norm)
    steps = (
        _step(unit.conv_1, unit.norm_1),
        _step(unit.conv_2, unit.norm_2),
        _step(unit.conv_3, unit.norm_3),
    )
    return Unit(unit.path, steps, shortcut)


def _step(conv: Any, norm: Any) -> Step:
    convolution = Convolution(conv.path, _array(conv.standardized_kernel()), conv.strides)
    gain, offset = _array(norm.gamma), _array(norm.beta)
    return convolution, GroupNorm(norm.path, norm.groups, norm.epsilon, gain, offset)


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")))

"""Layer-wise learning-rate decay (arXiv 2106.08254): lower blocks of a trained ViT move less."""
# `LayerFactors` is mixed into Keras' optimizers, and their attributes are not its own.
# pyright: reportAttributeAccessIssue=false

import functools
import re
from typing import Any

import keras
from keras import ops

BLOCK = re.compile(r"(?:^|/)encoder_block_(\d+)/")
EMBEDDING = re.compile(
    r"(?:^|/)(?:stem|patches|class_token|distillation_token|registers|position_embedding)/"
)


def layer_factors(model: keras.Model, decay: float) -> dict[str, float]:
    """The factor of the learning rate of each weight, trained or not.

    `decay ** (depth + 1 - layer)`: the embeddings are layer 0, `encoder_block_i` is layer i + 1,
    and all above the last block is layer depth + 1, with factor 1.

    Args:
        model: A `ViT`, a model with its layers, or an objective around a ViT: the layers are those
            of the ViT, not of a deeper teacher or decoder.
        decay: In (0, 1].

    Returns:
        Path of a weight -> factor.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1]. Received: decay={decay!r}")
    paths = [v.path for v in model.weights]
    trained = [v.path for v in getattr(model, "vit", model).weights]
    blocks = [int(match[1]) for match in map(BLOCK.search, trained) if match]
    if not blocks:
        raise ValueError(f"model must have encoder blocks. Received: model={model.name!r}")
    top = max(blocks) + 2
    return {path: decay ** (top - _layer(path, top)) for path in paths}


@functools.cache
def with_layer_factors(optimizer: Any) -> Any:
    """The Keras optimizer class, with a learning rate for each weight.

    Returns:
        A subclass that takes one more argument, `factors`: path of a weight -> factor.
    """
    # On torch, Keras replaces it with a class that updates many weights at once.
    concrete = type(optimizer.__new__(optimizer))
    return type(f"LayerDecay{optimizer.__name__}", (LayerFactors, concrete), {})


class LayerFactors:
    """Multiplies the learning rate, and with it the weight decay, weight by weight."""

    def __init__(self, factors, **kwargs):
        super().__init__(**kwargs)
        self.factors = dict(factors)

    def update_step(self, gradient, variable, learning_rate):
        learning_rate = learning_rate * self._factor(variable)
        self._decay(variable, learning_rate)
        super().update_step(gradient, variable, learning_rate)

    def _parallel_update_step(self, grads, variables, learning_rate):
        """What torch calls instead of `update_step`: all weights of one factor together."""
        groups = {}
        for grad, variable in zip(grads, variables, strict=True):
            group = groups.setdefault(self._factor(variable), ([], []))
            group[0].append(grad)
            group[1].append(variable)
        for factor, (grads, variables) in groups.items():
            for variable in variables:
                self._decay(variable, learning_rate * factor)
            super()._parallel_update_step(grads, variables, learning_rate * factor)

    def _apply_weight_decay(self, variables):
        """Does nothing. Keras would decay all weights at one rate; see `_decay`."""

    def _decay(self, variable, learning_rate):
        if self.weight_decay and self._use_weight_decay(variable):
            rate = ops.cast(learning_rate * self.weight_decay, variable.dtype)
            self.assign_sub(variable, variable * rate)

    def _factor(self, variable):
        # TensorFlow passes its own variable, which has no path.
        return self.factors[self._trainable_variables[self._get_variable_index(variable)].path]

    def get_config(self):
        return {**super().get_config(), "factors": dict(self.factors)}


def _layer(path: str, top: int) -> int:
    block = BLOCK.search(path)
    if block:
        return min(int(block[1]) + 1, top)  # a teacher may have more of them
    return 0 if EMBEDDING.search(path) else top

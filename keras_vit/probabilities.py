"""From logits to probabilities: the one place that says which function, and computes it."""

from typing import Any

import numpy as np

from keras_vit.config import ViTConfig

FUNCTIONS = ("softmax", "sigmoid")
"""The functions from logits to probabilities."""


def probability_function(config: ViTConfig) -> str:
    """The function of a model: sigmoid if the config says so or for one logit, else softmax.

    The softmax of one logit is 1 for every image. Its sigmoid is the probability of the class that
    `keras.losses.BinaryCrossentropy(from_logits=True)` calls 1.
    """
    one = config.num_classes == 1
    return "sigmoid" if one or config.classifier_activation == "sigmoid" else "softmax"


def chosen_function(config: ViTConfig, activation: Any) -> str:
    """The function that an argument `activation` names, or if it is None that of the model."""
    if activation not in (None, *FUNCTIONS):
        known = ", ".join(map(repr, (None, *FUNCTIONS)))
        raise ValueError(f"activation must be one of {known}. Received: activation={activation!r}")
    if activation == "softmax" and config.num_classes == 1:
        raise ValueError(
            "activation must be 'sigmoid' or None for num_classes=1: the softmax of one logit is 1 "
            "for every image. Received: activation='softmax'"
        )
    return activation or probability_function(config)


def probabilities_of(logits: Any, function: str) -> np.ndarray:
    """Probabilities `(B, K)` in float32 from logits `(B, K)`.

    Args:
        logits: The logits.
        function: One of `FUNCTIONS`.
    """
    logits = np.asarray(logits, "float64")
    if function == "sigmoid":
        found = 0.5 * (1 + np.tanh(logits / 2))  # which does not overflow
    else:
        raised = np.exp(logits - logits.max(-1, keepdims=True))
        found = raised / raised.sum(-1, keepdims=True)
    return found.astype("float32")

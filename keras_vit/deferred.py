"""Models whose weights are initialized from a file instead of by an initializer.

Keras draws random numbers for every weight of a new model. Inside `deferred`, weights get a shape
and no value, so reading a model's shapes or filling it from a file costs no random numbers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state  # Keras has no public name for it

WAITING = "uninitialized_variables"


class Deferred:
    """The variables created inside `deferred`."""

    def __init__(self) -> None:
        self.variables: list[Any] = []

    def fill(self, variable: Any, value: Any) -> None:
        """Initializes a variable with an array.

        Args:
            variable: One of `variables` that has no value yet.
            value: An array of its shape.
        """
        if tuple(value.shape) != tuple(variable.shape):
            raise ValueError(
                f"value must have the shape {tuple(variable.shape)} of {variable.path!r}. "
                f"Received: value.shape={tuple(value.shape)}"
            )
        variable._initializer = lambda shape, dtype: keras.ops.convert_to_tensor(value, dtype)
        variable._deferred_initialize()

    def initialize_rest(self) -> None:
        """Runs the initializer of every variable that was not filled."""
        for variable in self.variables:
            if variable._value is None:
                variable._deferred_initialize()


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """A scope that builds a model without initializing its weights.

    Before the model is called, every variable must be filled, or initialized by
    `Deferred.initialize_rest`. If only the shapes are needed, neither is necessary.

    Example:

    >>> with deferred() as weights:
    ...     model = ViT(config)
    >>> for weight in model.weights:
    ...     weights.fill(weight, arrays[weight.path])
    >>> weights.initialize_rest()
    """
    weights = Deferred()
    before = list(global_state.get_global_attribute(WAITING, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield weights
        weights.variables += global_state.get_global_attribute(WAITING, [])[len(before) :]
    finally:
        # Otherwise Keras would initialize them at the end of the next scope.
        global_state.set_global_attribute(WAITING, before)

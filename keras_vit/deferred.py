"""Models whose weights get their first value from a file, and not from an initializer.

Keras draws random numbers for every weight of a new model. Inside `deferred`, weights get a shape
and no value, so that a model can be asked for its shapes, or filled from a file, at no cost.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state  # Keras has no public name for it

WAITING = "uninitialized_variables"


class Deferred:
    """The variables that were made inside `deferred`, and how they get their values."""

    def __init__(self) -> None:
        self.variables: list[Any] = []

    def fill(self, variable: Any, value: Any) -> None:
        """Gives a variable its first value.

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
        """Gives every variable that was not filled the value that Keras would have given it."""
        for variable in self.variables:
            if variable._value is None:
                variable._deferred_initialize()


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """A scope for building a model without values.

    After it, every variable must be filled, or left to `Deferred.initialize_rest`, before the model
    is called; a model that is only asked for its shapes can be dropped as it is.

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
        # Else Keras would initialize them at the end of another scope.
        global_state.set_global_attribute(WAITING, before)

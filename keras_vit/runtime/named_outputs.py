"""What the runtimes of files share that return all outputs by name, for any number of images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.runtime.base import Runtime

AT_ONCE = 32
"""Images of a call of the engine."""


class NamedOutputsRuntime(Runtime):
    """A file that takes images and returns several outputs at once.

    Attributes:
        shapes: The shape of each output by its name, the batch first.
        at_once: Images of a call of the engine. It is 1 for a file in which the images of a call
            change each other's outputs, so that no output depends on how images were joined.
    """

    shapes: Mapping[str, Sequence[Any]]
    at_once: int = AT_ONCE

    def run(self, images: Any) -> dict[str, np.ndarray]:
        """All outputs of the file by name, for images of its dtype."""
        self._check_raw(images)
        return self._outputs(images)

    def _outputs(self, images: Any) -> dict[str, np.ndarray]:
        size = self.at_once
        parts = [self._compute(images[i : i + size]) for i in range(0, len(images), size)]
        if not parts:
            parts = [[np.zeros((0, *shape[1:]), "float32") for shape in self.shapes.values()]]
        return dict(zip(self.shapes, map(np.concatenate, zip(*parts, strict=True)), strict=True))

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        return self._outputs(images)

    def _compute(self, images: Any) -> list[np.ndarray]:
        """The outputs of a batch, in the order of `shapes`."""
        raise NotImplementedError

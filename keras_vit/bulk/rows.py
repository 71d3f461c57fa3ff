"""What a model says of one image file, and what a run says of itself."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PROBABILITIES, FEATURES = "probabilities", "features"


class Row(NamedTuple):
    """The result for one image file.

    Attributes:
        image: The path, or a name without a file.
        values: Probabilities `(K,)` or features `(D,)` in float32; None after an error.
        error: Why there are none.
    """

    image: str
    values: np.ndarray | None
    error: str | None = None


class Score(NamedTuple):
    """A class and its probability; the label is the number if the model has no names."""

    number: int
    label: str
    score: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        done: Images that are finished, errors included.
        total: All images.
        failed: The rows with an error since the last report.
    """

    done: int
    total: int
    failed: tuple[Row, ...] = ()


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run has written.

    Attributes:
        path: The file.
        images: Rows in it.
        failed: Rows with an error.
        resumed: Rows that a killed run had computed before.
        seconds: Time of this run, without finding the files and opening the model.
    """

    path: Path
    images: int
    failed: int
    resumed: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        """Images of this run a second."""
        return (self.images - self.resumed) / max(self.seconds, 1e-9)


def best_classes(
    probabilities: np.ndarray, labels: Sequence[str] | None, top_k: int
) -> list[Score]:
    """The `top_k` best classes of probabilities `(K,)`, the best one first."""
    order: list[int] = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
    names = [str(i) for i in order] if labels is None else [labels[i] for i in order]
    return [Score(i, name, float(probabilities[i])) for i, name in zip(order, names, strict=True)]

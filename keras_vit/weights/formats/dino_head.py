"""The projection head in "full checkpoints" of facebookresearch/dino.

Our names are those of `keras_vit.train.objectives.dino_head.DINOHead`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Header, Pair, Row, Shape
from keras_vit.weights.formats.torch_names import MATRIX, linear

GAIN = Layout("k -> k 1")


@dataclasses.dataclass(frozen=True)
class Head:
    """What a file holds of a head."""

    sizes: Mapping[str, Any]
    """Its sizes, as arguments of `DINO`."""
    shapes: Mapping[str, Shape]
    """Shapes of our weights by name."""
    rows: tuple[Row, ...]
    """The table of names."""


def read_head(header: Header) -> Head | None:
    """Reads from a header what there is of a head; None if there is none."""
    if "head.last_layer.weight_v" not in header.shapes:
        return None
    prototypes, bottleneck = header.shape("head.last_layer.weight_v", 2)
    hidden, width = header.shape("head.mlp.0.weight", 2)
    widths = (width, hidden, hidden, bottleneck)
    shapes: dict[str, Shape] = {"kernel": (bottleneck, prototypes), "gain": (prototypes,)}
    for i in range(3):
        shapes[f"dense_{i}/kernel"] = widths[i : i + 2]
        shapes[f"dense_{i}/bias"] = widths[i + 1 : i + 2]
    return Head(
        sizes={
            "num_prototypes": prototypes,
            "hidden_dim": hidden,
            "bottleneck_dim": bottleneck,
        },
        shapes=shapes,
        rows=tuple(_rows()),
    )


def _rows() -> Iterator[Row]:
    for i in range(3):
        yield from linear(f"head.mlp.{2 * i}", f"dense_{i}")  # GELUs have the odd numbers
    yield Pair("head.last_layer.weight_v", ("kernel",), MATRIX)
    yield Pair("head.last_layer.weight_g", ("gain",), GAIN)

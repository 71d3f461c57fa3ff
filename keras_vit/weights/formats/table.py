"""What a format is: names that betray it, a reading of its config, and a table of names.

A format pairs each weight of ours with an array of its own. The same table loads and saves.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout

Shape = tuple[int, ...]

# Widths of published models whose heads are not 64 wide, all with 16 of them: So400m (arXiv
# 2305.13035), H (2010.11929), g and G (2106.04560), e (2209.06794).
WIDE_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One array of the source, and the weights of ours that it holds.

    Several weights of ours lie behind one another on its first axis, or with `stack` are the
    entries of a new first axis.
    """

    source: str
    ours: tuple[str, ...]
    layout: Layout = Layout("")
    stack: bool = False

    def source_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape the source's array has where ours have `shapes`."""
        first, *rest = self.layout.source_shape(shapes[self.ours[0]])
        count = len(self.ours)
        return (count, first, *rest) if self.stack else (count * first, *rest)

    def read(self, array: np.ndarray, shapes: Mapping[str, Shape]) -> Iterator:
        """Our weights in the source's array: pairs of path and value."""
        parts = array if self.stack else np.split(array, len(self.ours))
        for path, part in zip(self.ours, parts, strict=True):
            yield path, self.layout.to_ours(part, shapes[path])

    def write(self, weights: Callable[[str], np.ndarray]) -> np.ndarray:
        """The source's array from our weights."""
        parts = [self.layout.to_source(weights(path)) for path in self.ours]
        if self.stack:
            return np.stack(parts)
        return np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0])


@dataclasses.dataclass(frozen=True)
class Derived:
    """A weight of ours that is computed from arrays of the source, and cannot be written back."""

    ours: str
    sources: Mapping[str, Shape]
    compute: Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True)
class Empty:
    """An array of the source that never holds a number."""

    source: str
    shape: Shape


Row = Pair | Derived | Empty


@dataclasses.dataclass(frozen=True)
class Header:
    """What a checkpoint says before its arrays are read."""

    shapes: Mapping[str, Shape]
    """Shapes by name, without the prefix of the format that reads it."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The `config.json` beside the weights."""
    pixels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The `preprocessor_config.json` beside the weights."""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the config as the caller gave them."""

    def has(self, pattern: str) -> bool:
        """Whether a name matches from its first letter on."""
        return any(re.match(pattern, name) for name in self.shapes)

    def count(self, pattern: str) -> int:
        """How many numbers the pattern's group takes: the depth of a stack of blocks."""
        found = (re.match(pattern, name) for name in self.shapes)
        return len({match[1] for match in found if match})

    def shape(self, name: str, rank: int) -> Shape:
        """The shape of an array that the config cannot be read without."""
        shape = self.shapes.get(name)
        if shape is None or len(shape) != rank or 0 in shape:
            raise ValueError(
                f"source must hold {name!r} with {rank} axes. Received: "
                + (f"an array of shape {shape}" if shape is not None else "no such array")
            )
        return shape

    def unstated(self, names: Iterable[str], stated: Mapping[str, Any]) -> set[str]:
        """Those of the fields that neither the caller nor the source states."""
        return {name for name in names if self.given.get(name) is None and name not in stated}

    def heads(self, width: int, stated: int | None = None) -> int:
        """Attention heads: given, stated by the source, or as published for this width."""
        heads = self.given.get("num_heads") or stated or WIDE_HEADS.get(width)
        if heads is not None and (type(heads) is not int or heads < 1):
            raise ValueError(f"num_heads must be a positive int. Received: num_heads={heads!r}")
        if heads is None and width % 64:
            raise ValueError(
                "num_heads must be given where no config.json states it and width is not a "
                f"multiple of 64. Received: num_heads=None, width={width}"
            )
        return heads or width // 64


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a format reads in a header."""

    fields: dict[str, Any]
    """Fields of the `ViTConfig` that the checkpoint was made with."""
    style: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How this file spells its names: keyword arguments of the format's table."""
    new_head: bool = False
    """Whether the checkpoint's head cannot be used."""
    assumed: tuple[str, ...] = ()
    """Fields that decide the numerics and that nothing in the checkpoint states."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One source of checkpoints.

    Attributes:
        name: What `save_pretrained(format=...)` calls it.
        mark: A pattern of a name that only this source has; its group `prefix` is what stands
            before all its names.
        written: The table of the file we write, where it is not `pairs(config)`.
        needs: Patterns of which one must match too, where another source has the same mark.
        read: From a header to the config.
        pairs: From a config, and a style, to the table of names.
        dropped: Patterns of arrays that a model does not need, and why.
        refused: Patterns of arrays that show an architecture we do not have, and what it is.
        writes: Values a config must have in certain fields to be expressed in this format; None
            where we only read it.
        complaints: What else keeps a config from being expressed.
        config_json: What stands in `config.json` beside the weights, for formats of folders.
        extra_json: Other JSON files beside it.
        suffix: Of the file.
    """

    name: str
    mark: str
    read: Callable[[Header], Reading]
    pairs: Callable[..., Iterable[Row]]
    written: Callable[[ViTConfig], Iterable[Row]] | None = None
    needs: tuple[str, ...] = ()
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, tuple] | None = None
    complaints: Callable[[ViTConfig], Iterable[str]] = lambda config: ()
    config_json: Callable[[ViTConfig], dict] | None = None
    extra_json: Mapping[str, Callable[[ViTConfig], dict]] = dataclasses.field(default_factory=dict)
    suffix: str = ".safetensors"

    def prefix(self, names: Iterable[str]) -> str | None:
        """What stands before this format's names, or None where it is another's file."""
        names = list(names)
        found = (re.fullmatch(self.mark, name) for name in names)
        prefixes = [match["prefix"] for match in found if match]
        for prefix in sorted(set(prefixes), key=len):
            rest = [name.removeprefix(prefix) for name in names]
            if not self.needs or any(re.match(p, name) for p in self.needs for name in rest):
                return prefix
        return None


def table_grid(
    rows: int, prefixes: Iterable[int], patch: Shape, stated: Any = None, given: Any = None
) -> tuple[tuple[int, int], int]:
    """The grid of a position table, and how many of its rows stand before the patches.

    Args:
        rows: Rows of the table.
        prefixes: How many there can be before the patches; names say it, not the count.
        patch: Patch height and width.
        stated: The image size the source states, if any.
        given: The image size the caller wants, which is believed where the count is no square.
    """
    prefixes = list(prefixes)
    grids = []
    for size in (stated, given):
        height, width = (size, size) if isinstance(size, int) else (size or (0, 0))
        grids.append((height // patch[0], width // patch[1]))

    def fits(grid: tuple[int, int]) -> list[int]:
        return [p for p in prefixes if rows > p and grid[0] * grid[1] == rows - p]

    sides = [math.isqrt(rows - p) for p in prefixes if rows > p]
    squares = [(side, side) for side in sides]
    for grid in (grids[0], *squares, grids[1]):
        if fits(grid):
            return grid, fits(grid)[0]
    raise ValueError(
        "image_size must be the checkpoint's own where its position table is no square grid, or be "
        f"resized afterwards with model.resized. Received: image_size={given!r}, a table of {rows} "
        f"rows, of which {' or '.join(map(str, prefixes))} stand before the patches"
    )

"""How a format is described: the names that identify it, how it states a config, a table of names.

A row of the table pairs weights of ours with arrays of the source. The same table loads and saves.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]

# Published models with 16 heads that are not 64 wide, by width: So400m (arXiv 2305.13035),
# H (2010.11929), g and G (2106.04560), e (2209.06794).
WIDE_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One array of the source, and the weights of ours that it holds.

    Several weights are concatenated on its first axis, or with `stack` stacked on a new first axis.
    """

    source: str
    paths: tuple[str, ...]
    layout: Layout = Layout("")
    stack: bool = False

    def source_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The source's shape, given the shapes of our weights."""
        first, *rest = self.layout.source_shape(shapes[self.paths[0]])
        count = len(self.paths)
        shape = (count, first, *rest) if self.stack else (count * first, *rest)
        return {self.source: shape}

    def to_ours(self, arrays: Arrays, shapes: Mapping[str, Shape]) -> Iterator:
        """Our weights, as pairs of path and value."""
        array = arrays[self.source]
        parts = array if self.stack else np.split(array, len(self.paths))
        for path, part in zip(self.paths, parts, strict=True):
            yield path, self.layout.to_ours(part, shapes[path])

    def to_source(self, weight: Callable[[str], np.ndarray]) -> np.ndarray:
        """The source's array from our weights."""
        parts = [self.layout.to_source(weight(path)) for path in self.paths]
        return np.stack(parts) if self.stack else np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Derived:
    """A weight of ours that is computed from arrays of the source. It cannot be written back."""

    path: str
    sources: Mapping[str, Shape]
    compute: Callable[..., np.ndarray]

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def source_shapes(self, shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
        return self.sources

    def to_ours(self, arrays: Arrays, shapes: Mapping[str, Shape]) -> Iterator:
        value = self.compute(*(arrays[name] for name in self.sources))
        yield self.path, value.reshape(shapes[self.path])


@dataclasses.dataclass(frozen=True)
class Empty:
    """An array of the source that holds nothing: without elements, or of zeros where written."""

    source: str
    shape: Shape
    paths: tuple[str, ...] = ()

    def source_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {self.source: self.shape}

    def to_ours(self, arrays: Arrays, shapes: Mapping[str, Shape]) -> Iterator:
        return iter(())

    def to_source(self, weight: Callable[[str], np.ndarray]) -> np.ndarray:
        return np.zeros(self.shape, np.float32)


@dataclasses.dataclass(frozen=True)
class Checked:
    """An array of the source that must have known values, and that no weight of ours holds."""

    source: str
    shape: Shape
    check: Callable[[np.ndarray], None]
    """Raises `ValueError` for other values."""
    paths: tuple[str, ...] = ()

    def source_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {self.source: self.shape}

    def to_ours(self, arrays: Arrays, shapes: Mapping[str, Shape]) -> Iterator:
        self.check(arrays[self.source])
        return iter(())


Row = Pair | Derived | Empty | Checked


@dataclasses.dataclass(frozen=True)
class Header:
    """What is known of a checkpoint before its arrays are read."""

    shapes: Mapping[str, Shape]
    """Shapes by name, without the format's prefix."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The `config.json` beside the weights."""
    pixels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the files beside the weights state of an image's pixels."""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the config that the caller passed."""

    def has(self, pattern: str) -> bool:
        """Whether the start of a name matches."""
        return any(re.match(pattern, name) for name in self.shapes)

    def count(self, pattern: str) -> int:
        """How many values the pattern's group takes, for example the number of blocks."""
        found = (re.match(pattern, name) for name in self.shapes)
        return len({match[1] for match in found if match})

    def shape(self, name: str, rank: int) -> Shape:
        """The shape of a required array."""
        shape = self.shapes.get(name)
        if shape is None or len(shape) != rank or 0 in shape:
            raise ValueError(
                f"source must hold {name!r} with {rank} axes. Received: "
                + (f"an array of shape {shape}" if shape is not None else "no such array")
            )
        return shape

    def size(self, name: str, axis: int, default: Any) -> Any:
        """One axis of an optional array."""
        shape = self.shapes.get(name, ())
        return shape[axis] if -len(shape) <= axis < len(shape) else default

    def unstated(self, names: Iterable[str], stated: Mapping[str, Any]) -> set[str]:
        """The fields that neither the caller nor the source states."""
        return {name for name in names if self.given.get(name) is None and name not in stated}

    def heads(self, width: int, stated: int | None = None) -> int:
        """Attention heads: passed, stated by the source, or as published for this width."""
        heads = self.given.get("num_heads") or stated or WIDE_HEADS.get(width)
        if heads is not None and (type(heads) is not int or heads < 1):
            raise ValueError(f"num_heads must be a positive int. Received: num_heads={heads!r}")
        if heads is None and width % 64:
            raise ValueError(
                "num_heads must be given if no config.json states it and width is not a multiple "
                f"of 64. Received: num_heads=None, width={width}"
            )
        return heads or width // 64

    def table_size(
        self, rows: int, prefixes: Iterable[int], patch: Shape, stated: Any = None
    ) -> tuple[tuple[int, int], int]:
        """The image size of a position table, and how many of its rows precede the patches.

        Args:
            rows: Rows of the table.
            prefixes: How many rows may precede the patches, as the names of the arrays show.
            patch: Patch height and width.
            stated: The image size that the source states, if any. The caller's is used only if
                the number of patches is not a square.
        """
        given = self.given.get("image_size")
        sides = {p: math.isqrt(rows - p) for p in prefixes if rows > p}
        squares = [(side * patch[0], side * patch[1]) for side in sides.values()]
        for size in (stated, *squares, given):
            height, width = (size, size) if isinstance(size, int) else (size or (0, 0))
            for prefix in sides:
                if height // patch[0] * (width // patch[1]) == rows - prefix:
                    return (height, width), prefix
        raise ValueError(
            "image_size must be the checkpoint's own if its position table is not a square grid. "
            f"model.resized changes it afterwards. Received: image_size={given!r}, a table of "
            f"{rows} rows, {' or '.join(map(str, prefixes))} of them before the patches"
        )


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a format reads from a header."""

    fields: dict[str, Any]
    """Fields of the checkpoint's `ViTConfig`."""
    style: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How this file spells its names: keyword arguments of the format's `rows`."""
    assumed: tuple[str, ...] = ()
    """Fields that change the result and that nothing in the checkpoint states."""


class Limit(NamedTuple):
    """What a format requires of a config to be written."""

    holds: Callable[[ViTConfig], bool]
    text: str
    """The error if it does not hold, in which `{0}` is the config."""


STANDARD_HEADS = Limit(
    lambda c: c.num_heads * c.key_dim == c.width,
    "head_dim must be width / num_heads, it is {0.head_dim}",
)
CLASS_ROW = Limit(
    lambda c: c.class_token == c.class_row,
    "position_class_row must be True: the format's table has a row for the class token",
)
POOLS_ITS_TOKEN = Limit(
    lambda c: (c.pooling == "token") == c.class_token,
    "pooling must be 'token' with a class token and 'mean' without one",
)
POOLING_SIZES = Limit(
    lambda c: (
        not c.attention_pooling
        or (c.pooling_heads in (None, c.num_heads) and c.pooling_mlp_dim in (None, c.mlp_dim))
    ),
    "pooling_heads and pooling_mlp_dim must be None, they are {0.pooling_heads} and "
    "{0.pooling_mlp_dim}",
)
HAS_HEAD = Limit(
    lambda c: c.num_classes > 0,
    "num_classes must be greater than 0: the format's models have a head",
)

# What the paper's ViT has, and so the libraries' first models.
PLAIN: dict[str, tuple] = {
    "ignore_remainder": (False,),
    "stem": (None,),
    "block_norm": ("pre",),
    "norm": ("layer",),
    "qkv_bias": (True,),
    "dense_bias": (True,),
    "key_bias": (True,),
    "qk_norm": (False,),
    "attention_inner_norm": (False,),
    "score_scale": ("fixed",),
    "score_diagonal": (True,),
    "mlp": ("mlp",),
    "mlp_inner_norm": (False,),
    "layer_scale": (None,),
    "distillation_token": (False,),
    "num_registers": (0,),
    "patch_bias": (True,),
    "patch_shift": (False,),
    "patch_norm": (False,),
    "embedding_norm": (False,),
    "position_embedding": ("learned",),
    "final_norm": ("before_pooling",),
    "classifier_activation": (None,),
    "token_merging": (0,),
}


@dataclasses.dataclass(frozen=True)
class Format:
    """One source of checkpoints.

    Attributes:
        name: Its name in `save_pretrained(format=...)`.
        mark: A pattern of a name that only this source has. Its group `prefix` is the prefix of
            all names.
        needs: Patterns of which one must match too, if other sources have the same mark.
        read_config: From a header to the config.
        rows: From a config, and a style, to the table of names.
        rows_to_write: The table of the file that we write, if it is not `rows(config)`.
        dropped: Patterns of arrays that a model does not need, and the reason.
        refused: Patterns of arrays of an architecture that ViT cannot be, and its description.
        writable: Values that fields must have to be written in this format; None if it is
            read-only.
        limits: What else a config must fulfill to be written.
        json_files: The JSON files beside the weights by name, for formats that write folders.
        suffix: The suffix of the weight file.
        bare: Whether no file of this source has a config.json that states timm's architecture. A
            file that has one is timm's, even if the names are the same.
    """

    name: str
    mark: str
    read_config: Callable[[Header], Reading]
    rows: Callable[..., Iterable[Row]]
    rows_to_write: Callable[[ViTConfig], Iterable[Row]] | None = None
    needs: tuple[str, ...] = ()
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writable: Mapping[str, tuple] | None = None
    limits: tuple[Limit, ...] = ()
    json_files: Mapping[str, Callable[[ViTConfig], dict]] = dataclasses.field(default_factory=dict)
    suffix: str = ".safetensors"
    bare: bool = False

    def prefix(self, names: Iterable[str]) -> str | None:
        """The prefix of this format's names, or None if the names are another format's."""
        names = list(names)
        found = (re.fullmatch(self.mark, name) for name in names)
        for prefix in sorted({match["prefix"] for match in found if match}, key=len):
            rest = [name.removeprefix(prefix) for name in names]
            if not self.needs or any(re.match(p, name) for p in self.needs for name in rest):
                return prefix
        return None

    def unsupported(self, config: ViTConfig) -> Iterator[str]:
        """Why the format cannot express a config: the field, the rule and the value."""
        for name, values in (self.writable or {}).items():
            value = getattr(config, name)
            if not any(
                value == v and isinstance(value, bool) == isinstance(v, bool) for v in values
            ):
                yield f"{name} must be {' or '.join(map(repr, values))}, it is {value!r}"
        yield from (limit.text.format(config) for limit in self.limits if not limit.holds(config))


def per_channel(values: Any, channels: int) -> list[float]:
    """`pixel_mean` or `pixel_std` as other libraries state it: one number per channel."""
    return list(values) if isinstance(values, tuple) else [values] * channels

"""State dicts of timm's `NaFlexVit`, for images of one size.

NaFlex takes images of any size in one batch, and resamples its position table for each. A `ViT`
has one size: its table is resampled once, from the stored one, when the checkpoint is loaded. The
other arrays are those of timm's `VisionTransformer`, of which three have another shape or name.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.resample import resample_grid
from keras_vit.weights.formats import timm_config
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Derived, Format, Header, Pair, Reading, Row
from keras_vit.weights.formats.timm import timm_rows
from keras_vit.weights.formats.timm_raw import RAW
from keras_vit.weights.formats.timm_reading import read_timm
from keras_vit.weights.formats.vit_pytorch import patch_of

TABLE, ROWS, COLUMNS = "embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x"
RENAMED = ("cls_token", "reg_token", "patch_embed.proj.bias")


def read_naflex(header: Header) -> Reading:
    """The config: that of timm's `VisionTransformer` with the same weights at one image size."""
    width, pixels = header.shape("embeds.proj.weight", 2)
    # A patch size that was passed is the requested model's, unless the file's is no square.
    square = pixels == 3 * math.isqrt(pixels // 3) ** 2
    patch = patch_of(pixels, {} if square else header.given)
    grid = _stored_grid(header)
    stated = timm_config.stated_fields(header.config)
    keeps_aspect = stated.get("keeps_aspect", False)
    size = header.given.get("image_size") or stated.get("image_size")
    size = (size, size) if isinstance(size, int) else size
    if size is None:
        size = tuple(n * p for n, p in zip(grid, patch, strict=True))
    timm_names = {_naflex_name(name): name for name in RENAMED}
    shapes = {timm_names.get(name, name): shape for name, shape in header.shapes.items()}
    shapes["patch_embed.proj.weight"] = (width, pixels // (patch[0] * patch[1]), *patch)
    count = size[0] // patch[0] * (size[1] // patch[1])
    shapes["pos_embed"] = (1, count, width)
    given = {**header.given, "image_size": tuple(size)}
    reading = read_timm(dataclasses.replace(header, shapes=shapes, given=given))
    fields = {**reading.fields, "image_size": tuple(size)}
    fields.pop("keeps_aspect", None)
    fields["interpolation"] = header.given.get("interpolation") or fields["interpolation"]
    style = {"grid": grid, "factorized": ROWS in header.shapes, "keeps_aspect": keeps_aspect}
    return dataclasses.replace(reading, fields=fields, style={**reading.style, **style})


def naflex_rows(
    config: ViTConfig,
    grid: tuple[int, int],
    factorized: bool,
    keeps_aspect: bool,
    **style: Any,
) -> Iterator[Row]:
    """The table of names.

    Args:
        config: The config.
        grid: Rows and columns of the stored position table.
        factorized: Whether it is the sum of a table of rows and one of columns.
        keeps_aspect: Whether it is resampled to a square, of which other images use a part.
        **style: Keyword arguments of `timm_rows`.
    """
    for row in timm_rows(config, **style):
        source = getattr(row, "source", None)
        if source == "patch_embed.proj.weight":
            yield Pair("embeds.proj.weight", row.paths, Layout("h w c d -> d (h w c)"))
        elif source == "pos_embed":
            yield _table(config, grid, factorized, keeps_aspect)
        elif isinstance(row, Pair):
            yield dataclasses.replace(row, source=_naflex_name(row.source))
        else:
            yield row


def _table(config: ViTConfig, grid, factorized: bool, keeps_aspect: bool) -> Derived:
    (rows, columns), width = grid, config.width
    side = max(config.grid)
    square = (side, side) if keeps_aspect else config.grid

    def resampled(*tables):
        table = tables[0]
        if factorized:
            table = tables[0][0, :, None] + tables[1][0, None]  # (rows, columns, D)
        table = table.reshape(rows * columns, width).astype("float64")
        table = resample_grid(table, grid, square, config.interpolation)
        height, length = config.grid
        return table.reshape(*square, width)[:height, :length].astype(np.float32)

    sources: Mapping[str, tuple] = {TABLE: (1, rows, columns, width)}
    if factorized:
        sources = {ROWS: (1, rows, width), COLUMNS: (1, columns, width)}
    return Derived("position_embedding/table", sources, resampled)


def _stored_grid(header: Header) -> tuple[int, int]:
    if ROWS in header.shapes:
        return header.shape(ROWS, 3)[1], header.shape(COLUMNS, 3)[1]
    _, rows, columns, _ = header.shape(TABLE, 4)
    return rows, columns


def _naflex_name(name: str) -> str:
    return f"embeds.{name.removeprefix('patch_embed.')}" if name in RENAMED else name


TIMM_NAFLEX: Format = dataclasses.replace(
    RAW,
    name="timm_naflex",
    mark=r"(?P<prefix>.*)embeds\.proj\.weight",
    read_config=read_naflex,
    rows=naflex_rows,
    needs=(r"blocks\.0\.attn\.qkv\.weight$",),
    bare=False,
)

"""Arrays of relative positions: BEiT's table, in timm, transformers and raw files; timm's MLP.

Models that share one table or one MLP in all blocks are read too. Each block gets a copy, as when
BEiT's own code fine-tunes such a model; where a block has a table of its own as well, their sum.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Derived, Header, Pair, Row, Shape
from keras_vit.weights.formats.torch_names import MATRIX

TABLE = "relative_position_bias_table"
# The parts of timm's MLP, and ours.
MLP = {
    "mlp.fc1.weight": "hidden_kernel",
    "mlp.fc1.bias": "hidden_bias",
    "mlp.fc2.weight": "bias_kernel",
    "mlp.fc2.bias": "bias_bias",
}
INDEX = r"(.*\.)?relative_position_index$"
"""A pattern of arrays that are not needed: which offset each pair of tokens has."""
INDEX_REASON = "the index of the relative positions, which follows from the grid"


def relative_fields(
    header: Header, own: str, shared: str, patch: Shape, stated: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of the config that arrays of relative positions show; none without such arrays.

    Args:
        header: The checkpoint's.
        own: What is in front of the names of the first block's arrays.
        shared: What is in front of the names of the arrays that all blocks share.
        patch: Patch height and width.
        stated: The fields that the source states; of these `image_size` is used.

    Returns:
        `position_embedding` without a position table, and with a table of relative positions
        `image_size`.
    """
    for prefix in (own, shared):
        if f"{prefix}{TABLE}" in header.shapes:
            rows = header.shape(f"{prefix}{TABLE}", 2)[0]
            size = _image_size(header, rows, patch, stated.get("image_size"))
            return {"position_embedding": "relative_bias", "image_size": size}
        if f"{prefix}mlp.fc1.weight" in header.shapes:
            width = header.shape(f"{prefix}mlp.fc1.weight", 2)[0]
            return {"position_embedding": "relative_mlp", "relative_mlp_dim": width}
    return {}


def with_table(relative: Mapping[str, Any], has_table: bool) -> str:
    """The `position_embedding` of a model with these fields, and maybe a learned table too."""
    words = ["learned"] if has_table else []
    words += [relative["position_embedding"]] if relative else []
    return "+".join(words) or "none"


def _image_size(header: Header, rows: int, patch: Shape, stated: Any) -> tuple[int, int]:
    """The image size of a table: a square, the stated one, or the one that was passed."""
    given = header.given.get("image_size")
    for size in (stated, given):
        sides = (size, size) if isinstance(size, int) else size or (0, 0)
        height, width = (side // p for side, p in zip(sides, patch, strict=True))
        if min(height, width) > 0 and (2 * height - 1) * (2 * width - 1) in (rows, rows - 3):
            return height * patch[0], width * patch[1]
    for offsets in (rows, rows - 3):  # both are never the square of an odd number
        side = math.isqrt(max(offsets, 0))
        if side**2 == offsets and side % 2:
            return (side + 1) // 2 * patch[0], (side + 1) // 2 * patch[1]
    raise ValueError(
        "image_size must be the checkpoint's own if its table of relative positions is not one of "
        "a square grid. model.resized changes it afterwards. "
        f"Received: image_size={given!r}, a table of {rows} rows"
    )


def relative_rows(config: ViTConfig, index: int, own: str, shared: str, held: str) -> Iterator[Row]:
    """The rows of one block.

    Args:
        config: The config.
        index: The block's.
        own: What is in front of the names of this block's arrays.
        shared: What is in front of the names of the arrays that all blocks share.
        held: Which of them the file has: "own", "shared" or "both".
    """
    ours = f"encoder_block_{index}/attention/relative_positions"
    heads, dim = config.num_heads, config.relative_mlp_dim
    prefixes = {"own": (own,), "shared": (shared,), "both": (own, shared)}[held]
    if config.attention_positions == "relative_bias":
        (rows, columns), prefix = config.grid, config.num_prefix_tokens
        shape = ((2 * rows - 1) * (2 * columns - 1) + 3 * prefix, heads)
        if held == "own":
            yield Pair(f"{own}{TABLE}", (f"{ours}/table",))
        else:
            sources = {f"{name}{TABLE}": shape for name in prefixes}
            yield Derived(f"{ours}/table", sources, lambda *tables: np.sum(tables, axis=0))
    elif config.attention_positions == "relative_mlp":
        shapes = {"hidden_kernel": (dim, 2), "hidden_bias": (dim,)}
        shapes |= {"bias_kernel": (heads, dim), "bias_bias": (heads,)}
        for theirs, name in MLP.items():
            layout = MATRIX if name.endswith("kernel") else Layout("")
            if held == "own":
                yield Pair(f"{own}{theirs}", (f"{ours}/{name}",), layout)
            else:
                yield Derived(f"{ours}/{name}", {f"{shared}{theirs}": shapes[name]}, np.transpose)


def held(header: Header, own: str, shared: str) -> str:
    """Which arrays of relative positions a file has: "own", "shared" or "both"."""
    found = [
        name
        for name, prefix in (("own", own), ("shared", shared))
        if any(f"{prefix}{part}" in header.shapes for part in (TABLE, *MLP))
    ]
    return "both" if len(found) == 2 else "".join(found) or "own"

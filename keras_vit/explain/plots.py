"""The arrays of this package as figures, fit for print and for every eye.

Each function returns a `matplotlib.figure.Figure` of its own, which pyplot does not know:
`figure.savefig("rollout.png")` keeps it. A picture is a path, a PIL image, or an array `(H, W)` or
`(H, W, C)` of pixels from 0 to 255; it is preprocessed here. Maps lie on it in its own resolution,
over the part that the model sees; what the model does not see is pale.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.explain import attention, embeddings, tokens
from keras_vit.explain.charts import by_depth, tiled
from keras_vit.explain.class_plots import plot_attention_gradient, plot_grad_cam
from keras_vit.explain.panels import (
    CMAP,
    Picture,
    Scale,
    Sheet,
    color_bar,
    columns_for,
    ends,
    open_picture,
    open_pictures,
    top,
)
from keras_vit.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "plot_attention_distance",
    "plot_attention_entropy",
    "plot_attention_gradient",
    "plot_attention_maps",
    "plot_attention_rollout",
    "plot_class_token_maps",
    "plot_grad_cam",
    "plot_patch_filters",
    "plot_patch_pca",
    "plot_position_similarity",
    "plot_region_similarity",
]

MOST_CELLS = 14
"""Maps of position similarity along each axis; of a larger grid every second one, or fewer."""


# -- attention


def plot_attention_maps(
    model: ViT, picture: Any, layer: int = -1, *, query: tuple[int, int] | None = None
) -> "Figure":
    """What one token attends to in one block, a panel a head.

    Args:
        model: A `ViT`.
        picture: A path, a PIL image or an array of pixels.
        layer: The block, counted from 0 or from the end with negatives.
        query: Row and column of a patch, which is framed; None means the class token, or the mean
            over the pooled tokens where there is none.

    Returns:
        A figure. Where tokens stand in front of the patches, a panel says how much the patches get.
    """
    tokens.check_model(model)
    config = model.config
    index = tokens.checked_block("layer", layer, config.depth)
    query = None if query is None else _checked_query(query, config)
    seen = open_picture(picture, config)
    if query is None:
        maps = attention.class_token_maps(model, seen.images, index)[0, 0]  # (h, rows, columns)
    else:
        token = config.num_prefix_tokens + query[0] * config.grid[1] + query[1]
        drawn = attention.attention_maps(model, seen.images, index)[0, 0, :, token]  # (h, T)
        maps = drawn[:, config.num_prefix_tokens :].reshape(-1, *config.grid)
    maps = 100 * maps
    columns = columns_for(len(maps), seen.size)
    rows = -(-len(maps) // columns)
    who = "the class token" if config.class_token else _pooled(config)
    title = f"Attention of {who if query is None else f'patch {query}'}; block {index}"
    if config.num_prefix_tokens:
        title += " (in brackets: to all patches)"
    sheet = Sheet(rows, columns, seen.size, title)
    scale = Scale("attention to a patch (%, root scale)", 0.0, top(maps), root=True)
    for head, values in enumerate(maps):
        label = f"head {head}"
        if config.num_prefix_tokens:
            label += f" ({values.sum():.0f} %)"
        place = divmod(head, columns)
        sheet.draw(*place, seen, values, scale, label=label, mark=query)
    sheet.color_bar(scale)
    return sheet.figure


def plot_class_token_maps(
    model: ViT, picture: Any, layers: int | Sequence[int] | None = None
) -> "Figure":
    """What the class token attends to, or the mean over the pooled tokens without one.

    Args:
        model: A `ViT`.
        picture: A path, a PIL image or an array of pixels.
        layers: Blocks, counted from 0 or from the end with negatives; None means all.

    Returns:
        A figure with a row a block and a column a head. Colors mean the same in all panels.
    """
    tokens.check_model(model)
    config = model.config
    wanted = tokens.checked_layers(layers, config.depth)
    seen = open_picture(picture, config)
    maps = 100 * attention.class_token_maps(model, seen.images, wanted)[:, 0]
    who = "the class token" if config.class_token else _pooled(config)
    names = [f"block {i}" for i in wanted], [f"head {i}" for i in range(config.num_heads)]
    sheet = Sheet(
        len(wanted),
        config.num_heads,
        seen.size,
        f"Attention of {who}",
        labeled=False,
        named=names,
    )
    scale = Scale("attention to a patch (%, root scale)", 0.0, top(maps), root=True)
    for row, heads in enumerate(maps):
        for column, values in enumerate(heads):
            sheet.draw(row, column, seen, values, scale)
    sheet.color_bar(scale)
    return sheet.figure


def plot_attention_rollout(
    model: ViT, picture: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> "Figure":
    """What the head reads, followed back through all blocks to the patches.

    Args:
        model: A `ViT`.
        picture: A path, a PIL image or an array of pixels.
        head_fusion: How the heads become one: "mean", "max" or "min".
        discard_ratio: Share of the smallest weights that is left out, in [0, 1).

    Returns:
        A figure: the picture, and `rollout_map` on it.
    """
    tokens.check_model(model)
    seen = open_picture(picture, model.config)
    values = (
        100
        * attention.rollout_map(
            model, seen.images, head_fusion=head_fusion, discard_ratio=discard_ratio
        )[0]
    )
    title = f"Attention rollout, {head_fusion} of the heads"
    if discard_ratio:
        title += f", without the smallest {discard_ratio:.0%}"
    # From what is drawn least to most: rollouts differ little from patch to patch.
    scale = Scale("drawn from a patch (%)", *ends(values))
    sheet = Sheet(1, 2, seen.size, title)
    sheet.draw(0, 0, seen, label="picture")
    sheet.draw(0, 1, seen, values, scale, label=f"drawn by {_pooled(model.config)}")
    sheet.color_bar(scale)
    return sheet.figure


def plot_attention_distance(model: ViT, pictures: Any) -> "Figure":
    """How far the heads look, by depth: the paper's Fig. 7 (right).

    Args:
        model: A `ViT`.
        pictures: One picture or a sequence of them; some dozens make a steady figure.

    Returns:
        A figure with a dot a head. The dashed line is a head that looks everywhere alike.
    """
    tokens.check_model(model)
    config = model.config
    seen = open_pictures(pictures, config)
    values = attention.attention_distance(model, _batch(seen))
    everywhere = attention.patch_distances(config.grid, config.patch_size).mean()
    title = f"How far heads look, mean of {_count(seen)}"
    return by_depth(
        values, title, "mean attention distance (pixels)", everywhere, "all patches alike"
    )


def plot_attention_entropy(model: ViT, pictures: Any) -> "Figure":
    """How widely the heads look, by depth.

    Args:
        model: A `ViT`.
        pictures: One picture or a sequence of them.

    Returns:
        A figure with a dot a head. The dashed line is a head that looks at all tokens alike.
    """
    tokens.check_model(model)
    seen = open_pictures(pictures, model.config)
    values = attention.attention_entropy(model, _batch(seen))
    most = float(np.log(model.config.num_tokens))
    title = f"How widely heads look, mean of {_count(seen)}"
    return by_depth(values, title, "entropy of attention (nats)", most, "all tokens alike")


# -- embeddings


def plot_position_similarity(model: ViT) -> "Figure":
    """How alike the positions are: the paper's Fig. 7 (center).

    Args:
        model: A `ViT` with position embeddings.

    Returns:
        A figure with a map for each patch, which lies where the patch lies. Of a grid of more than
        14 rows or columns, every second patch has one, or fewer.
    """
    values = embeddings.position_similarity(model)  # (rows, columns, rows, columns)
    rows, columns = values.shape[:2]
    step = -(-max(rows, columns) // MOST_CELLS)
    cells = values[::step, ::step]
    title = "Cosine similarity of position embeddings"
    if step > 1:
        title += f", one of {step} patches each way"
    axis = tiled(cells, title, model.config.patch_size, bar=True)
    scale = Scale("cosine to the other positions", *ends(values))
    shown = axis.images[0]
    shown.set(cmap=CMAP, clim=(scale.low, scale.high))
    color_bar(axis, shown, scale.label)
    for put, n, size in (
        (axis.set_xticks, cells.shape[1], columns),
        (axis.set_yticks, cells.shape[0], rows),
    ):
        put([i * (size + 1) + (size - 1) / 2 for i in range(n)], [i * step for i in range(n)])
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    return axis.figure


def plot_patch_filters(model: ViT, count: int = 28) -> "Figure":
    """What the patch projection looks for: the paper's Fig. 7 (left).

    Args:
        model: A `ViT`.
        count: How many components; there may be fewer.

    Returns:
        A figure with the leading components first. One channel is gray, three are colors; others
        are drawn side by side, each in gray.
    """
    filters = embeddings.patch_filters(model, count)  # (count, P, P, C)
    channels = filters.shape[-1]
    title = f"Leading {len(filters)} components of the patch projection"
    height, width = model.config.patch_size
    if channels not in (1, 3):
        filters = np.moveaxis(filters, -1, 2).reshape(len(filters), height, channels * width, 1)
        title += f", {channels} channels side by side"
    across = min(7, len(filters))
    down = -(-len(filters) // across)
    cells = np.full((down * across, *filters.shape[1:3], 3), np.nan, "float32")
    cells[: len(filters)] = filters  # gray is repeated
    axis = tiled(cells.reshape(down, across, *cells.shape[1:]), title, (1, 1), bar=False)
    from matplotlib.patches import Rectangle  # where it is missing, `tiled` has said so

    for i in range(len(filters)):  # a white edge on white paper is still seen
        row, column = divmod(i, across)
        corner = column * (cells.shape[2] + 1) - 0.5, row * (height + 1) - 0.5
        axis.add_patch(
            Rectangle(corner, cells.shape[2], height, fill=False, edgecolor="0.6", linewidth=0.6)
        )
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel("each scaled to its own lowest (dark) and highest (bright) weight", size=9)
    return axis.figure


def plot_region_similarity(
    model: ViT, picture: Any, query: tuple[int, int] | None = None, *, block: int = -1
) -> "Figure":
    """Which regions look like one of them to the model.

    Args:
        model: A `ViT`.
        picture: A path, a PIL image or an array of pixels.
        query: Row and column of the patch to compare with, which is framed; None means the middle.
        block: Whose tokens, counted from 0 or from the end with negatives.

    Returns:
        A figure: the picture, and the cosines on it.
    """
    tokens.check_model(model)
    config = model.config
    index = tokens.checked_block("block", block, config.depth)
    if query is None:
        query = config.grid[0] // 2, config.grid[1] // 2
    query = _checked_query(query, config)
    seen = open_picture(picture, config)
    values = embeddings.region_similarity(model, seen.images, index)[0][query]
    scale = Scale("cosine of tokens", *ends(values))
    title = f"Regions like patch {query}, after block {index}"
    sheet = Sheet(1, 2, seen.size, title)
    sheet.draw(0, 0, seen, label="picture", mark=query, grid=config.grid)
    sheet.draw(0, 1, seen, values, scale, label="similarity to the framed patch", mark=query)
    sheet.color_bar(scale)
    return sheet.figure


def plot_patch_pca(model: ViT, pictures: Any, *, block: int = -1) -> "Figure":
    """The three main differences between patch tokens, as red, green and blue.

    Args:
        model: A `ViT`.
        pictures: One picture or a sequence of them: a color means the same in all.
        block: Whose tokens, counted from 0 or from the end with negatives.

    Returns:
        A figure with the pictures above and their components below.
    """
    tokens.check_model(model)
    index = tokens.checked_block("block", block, model.config.depth)
    seen = open_pictures(pictures, model.config)
    colors = embeddings.patch_pca(model, _batch(seen), index)
    title = f"Patch tokens after block {index}; red, green, blue: components 1, 2, 3"
    down, across = (1, 2) if len(seen) == 1 else (2, len(seen))
    sheet = Sheet(down, across, seen[0].size, title, labeled=False, bar=False)
    for i, (picture, values) in enumerate(zip(seen, colors, strict=True)):
        sheet.draw(0, i, picture)
        sheet.draw(*((0, 1) if down == 1 else (1, i)), picture, values)
    return sheet.figure


# -- what they share


def _checked_query(query: Any, config: ViTConfig) -> tuple[int, int]:
    rows, columns = config.grid
    pair = tuple(query) if isinstance(query, Sequence) else ()
    ints = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not ints or not (0 <= pair[0] < rows and 0 <= pair[1] < columns):
        raise ValueError(
            f"query must be the (row, column) of a patch, of {rows} rows and {columns} columns. "
            f"Received: query={query!r}"
        )
    return int(pair[0]), int(pair[1])


def _pooled(config: ViTConfig) -> str:
    """What the head reads."""
    if config.pooling == "token":
        return "the class token"
    every = config.pooling == "mean_all" and config.num_prefix_tokens
    return "all tokens, on average" if every else "all patches, on average"


def _batch(seen: Sequence[Picture]) -> np.ndarray:
    return np.concatenate([picture.images for picture in seen])


def _count(seen: Sequence[Picture]) -> str:
    return "1 picture" if len(seen) == 1 else f"{len(seen)} pictures"

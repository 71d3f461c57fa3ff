"""The arrays of this package as figures, in colors that are safe for color blindness and print.

Each function returns a `matplotlib.figure.Figure` that pyplot does not manage:
`figure.savefig("rollout.png")` saves it. An image is a path, a PIL image, or an array `(H, W)` or
`(H, W, C)` of pixels from 0 to 255; it is preprocessed here. Maps are drawn over the part of the
image that the model sees, at the image's own resolution; the rest of the image is pale.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.config import ViTConfig
from keras_vit.explain import attention, embeddings, gradients, tokens
from keras_vit.explain.charts import by_depth, tiled
from keras_vit.explain.panels import (
    CMAP,
    Scale,
    Sheet,
    SourceImage,
    color_bar,
    columns_for,
    ends,
    open_image,
    open_images,
    top,
)
from keras_vit.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 14
"""Most maps of position similarity along each axis; larger grids are subsampled."""


# -- attention


@takes_classifier
def plot_attention_maps(
    model: ViT, image: Any, layer: int = -1, *, query: tuple[int, int] | None = None
) -> "Figure":
    """Plots what one token attends to in one block, a panel per head.

    Args:
        model: A `ViT`.
        image: A path, a PIL image or an array of pixels.
        layer: Index of the block; negative ones count from the end.
        query: Row and column of a patch, which is framed; None means the class token, or the mean
            over the pooled tokens without one.

    Returns:
        A figure. With prefix tokens, each panel shows in brackets how much all patches get.
    """
    tokens.check_vit(model)
    config = model.config
    index = tokens.checked_block("layer", layer, config.depth)
    query = None if query is None else _checked_query(query, config)
    source = open_image(image, config)
    k = config.num_prefix_tokens
    if query is None:
        maps = attention.class_token_maps(model, source.images, index)[0, 0]  # (h, rows, columns)
    else:
        token = k + query[0] * config.grid[1] + query[1]
        weights = attention.attention_maps(model, source.images, index)[0, 0, :, token]  # (h, T)
        maps = weights[:, k:].reshape(-1, *config.grid)
    maps = 100 * maps
    title = f"Attention of {_class_token(config) if query is None else f'patch {query}'}"
    title += f"; block {index}" + (" (in brackets: to all patches)" if k else "")
    labels = [f"head {i}" + (f" ({maps[i].sum():.0f} %)" if k else "") for i in range(len(maps))]
    scale = Scale("attention to a patch (%, root scale)", 0.0, top(maps), root=True)
    return _map_panels(source, maps, labels, scale, title, plain=False, mark=query)


@takes_classifier
def plot_class_token_maps(
    model: ViT, image: Any, layers: int | Sequence[int] | None = None
) -> "Figure":
    """Plots what the class token attends to, or the mean over the pooled tokens without one.

    Args:
        model: A `ViT`.
        image: A path, a PIL image or an array of pixels.
        layers: One or more block indices; negative ones count from the end. None means all.

    Returns:
        A figure with a row per block and a column per head. All panels have the same color scale.
    """
    tokens.check_vit(model)
    config = model.config
    wanted = tokens.checked_layers(layers, config.depth)
    source = open_image(image, config)
    maps = 100 * attention.class_token_maps(model, source.images, wanted)[:, 0]
    names = [f"block {i}" for i in wanted], [f"head {i}" for i in range(config.num_heads)]
    title = f"Attention of {_class_token(config)}"
    rows, columns = maps.shape[:2]
    sheet = Sheet(rows, columns, source.size, title, labeled=False, named=names)
    scale = Scale("attention to a patch (%, root scale)", 0.0, top(maps), root=True)
    for row, column in np.ndindex(rows, columns):
        sheet.draw(row, column, source, maps[row, column], scale)
    sheet.color_bar(scale)
    return sheet.figure


@takes_classifier
def plot_attention_rollout(
    model: ViT, image: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0
) -> "Figure":
    """Plots how much each patch contributes to the head's input, by attention rollout.

    Args:
        model: A `ViT`.
        image: A path, a PIL image or an array of pixels.
        head_fusion: How to combine the heads: "mean", "max" or "min".
        discard_ratio: Fraction of the smallest weights that are discarded, in [0, 1).

    Returns:
        A figure: the image, and `rollout_map` on it.
    """
    tokens.check_vit(model)
    source = open_image(image, model.config)
    options: dict[str, Any] = {"head_fusion": head_fusion, "discard_ratio": discard_ratio}
    maps = 100 * attention.rollout_map(model, source.images, **options)
    title = f"Attention rollout, {head_fusion} of the heads"
    if discard_ratio:
        title += f", without the smallest {discard_ratio:.0%}"
    # From the smallest to the largest value, because the patches of a rollout differ little.
    scale = Scale("contribution of a patch (%)", *ends(maps))
    return _map_panels(source, maps, [f"contribution to {_pooled(model.config)}"], scale, title)


@takes_classifier
def plot_pooling_map(model: ViT, image: Any) -> "Figure":
    """Plots the attention of attention pooling, as the mean of its heads and per head.

    Args:
        model: A `ViT` with `pooling="map"` or `"map_all"`.
        image: A path, a PIL image or an array of pixels.

    Returns:
        A figure: the image, the mean of the heads of `pooling_map` on it, and each head.
    """
    tokens.check_vit(model)
    source = open_image(image, model.config)
    maps = 100 * attention.pooling_map(model, source.images)[0]
    maps = np.concatenate([maps.mean(0, keepdims=True), maps])  # (1 + h, rows, columns)
    labels = ["mean of the heads", *(f"head {i}" for i in range(len(maps) - 1))]
    scale = Scale("attention to a patch (%, root scale)", 0.0, top(maps), root=True)
    return _map_panels(source, maps, labels, scale, "Attention of the pooling")


@takes_classifier
def plot_attention_distance(model: ViT, images: Any) -> "Figure":
    """Plots how far heads look, by depth: the paper's Fig. 7 (right).

    Args:
        model: A `ViT`.
        images: One image or a sequence of them; several dozen give a stable figure.

    Returns:
        A figure with a dot per head. The dashed line is a head that attends to all patches equally.
    """
    tokens.check_vit(model)
    config = model.config
    batch = _batch(open_images(images, config))
    values = attention.attention_distance(model, batch)
    even = attention.patch_distances(config.grid, config.patch_size).mean()
    title = f"How far heads look, mean of {_count(batch)}"
    return by_depth(values, title, "mean attention distance (pixels)", even, "all patches equally")


@takes_classifier
def plot_attention_entropy(model: ViT, images: Any) -> "Figure":
    """Plots how widely heads look, by depth.

    Args:
        model: A `ViT`.
        images: One image or a sequence of them.

    Returns:
        A figure with a dot per head. The dashed line is a head that attends to all tokens equally.
    """
    tokens.check_vit(model)
    batch = _batch(open_images(images, model.config))
    values = attention.attention_entropy(model, batch)
    even = float(np.log(model.config.num_tokens))
    title = f"How widely heads look, mean of {_count(batch)}"
    return by_depth(values, title, "entropy of attention (nats)", even, "all tokens equally")


# -- evidence for a class


@takes_classifier
def plot_grad_cam(
    model: ViT,
    image: Any,
    classes: int | str | Sequence[int | str] | None = None,
    *,
    block: int = -1,
) -> "Figure":
    """Plots which patches are evidence for a class, by Grad-CAM on the tokens.

    Args:
        model: A `ViT` with a head.
        image: A path, a PIL image or an array of pixels.
        classes: One or more classes, as numbers or names in `config.labels`; None means the top
            class.
        block: Index of the block whose input is explained; negative ones count from the end.

    Returns:
        A figure: the image, and a panel per class. All panels have the same color scale.
    """
    tokens.check_vit(model)
    index = tokens.checked_block("block", block, model.config.depth)

    def maps(images, chosen):
        return gradients.grad_cam(model, images, chosen, index)

    return _class_maps(model, image, classes, maps, f"Grad-CAM on the tokens before block {index}")


@takes_classifier
def plot_attention_gradient(
    model: ViT, image: Any, classes: int | str | Sequence[int | str] | None = None
) -> "Figure":
    """Plots which patches are evidence for a class, by attention times its gradient.

    Args:
        model: A `ViT` with a head.
        image: A path, a PIL image or an array of pixels.
        classes: As in `plot_grad_cam`.

    Returns:
        A figure: the image, and a panel per class. All panels have the same color scale.
    """
    tokens.check_vit(model)

    def maps(images, chosen):
        return gradients.attention_gradient(model, images, chosen)

    return _class_maps(model, image, classes, maps, "Attention times gradient, all blocks")


# -- embeddings


@takes_classifier
def plot_position_similarity(model: ViT) -> "Figure":
    """Plots how similar position embeddings are to each other: the paper's Fig. 7 (center).

    Args:
        model: A `ViT` with position embeddings.

    Returns:
        A figure with a map per patch, at the patch's place. Grids of more than 14 rows or columns
        are subsampled.
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


@takes_classifier
def plot_patch_filters(model: ViT, count: int = 28) -> "Figure":
    """Plots the filters of the patch projection, or of a stem: the paper's Fig. 7 (left).

    Args:
        model: A `ViT`.
        count: Number of components; there may be fewer.

    Returns:
        A figure with the leading components first. Three channels are colors; other numbers of
        channels are drawn side by side in gray.
    """
    filters = embeddings.patch_filters(model, count)  # (count, P, P, C)
    channels = filters.shape[-1]
    what = "the stem's first convolution" if model.config.stem else "the patch projection"
    title = f"Leading {len(filters)} components of {what}"
    height, width = filters.shape[1:3]
    if channels not in (1, 3):
        filters = np.moveaxis(filters, -1, 2).reshape(len(filters), height, channels * width, 1)
        title += f", {channels} channels side by side"
    across = min(7, len(filters))
    down = -(-len(filters) // across)
    cells = np.full((down * across, *filters.shape[1:3], 3), np.nan, "float32")
    cells[: len(filters)] = filters  # one channel is broadcast to gray
    axis = tiled(cells.reshape(down, across, *cells.shape[1:]), title, (1, 1), bar=False)
    from matplotlib.patches import Rectangle  # `tiled` has checked that it is installed

    for i in range(len(filters)):  # so that white edges are visible on white paper
        row, column = divmod(i, across)
        corner = column * (cells.shape[2] + 1) - 0.5, row * (height + 1) - 0.5
        axis.add_patch(
            Rectangle(corner, cells.shape[2], height, fill=False, edgecolor="0.6", linewidth=0.6)
        )
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel("each scaled to its own lowest (dark) and highest (bright) weight", size=9)
    return axis.figure


@takes_classifier
def plot_region_similarity(
    model: ViT, image: Any, query: tuple[int, int] | None = None, *, block: int = -1
) -> "Figure":
    """Plots which regions are similar to one patch.

    Args:
        model: A `ViT`.
        image: A path, a PIL image or an array of pixels.
        query: Row and column of the patch, which is framed; None means the middle.
        block: Index of the block whose output is compared; negative ones count from the end.

    Returns:
        A figure: the image, and the cosines on it.
    """
    tokens.check_vit(model)
    config = model.config
    index = tokens.checked_block("block", block, config.depth)
    middle = config.grid[0] // 2, config.grid[1] // 2
    query = middle if query is None else _checked_query(query, config)
    source = open_image(image, config)
    maps = embeddings.region_similarity(model, source.images, index)[:, *query]
    scale = Scale("cosine of tokens", *ends(maps))
    title = f"Regions like patch {query}, after block {index}"
    labels = ["similarity to the framed patch"]
    return _map_panels(source, maps, labels, scale, title, mark=query)


@takes_classifier
def plot_patch_pca(model: ViT, images: Any, *, block: int = -1) -> "Figure":
    """Plots the leading principal components of the patch tokens as red, green and blue.

    Args:
        model: A `ViT`.
        images: One image or a sequence of them, whose colors are comparable.
        block: Index of the block whose output is shown; negative ones count from the end.

    Returns:
        A figure with the images above and their components below.
    """
    tokens.check_vit(model)
    index = tokens.checked_block("block", block, model.config.depth)
    sources = open_images(images, model.config)
    colors = embeddings.patch_pca(model, _batch(sources), index)
    title = f"Patch tokens after block {index}; red, green, blue: components 1, 2, 3"
    down, across = (1, 2) if len(sources) == 1 else (2, len(sources))
    sheet = Sheet(down, across, sources[0].size, title, labeled=False, bar=False)
    for i, (source, values) in enumerate(zip(sources, colors, strict=True)):
        sheet.draw(0, i, source)
        sheet.draw(*((0, 1) if down == 1 else (1, i)), source, values)
    return sheet.figure


# -- shared parts


def _map_panels(
    source: SourceImage,
    maps: np.ndarray,
    labels: Sequence[str],
    scale: Scale,
    title: str,
    *,
    plain: bool = True,
    mark: tuple[int, int] | None = None,
) -> "Figure":
    """A figure of maps `(n, rows, columns)` on an image, after the plain image if `plain`."""
    panels: list[tuple[str, Any]] = [("image", None)] if plain else []
    panels += zip(labels, maps, strict=True)
    columns = columns_for(len(panels), source.size)
    sheet = Sheet(-(-len(panels) // columns), columns, source.size, title)
    for i, (label, values) in enumerate(panels):
        place = divmod(i, columns)
        sheet.draw(*place, source, values, scale, label=label, mark=mark, grid=maps.shape[1:])
    sheet.color_bar(scale)
    return sheet.figure


def _class_maps(model, image, classes, maps, title):
    config = model.config
    chosen = None if classes is None else _class_numbers(classes, config)
    source = open_image(image, config)
    best = _top_class(model, source.images)
    chosen = [best] if chosen is None else chosen
    found = maps(np.repeat(source.images, len(chosen), 0), chosen)
    names = [config.labels[i] if config.labels else f"class {i}" for i in chosen]
    labels = [
        f"for {name}" + (" (top class)" if i == best else "")
        for i, name in zip(chosen, names, strict=True)
    ]
    scale = Scale("evidence for the class (no unit)", 0.0, top(found))
    return _map_panels(source, found, labels, scale, title)


def _top_class(model: ViT, images: np.ndarray) -> int:
    if not model.config.num_classes:
        raise ValueError("model must have a head. Received: num_classes=0")
    scores = tokens.as_numpy(model(images, training=False))[0]
    if model.config.pooling is None:
        scores = scores[tokens.read_tokens(model.config)].mean(0)
    return int(scores.argmax())


def _class_numbers(classes: Any, config: ViTConfig) -> list[int]:
    """The numbers of classes that are given by number or name."""
    labels: list[str] = list(config.labels or ())
    names: list[Any] = []
    if isinstance(classes, Sequence | np.ndarray) and not isinstance(classes, str):
        names.extend(classes)
    else:
        names.append(classes)
    numbers = []
    for wanted in names:
        known = isinstance(wanted, str) and labels.count(wanted) == 1
        number = labels.index(wanted) if known else wanted
        is_int = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not is_int or not 0 <= int(number) < config.num_classes:
            named = ", or names in config.labels" if labels else ""
            raise ValueError(
                f"classes must be ints in [0, {config.num_classes - 1}]{named}. "
                f"Received: classes={classes!r}"
            )
        numbers.append(int(number))
    if not numbers:
        raise ValueError(f"classes must name at least one class. Received: classes={classes!r}")
    return numbers


def _checked_query(query: Any, config: ViTConfig) -> tuple[int, int]:
    rows, columns = config.grid
    pair = tuple(query) if isinstance(query, Sequence) else ()
    ints = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not ints or not (0 <= pair[0] < rows and 0 <= pair[1] < columns):
        raise ValueError(
            f"query must be the (row, column) of a patch, in {rows} rows and {columns} columns. "
            f"Received: query={query!r}"
        )
    return int(pair[0]), int(pair[1])


def _class_token(config: ViTConfig) -> str:
    return "the class token" if config.class_token else _pooled(config)


def _pooled(config: ViTConfig) -> str:
    """The input of the head, in words."""
    if config.pooling == "token":
        return "the class token"
    if config.pooling == "token_pair":
        return "the class and the distillation token"
    if config.pooling == "token_mean":
        return "the class token and the mean of all patches"
    every = config.pooling in ("mean_all", "map_all") and config.num_prefix_tokens
    how = "attention to" if config.attention_pooling else "the mean of"
    return f"{how} all tokens" if every else f"{how} all patches"


def _batch(sources: Sequence[SourceImage]) -> np.ndarray:
    return np.concatenate([source.images for source in sources])


def _count(batch: np.ndarray) -> str:
    return "1 image" if len(batch) == 1 else f"{len(batch)} images"

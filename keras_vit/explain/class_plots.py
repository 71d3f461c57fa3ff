"""Maps of what speaks for a class as figures; `keras_vit.explain.plots` says how they are drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.explain import gradients, tokens
from keras_vit.explain.panels import Scale, Sheet, columns_for, open_picture, top
from keras_vit.model import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_grad_cam(
    model: ViT,
    picture: Any,
    classes: int | str | Sequence[int | str] | None = None,
    *,
    block: int = -1,
) -> "Figure":
    """Which patches speak for a class, by Grad-CAM on the tokens.

    Args:
        model: A `ViT` with a head.
        picture: A path, a PIL image or an array of pixels.
        classes: The class, its number or its name in `config.labels`; several are drawn side by
            side; None means the top class.
        block: The block whose input is explained, counted from 0 or from the end with negatives.

    Returns:
        A figure: the picture, and a panel a class. Colors mean the same in all panels.
    """
    tokens.check_model(model)
    index = tokens.checked_block("block", block, model.config.depth)

    def maps(images, chosen):
        return gradients.grad_cam(model, images, chosen, index)

    title = f"Grad-CAM on the tokens before block {index}"
    return _class_maps(model, picture, classes, maps, title)


def plot_attention_gradient(
    model: ViT, picture: Any, classes: int | str | Sequence[int | str] | None = None
) -> "Figure":
    """Which patches speak for a class, by attention times its gradient through all blocks.

    Args:
        model: A `ViT` with a head.
        picture: A path, a PIL image or an array of pixels.
        classes: As in `plot_grad_cam`.

    Returns:
        A figure: the picture, and a panel a class. Colors mean the same in all panels.
    """
    tokens.check_model(model)

    def maps(images, chosen):
        return gradients.attention_gradient(model, images, chosen)

    return _class_maps(model, picture, classes, maps, "Attention times gradient, all blocks")


def _class_maps(model, picture, classes, maps, title):
    config = model.config
    chosen = None if classes is None else _class_numbers(classes, config)
    seen = open_picture(picture, config)
    best = _top_class(model, seen.images)
    chosen = [best] if chosen is None else chosen
    found = maps(np.repeat(seen.images, len(chosen), 0), chosen)
    scale = Scale("evidence for the class (no unit)", 0.0, top(found))
    columns = columns_for(len(chosen) + 1, seen.size)
    sheet = Sheet(-(-(len(chosen) + 1) // columns), columns, seen.size, title)
    sheet.draw(0, 0, seen, label="picture")
    for i, (number, values) in enumerate(zip(chosen, found, strict=True), 1):
        name = _class_name(number, config) + (" (top class)" if number == best else "")
        sheet.draw(*divmod(i, columns), seen, values, scale, label=f"for {name}")
    sheet.color_bar(scale)
    return sheet.figure


def _top_class(model: ViT, images: np.ndarray) -> int:
    if not model.config.num_classes:
        raise ValueError("model must have a head. Received: num_classes=0")
    scores = tokens.as_numpy(model(images, training=False))[0]
    if model.config.pooling is None:
        scores = scores[tokens.read_tokens(model.config)].mean(0)
    return int(scores.argmax())


def _class_numbers(classes: Any, config: ViTConfig) -> list[int]:
    """Numbers of classes that are given by number or by name."""
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


def _class_name(number: int, config: ViTConfig) -> str:
    return config.labels[number] if config.labels else f"class {number}"

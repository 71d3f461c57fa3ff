"""What a run's model sees, as pictures of its report."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import keras_vit
from keras_vit import explain

PICTURES = 8
"""Test pictures that are looked at."""


def draw(model: keras_vit.ViT, examples: Iterable[Any], folder: str | Path) -> list[str]:
    """Draws a model into a run folder.

    Args:
        model: The trained model.
        examples: Samples of the test data, of which the first few are taken. Their images are
            uint8 (H, W, C), or files as they are stored on disk, of any size.
        folder: Where the pictures go.

    Returns:
        Lines of Markdown that show them.
    """
    import tensorflow as tf

    from keras_vit.train.data.decoding import decode

    channels = model.config.in_channels
    pictures = [
        decode(tf.convert_to_tensor(example["image"]), channels).numpy()
        for example in islice(examples, PICTURES)
    ]
    many = f"{len(pictures)} test images" if len(pictures) > 1 else "the first test image"
    figures: dict[str, tuple[str, Callable[[], Any]]] = {
        "rollout": (
            "Attention rollout: which patches of the first test image the head reads",
            lambda: explain.plot_attention_rollout(model, pictures[0]),
        ),
        "features": (
            f"Patch features of {many}: similar colors are similar features",
            lambda: explain.plot_patch_pca(model, pictures),
        ),
        "distance": (
            f"How far each head looks: the mean over {many}",
            lambda: explain.plot_attention_distance(model, pictures),
        ),
        "filters": (
            "Patch filters: the principal components of the patch projection",
            lambda: explain.plot_patch_filters(model),
        ),
    }
    if model.config.position_table:
        figures["positions"] = (
            "How similar the position embeddings are to each other",
            lambda: explain.plot_position_similarity(model),
        )
    lines = ["", "## What it sees", ""]
    for name, (text, plot) in figures.items():
        try:
            figure = plot()
        except ValueError as error:  # of an odd model; the run is worth its results all the same
            lines += [f"{text}: it cannot be drawn. {' '.join(str(error).split())}", ""]
            continue
        figure.savefig(Path(folder, f"{name}.png"), dpi=110)
        lines += [f"![{text}]({name}.png)", "", f"{text}.", ""]
    return [*lines, "`keras-vit explain` writes an interactive page about any image."]

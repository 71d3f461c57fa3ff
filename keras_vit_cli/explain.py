"""`keras-vit explain`: a page on what a model sees in an image."""

from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, check_source


def explain(
    model: Annotated[
        str,
        typer.Argument(help=f"A run folder, a .keras file or a checkpoint: {CHECKPOINT}"),
    ],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    page: Annotated[
        Path, typer.Option("--out", help="The .html page to write; an existing one is replaced.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(help="Page title; defaults to the image's file name.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Classes to show and explain.")] = 5,
    debug: Debug = False,
) -> None:
    """Write a page on what a model sees in an image.

    The page is one file that works offline. It shows the prediction, attention by layer and head,
    rollout and gradient maps, the attention distance of each head, and how similar the position
    embeddings and patches are to each other.

    Example: keras-vit explain runs/flowers cat.jpg --out cat.html
    """
    if not image.exists():
        raise FileNotFoundError(f"IMAGE must be an image file. Received: {image}, no such file")
    check_source("model", model)
    load_library()
    from keras_vit import runtime
    from keras_vit.explain import report
    from keras_vit.images import read_image

    picture = read_image(image)
    with output.step(f"Reading {model}"):
        opened = runtime.open(model)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(
            "model must be one that Keras runs, because its layers are inspected: a run folder, a "
            f".keras file or a checkpoint. Received: {model}, an export"
        )
    with output.step("Explaining"):
        written = report.write_report(
            opened.model, picture, page, title=image.name if title is None else title, top_k=top_k
        )
    print(written)

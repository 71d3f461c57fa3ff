"""`keras-vit explain`: a page on what a model sees in a picture."""

import os
from pathlib import Path
from typing import Annotated

import typer

from keras_vit import pictures

app = typer.Typer()


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file or any checkpoint: a path, a name that "
            "`keras-vit models` lists, hf://organisation/name\\[@revision]\\[/file], https://..."
        ),
    ],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture file.")],
    page: Annotated[
        Path, typer.Option("--out", help="The page to write, .html, in place of one that is there.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(help="What stands above; by default the picture's name.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Classes to name and explain.")] = 5,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Show what a model sees: keras-vit explain runs/flowers cat.jpg --out cat.html.

    The page is one file that needs no network: the prediction, attention by layer and head, rollout
    and gradient maps, how far heads look, what positions and patches the model takes for alike.
    """
    picture = pictures.read(image)  # before a backend is imported
    from keras_vit import cli

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cli._library()
    from keras_vit import runtime
    from keras_vit.explain import report

    with cli._step(f"Reading {model}"):
        opened = runtime.open(model)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(
            "model must be one that Keras runs, whose layers can be looked into: a run folder, a "
            f".keras file or a checkpoint. Received: {model}, an export"
        )
    with cli._step("Explaining"):
        written = report.write_report(
            opened.model, picture, page, title=image.name if title is None else title, top_k=top_k
        )
    print(written)

"""`keras-vit serve-config`: the configuration files of TensorFlow Serving."""

from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli.backend import load_library
from keras_vit_cli.options import Debug, check_folder


def serve_config(
    models: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Folders of exported models.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="The folder to write to; defaults to that of the models."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="The server's Docker image; defaults to the tested TensorFlow Serving."),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32,
    address: Annotated[
        str, typer.Option(help="The address at which the ports open.")
    ] = "127.0.0.1",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files with different content.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the configuration files of TensorFlow Serving.

    Example: keras-vit serve-config savedmodels/flowers
    """
    for model in models:
        check_folder("DIR", model)
    load_library()
    from keras_vit.export.serving import config as serving

    paths = serving.write_serving_config(
        models,
        folder,
        image=image or serving.IMAGE,
        max_batch_size=max_batch_size,
        address=address,
        overwrite=overwrite,
    )
    print(*paths, sep="\n")

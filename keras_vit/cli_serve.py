"""`keras-vit serve-config` and `keras-vit request`: the server's files, and a question to it."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_vit.export import client
from keras_vit.export.serving import config as serving

app = typer.Typer()
out = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
BAR = 24


@app.command("serve-config")
def serve_config(
    models: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of exported models.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where the files go; by default the folder of the models."),
    ] = None,
    image: Annotated[str, typer.Option(help="The server's Docker image.")] = serving.IMAGE,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32,
    address: Annotated[str, typer.Option(help="Where the ports open.")] = "127.0.0.1",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other files.")] = False,
    debug: Debug = False,
) -> None:
    """Write what TF Serving needs for models: keras-vit serve-config savedmodels/flowers."""
    paths = serving.write_serving_config(
        models,
        folder,
        image=image,
        max_batch_size=max_batch_size,
        address=address,
        overwrite=overwrite,
    )
    print(*paths, sep="\n")


@app.command()
def request(
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="JPEG or PNG files, or one .npy file.")
    ],
    url: Annotated[
        str,
        typer.Option(help="http://HOST:8501/v1/models/NAME or grpc://HOST:8500/NAME."),
    ],
    signature: Annotated[str, typer.Option(help="The signature to ask.")] = "classify",
    top: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ask a server what is in images: keras-vit request cat.jpg --url http://...

    A .npy file holds a batch of arrays, for the signatures that take `images`.
    """
    if url.startswith("grpc"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the stubs bring TensorFlow
    batch, names = _batch(images)
    outputs = client.connect(url, timeout=timeout).predict(batch, signature)
    classes = client.top_classes(outputs, top)
    if classes is None or as_json:
        print(json.dumps(_rows(names, outputs, classes), indent=2))
    elif out.is_terminal:
        out.print(_table(names, classes))
    else:  # for grep and cut
        for name, found in zip(names, classes, strict=True):
            for label, score in found:
                print(name, label, f"{score:.6f}", sep="\t")


def _batch(images: list[Path]) -> tuple[Any, list[str]]:
    """What is sent, and a name for each item of it."""
    if all(path.suffix != ".npy" for path in images):
        return images, [str(path) for path in images]
    if len(images) > 1:
        raise ValueError(f"IMAGE must be one where it is a .npy file. Received: {len(images)}")
    array = np.load(images[0], allow_pickle=False)
    if array.ndim < 2:
        raise ValueError(f"IMAGE must hold a batch of arrays. Received: shape {array.shape}")
    return array, [f"{images[0]}[{i}]" for i in range(len(array))]


def _rows(
    names: list[str], outputs: dict[str, np.ndarray], classes: list | None
) -> list[dict[str, Any]]:
    if classes is None:
        return [
            {"image": name, **{key: value[i].tolist() for key, value in outputs.items()}}
            for i, name in enumerate(names)
        ]
    return [
        {"image": name, "classes": [{"label": label, "score": score} for label, score in found]}
        for name, found in zip(names, classes, strict=True)
    ]


def _table(names: list[str], classes: list[list[tuple[str, float]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR)
    for name, found in zip(names, classes, strict=True):
        for i, (label, score) in enumerate(found):
            bar = "━" * round(BAR * min(max(score, 0.0), 1.0))
            table.add_row(Text("" if i else name), Text(label), f"{score:.4f}", bar)
    return table

"""`keras-vit request`: asks a server for the classes of images. It imports no Keras."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from keras_vit_cli import output
from keras_vit_cli.options import AsJson, Debug

if TYPE_CHECKING:
    import numpy as np


def request(
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE", help="JPEG or PNG files, or one .npy file.")
    ],
    url: Annotated[
        str,
        typer.Option(help="http://HOST:8501/v1/models/NAME or grpc://HOST:8500/NAME."),
    ],
    signature: Annotated[str, typer.Option(help="The signature to call.")] = "classify",
    top: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Send images to `keras-vit serve` or TensorFlow Serving and print their classes.

    A .npy file contains a batch of arrays, for signatures that take `images`.

    Example: keras-vit request cat.jpg --url http://localhost:8501/v1/models/flowers
    """
    from keras_vit_cli import client

    if url.startswith("grpc"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the stubs import TensorFlow
    batch, names = _batch(images)
    outputs = client.connect(url, timeout=timeout).predict(batch, signature)
    classes = client.top_classes(outputs, top)
    if classes is None or as_json:
        output.print_json(_records(names, outputs, classes))
    elif output.out.is_terminal:
        output.out.print(_table(names, classes))
    else:
        output.print_rows(
            (name, label, f"{score:.6f}")
            for name, found in zip(names, classes, strict=True)
            for label, score in found
        )


def _batch(images: list[Path]) -> tuple[Any, list[str]]:
    """What is sent, and a name for each item of it."""
    for path in images:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "which does not exist"
            raise ValueError(f"IMAGE must be a file. Received: {path}, {found}")
    if all(path.suffix != ".npy" for path in images):
        return images, [str(path) for path in images]
    if len(images) > 1:
        raise ValueError(f"IMAGE must be one where it is a .npy file. Received: {len(images)}")
    import numpy as np

    try:
        array = np.load(images[0], allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"IMAGE must be a whole .npy file of numbers. Received: {images[0]}, {error}"
        ) from error
    if array.ndim < 2:
        raise ValueError(f"IMAGE must hold a batch of arrays. Received: shape {array.shape}")
    return array, [f"{images[0]}[{i}]" for i in range(len(array))]


def _records(
    names: list[str], outputs: dict[str, "np.ndarray"], classes: list | None
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
    table.add_column("", no_wrap=True, min_width=output.BAR)
    for name, found in zip(names, classes, strict=True):
        for i, (label, score) in enumerate(found):
            output.add_score(table, "" if i else name, label, score=score)
    return table

"""`keras-vit convert`: a checkpoint in another library's format."""

import enum
import re
from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, Verbose, check_source


class Format(enum.StrEnum):
    """The formats of `keras_vit.save_pretrained`, and Keras' own."""

    timm = "timm"
    beit = "beit"
    huggingface = "huggingface"
    huggingface_clip = "huggingface_clip"
    huggingface_dinov3 = "huggingface_dinov3"
    google = "google"
    big_vision = "big_vision"
    torchvision = "torchvision"
    vit_pytorch = "vit_pytorch"
    keras = "keras"


def convert(
    source: Annotated[str, typer.Argument(help=f"The checkpoint: {CHECKPOINT}")],
    target: Annotated[Path, typer.Argument(help="The folder or file to write.")],
    to: Annotated[Format, typer.Option("--format", help="The format to write.")],
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="Classes of a new, zero head; 0 for no head.")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="384 or 192x320; the position embeddings are resampled to it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another format.

    Example: keras-vit convert ViT-B_16.npz b16 --format timm
    """
    size = _size(image_size)
    _check_target(target, to, overwrite)
    check_source("source", source)
    library = load_library()
    from keras_vit.atomic import atomic_path
    from keras_vit.paths import as_output, check_above
    from keras_vit.runtime.keras_model import load_keras
    from keras_vit.weights import fetch

    check_above("target", as_output("target", target))
    path = fetch.fetch_weights(source)
    with output.step(f"Reading {source}"):
        if path.suffix == ".keras" and num_classes is None and size is None:
            model = load_keras(path)  # with its `trainable` flags
        else:
            model = library.from_pretrained(path, num_classes=num_classes, image_size=size)
    with output.step(f"Writing {target}"):
        if to is Format.keras:
            with atomic_path(target) as temporary:
                model.save(temporary)
            written = target
        else:
            written = library.save_pretrained(model, target, format=to.value)
    print(written)


def _size(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    if not (found := re.fullmatch(r"(\d+)(?:x(\d+))?", text)):
        raise typer.BadParameter("it must be 384 or 192x320", param_hint="--image-size")
    height, width = found.groups()
    return (int(height), int(width)) if width else int(height)


def _check_target(target: Path, to: Format, overwrite: bool) -> None:
    """Raises before anything is fetched or read."""
    if to is Format.keras and target.suffix != ".keras":
        raise ValueError(
            f"target must end in .keras for format 'keras'. Received: target={str(target)!r}"
        )
    # A format of one file adds its suffix to a name that has none.
    named = [target, *(target.with_name(target.name + s) for s in (".npz", ".safetensors"))]
    there = [p for p in named if p.is_file() or (p.is_dir() and any(p.iterdir()))]
    if there and not overwrite:
        raise FileExistsError(
            f"target must not exist, or --overwrite be given. Received: {there[0]}"
        )

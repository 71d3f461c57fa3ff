"""`keras-vit export`: a trained model, or a checkpoint, as what serves it."""

import enum
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_vit.export.requirement import check_tensorflow

if TYPE_CHECKING:
    from keras_vit.export.saved_model import Export

app = typer.Typer()
out = Console()


class Target(enum.StrEnum):
    """What `export` writes."""

    saved_model = "saved_model"


class Dtype(enum.StrEnum):
    """Of the weights and the products."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Images(enum.StrEnum):
    """What the signatures with `images` take."""

    float32 = "float32"
    uint8 = "uint8"


class Activation(enum.StrEnum):
    """From logits to probabilities."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, or any checkpoint: a path, a name that "
            "`keras-vit models` lists, hf://organisation/name\\[@revision]\\[/file], https://..."
        ),
    ],
    to: Annotated[Target, typer.Option("--to", help="What to write.")],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="The folder of all versions; by default savedmodels/NAME."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="bfloat16 is for processors that multiply it.")
    ] = Dtype.float32,
    version: Annotated[
        int | None, typer.Option(min=1, help="A number that is free; by default the next one.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A text file with the name of a class in each line.")
    ] = None,
    activation: Annotated[
        Activation | None,
        typer.Option(help="From logits to probabilities; by default as the model says."),
    ] = None,
    images: Annotated[
        Images, typer.Option(help="What `images` are: floats as the model takes them, or pixels.")
    ] = Images.float32,
    top_k: Annotated[int, typer.Option(min=1, help="Classes that `classify` names.")] = 5,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Images in a request.")] = 256,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Pixels of a picture file; more are refused.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Export a model, verified: keras-vit export runs/flowers --to saved_model.

    It is compiled for inference and compared with the model before it gets its name.
    """
    from keras_vit import cli

    names = None if labels is None else labels.read_text(encoding="utf-8").splitlines()
    check_tensorflow()
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # on another, a process more is needed
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cli._library()
    logging.getLogger("tensorflow").setLevel(logging.WARNING)  # "Assets written to" another name
    from keras_vit import runtime
    from keras_vit.export import image_bytes, saved_model

    with cli._step(f"Reading {source}"):
        opened = runtime.open(source)
    if not isinstance(opened, runtime.KerasRuntime):
        raise ValueError(f"source must not be an export itself. Received: source={source!r}")
    with cli._step("Exporting"):
        written = saved_model.export_saved_model(
            opened.model,
            folder or Path("savedmodels", _name(source)),
            dtype=dtype.value,
            version=version,
            labels=names,
            activation=activation.value if activation else None,
            images=images.value,
            top_k=top_k,
            max_batch_size=max_batch_size,
            max_pixels=max_pixels or image_bytes.MAX_PIXELS,
        )
    if as_json:
        print(json.dumps(saved_model.as_json(written), indent=2))
        return
    if not out.is_terminal:  # for grep and cut
        for row in facts(written):
            print(*row, sep="\t")
        return
    out.print(_table(facts(written)))


def facts(export: "Export") -> list[tuple[str, str]]:
    """The rows of the table."""
    seen = export.verification
    rows = [
        ("file", f"{export.path}"),
        ("size", f"{export.size / 1e6:,.1f} MB, {export.dtype}"),
        (
            "latency",
            f"{export.latency:.3g} ms for one image; the model itself in float32 "
            f"{export.plain_latency:.3g} ms "
            f"({export.plain_latency / export.latency:.2f} times as long)",
        ),
        (
            "largest difference",
            f"{seen.difference:.2g}, {seen.difference / (seen.logits_range or 1):.1g} of the "
            f"range {seen.logits_range:.3g} (allowed: {seen.bound:g})",
        ),
    ]
    if seen.same_top_class is not None:
        rows.append(("same top class", f"{seen.same_top_class:.1%} of {seen.images} images"))
    if seen.files_difference is not None:
        rows.append(("picture files", f"{seen.files_difference:.1g} of the range apart"))
    return [*rows, ("verified on", seen.where)]


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in rows:
        table.add_row(title, Text(value))
    return table


def _name(source: str) -> str:
    """A folder's name for the exports of a source: runs/flowers/model.keras is "flowers"."""
    path = Path(re.sub(r"^\w+://", "", source))
    if path.name == "model.keras":
        path = path.absolute().parent
    name = re.sub(r"\.(keras|npz|safetensors|weights\.h5|h5|pth?|bin)$", "", path.name)
    name = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._-")
    if not name:
        raise ValueError(f"--out must be given for this source. Received: source={source!r}")
    return name

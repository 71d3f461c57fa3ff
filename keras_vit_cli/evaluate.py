"""`keras-vit evaluate`: the accuracy of a model or a run."""

from typing import Annotated

import typer

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, AsJson, Debug, Verbose, check_source


def evaluate(
    model: Annotated[
        str, typer.Argument(help=f"A run folder, a .keras file or a checkpoint: {CHECKPOINT}")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help='"digits", "tfds:NAME" or a folder of images; defaults to that of the run.',
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            help="Where the data is: TFDS' data_dir, or another folder for a run on a folder."
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="A TFDS split or a subfolder; defaults to test.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Batch size; defaults to that of the run, or 128."),
    ] = None,
    few_shot: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N...",
            help="Linear evaluation on N training images a class, for each N.",
        ),
    ] = None,
    knn: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Accuracy of the K nearest training images by features; 20 without a head.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure top-1 and top-5 accuracy; every sample is counted once.

    A model without a head, as after training without labels, is measured by its features.

    A run folder knows its data; any other model needs --data.

    Example: keras-vit evaluate runs/digits --few-shot 5 10
    """
    check_source("model", model)
    found = load_library(datasets=True).train.evaluate(
        model,
        data=data,
        path=path,
        split=split,
        batch_size=batch,
        few_shot=few_shot or (),
        knn=knn,
    )
    if as_json:
        output.print_json(found)
        return
    print(f"{found['samples']:,} samples of {found['data']}, {found['seconds']:.1f} s")
    for name, value in found.items():
        if name.startswith(("top", "few_shot", "knn")):
            print(f"{name:12} {value:.2%}")

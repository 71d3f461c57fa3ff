"""`keras-vit embed`: the features of images."""

from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli import image_files, output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, check_source

OUT = (".parquet", ".npy")


def embed(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a .keras file, an export that has features (the folder of a "
            "SavedModel, .onnx, .xml, a .tflite file with output='features') or a checkpoint: "
            f"{CHECKPOINT}"
        ),
    ],
    images: image_files.Images = None,
    *,
    out: Annotated[Path, typer.Option(help="The .parquet or .npy file to write.")],
    files_from: image_files.FilesFrom = None,
    batch_size: image_files.BatchSize = 32,
    workers: image_files.Workers = None,
    overwrite: image_files.Overwrite = False,
    ray: image_files.Ray = None,
    ray_cpus: image_files.RayCPUs = None,
    ray_gpus: image_files.RayGPUs = None,
    debug: Debug = False,
) -> None:
    """Write the features of images.

    They are the pooled input of the head in float32, which the same model returns with
    num_classes=0. A .npy file has a row for each image, and beside it a .npy.jsonl file has their
    names. An image that cannot be read has its error there and a row of NaN (in Parquet null); the
    exit code is then 1.

    A killed run resumes when the same command is started again. Parquet needs
    `pip install 'keras3-vit[bulk]'`, --ray `'keras3-vit[ray]'`.

    Example: keras-vit embed runs/flowers photos --out features.npy
    """
    names = image_files.named(images, files_from)
    image_files.check_ray(ray, ray_cpus, ray_gpus)
    image_files.check_out(out, overwrite, OUT)
    if not image_files.any_exists(names):
        for name in names:
            output.print_error(f"{name}: there is no such file")
        raise typer.Exit(1)
    check_source("model", model)
    load_library(tensorflow=any(Path(model).glob("**/saved_model.pb")))
    from keras_vit import runtime
    from keras_vit.bulk import embed as embed_files
    from keras_vit.images import find_images
    from keras_vit.paths import as_output

    as_output("out", out)
    found = list(find_images(names))
    if all(item.problem for item in found):  # no need to read the model
        for item in found:
            output.print_error(f"{item.path}: {item.problem}")
        raise typer.Exit(1)
    with output.step(f"Reading {model}"):
        opened = runtime.open(model)
    image_files.write(
        embed_files,
        "Embedding",
        found,
        model=opened if ray is None else model,  # which each worker opens
        out=out,
        batch_size=batch_size,
        workers=workers,
        overwrite=overwrite,
        ray=image_files.ray_workers(ray, ray_cpus, ray_gpus),
    )

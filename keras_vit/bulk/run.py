"""`predict` and `embed`: the classes or the features of image files, written to one file."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_vit.bulk.formats import check_suffix, final_files, format_for
from keras_vit.bulk.parts import Parts, digest
from keras_vit.bulk.rows import FEATURES, PROBABILITIES, Progress, Row, Summary
from keras_vit.bulk.stream import (
    Names,
    as_runtime,
    check_count,
    check_wanted,
    found_images,
    stream,
)
from keras_vit.bulk.workers import RayWorkers
from keras_vit.images import FoundImage
from keras_vit.paths import as_output
from keras_vit.runtime import KerasRuntime, Runtime

READ = 1 << 22
"""Bytes that are hashed at once."""


def predict(
    model: Any,
    images: Names,
    out: str | os.PathLike,
    *,
    top_k: int = 5,
    batch_size: int = 32,
    workers: int | None = None,
    overwrite: bool = False,
    ray: RayWorkers | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Writes the best classes of image files.

    A killed run resumes when it is started again with the same arguments. A file that cannot be
    read is a row with an error.

    Args:
        model: A `Runtime`, a path that `keras_vit.runtime.open` opens, a `ViT` or a `Classifier`.
        images: Files, folders and globs, as in `keras_vit.images.find_images`.
        out: The .jsonl or .parquet file to write; Parquet needs pyarrow.
        top_k: Classes of an image.
        batch_size: Images in a batch of the model.
        workers: Threads that decode; None means one per core.
        overwrite: Whether to replace `out`, and the parts of another killed run.
        ray: Machines to run on instead of this process. The model must be a path that they read.
        progress: Called at the beginning and after each batch.

    Returns:
        A `Summary`.

    Example:

    >>> keras_vit.bulk.predict("runs/flowers", "photos", "classes.parquet").failed
    0
    """
    check_count("top_k", top_k)
    return _run(
        *(PROBABILITIES, model, images, out, top_k),
        *(batch_size, workers, overwrite, ray, progress),
    )


def embed(
    model: Any,
    images: Names,
    out: str | os.PathLike,
    *,
    batch_size: int = 32,
    workers: int | None = None,
    overwrite: bool = False,
    ray: RayWorkers | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Writes the features of image files: the pooled input of the head, `(D,)` in float32.

    They are what the same model with `num_classes=0` returns.

    Args:
        model: As for `predict`; an export must have features, and a TFLite file has them only if it
            was exported with `output="features"`.
        images: As for `predict`.
        out: The .parquet or .npy file to write. Beside a .npy file `(N, D)`, the images' names are
            written to a .npy.jsonl file, a line for each row.
        batch_size: As for `predict`.
        workers: As for `predict`.
        overwrite: As for `predict`.
        ray: As for `predict`.
        progress: As for `predict`.

    Returns:
        A `Summary`.

    Example:

    >>> keras_vit.bulk.embed("hf://facebook/dinov2-small", "photos", "features.npy")
    >>> features = np.load("features.npy")
    """
    return _run(
        *(FEATURES, model, images, out, None),
        *(batch_size, workers, overwrite, ray, progress),
    )


def _run(
    wanted: str,
    model: Any,
    images: Names,
    out: str | os.PathLike,
    top_k: int | None,
    batch_size: int,
    workers: int | None,
    overwrite: bool,
    ray: RayWorkers | None,
    progress: Callable[[Progress], None] | None,
) -> Summary:
    path = as_output("out", out)
    check_suffix(path, wanted)
    check_count("batch_size", batch_size)
    if ray is not None:
        ray.check_model(model)
    found = found_images(images)
    if not found:
        raise ValueError("images must name at least one image. Received: none")
    opened = as_runtime(model)
    check_wanted(opened, wanted)
    format = format_for(path, wanted, opened.labels, top_k or 1)
    job = {
        "output": [wanted, path.suffix],
        "model": fingerprint(opened),
        "images": digest([item.path for item in found]),
        "top_k": top_k,
    }
    parts = Parts(path, job, format, len(found), overwrite=overwrite)
    report = progress or (lambda state: None)
    with parts.opened():
        resumed, failed = parts.done, parts.failed
        report(Progress(resumed, len(found)))
        begin = time.perf_counter()
        done = resumed
        for rows in _rows(opened, model, found[resumed:], wanted, batch_size, workers, ray):
            parts.add(rows)
            wrong = tuple(row for row in rows if row.error is not None)
            done, failed = done + len(rows), failed + len(wrong)
            report(Progress(done, len(found), wrong))
        seconds = time.perf_counter() - begin
        parts.finish()
    return Summary(final_files(path)[-1], len(found), failed, resumed, seconds)


def _rows(
    opened: Runtime,
    model: Any,
    found: Sequence[FoundImage],
    wanted: str,
    batch_size: int,
    workers: int | None,
    ray: RayWorkers | None,
) -> Iterator[list[Row]]:
    if ray is None:
        return stream(opened, found, wanted=wanted, batch_size=batch_size, workers=workers)
    from keras_vit.bulk.ray_data import stream_on_ray

    return stream_on_ray(
        os.fspath(model), found, ray, wanted=wanted, batch_size=batch_size, workers=workers
    )


def fingerprint(opened: Runtime) -> str:
    """A hash of a model: of the weights that Keras has, or of an export's file."""
    found = hashlib.sha256()
    if isinstance(opened, KerasRuntime):
        found.update(repr(sorted(opened.config.to_dict().items())).encode())
        found.update(opened.model.dtype_policy.name.encode())
        for weight in opened.model.weights:
            found.update(f"{weight.path} {weight.shape} ".encode())
            found.update(keras.ops.convert_to_numpy(weight.value).tobytes())
        return found.hexdigest()
    file = opened.path
    if file.is_dir():  # a SavedModel, whose manifest states the hashes of its files
        file = file / "MANIFEST.json"
    with file.open("rb") as content:
        while chunk := content.read(READ):
            found.update(chunk)
    return found.hexdigest()

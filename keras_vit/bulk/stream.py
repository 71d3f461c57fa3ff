"""Image files through a model: decoding runs in threads beside the model, in bounded memory.

    files -> threads that decode -> batches, in order -> a thread that runs the model -> rows

Pillow and the engines release the interpreter's lock while they compute, so threads suffice. While
the model computes a batch, the next one waits in its queue and the threads decode the one after.
"""

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from keras_vit.bulk.rows import FEATURES, PROBABILITIES, Row
from keras_vit.classifier import vit_of
from keras_vit.images import FoundImage, ImageFileError, find_images, read_pixels
from keras_vit.model import ViT
from keras_vit.paths import is_path
from keras_vit.pillow_warnings import pillow_warnings
from keras_vit.preprocessing import MODES
from keras_vit.runtime import KerasRuntime, Runtime
from keras_vit.runtime import open as open_runtime

AHEAD = 2
"""Batches that are decoded ahead of the one that is put together."""
Names = str | os.PathLike | Iterable[str | os.PathLike | FoundImage]


class _Picture(NamedTuple):
    """A decoded file, or why it is none."""

    image: str
    pixels: np.ndarray | None
    problem: str | None = None


def stream(
    model: Any,
    images: Names,
    *,
    wanted: str = PROBABILITIES,
    batch_size: int = 32,
    workers: int | None = None,
) -> Iterator[list[Row]]:
    """Runs image files through a model, and decodes the next ones meanwhile.

    A file that cannot be read is a row with an error and takes no place in a batch.

    Args:
        model: A `Runtime`, a path that `keras_vit.runtime.open` opens, a `ViT` or a `Classifier`.
        images: Files, folders and globs as in `keras_vit.images.find_images`, or what it yields.
        wanted: "probabilities", or "features", the pooled input of the head.
        batch_size: Images in a batch of the model.
        workers: Threads that decode; None means one per core.

    Yields:
        Lists of rows, in the order of the files. About four batches of images are in memory.

    Example:

    >>> for rows in keras_vit.bulk.stream("runs/flowers", "photos", wanted="features"):
    ...     index.add(np.stack([row.values for row in rows if row.error is None]))
    """
    check_count("batch_size", batch_size)
    count = _threads(workers)
    opened = as_runtime(model)
    check_wanted(opened, wanted)
    return _stream(opened, found_images(images), wanted, batch_size, count)


def _stream(
    opened: Runtime, found: Iterable[FoundImage], wanted: str, batch_size: int, threads: int
) -> Iterator[list[Row]]:
    decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    engine = ThreadPoolExecutor(1, thread_name_prefix="model")
    try:
        with pillow_warnings:
            decoded = _in_order(
                decoders,
                lambda item: _decode(item, opened),
                found,
                ahead=AHEAD * batch_size + threads,
            )
            running: Future | None = None
            for batch in _batches(decoded, batch_size):
                following = engine.submit(_run, opened, batch, wanted)
                if running is not None:
                    yield running.result()
                running = following
            if running is not None:
                yield running.result()
    finally:
        for pool in (engine, decoders):
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ThreadPoolExecutor, function: Callable, items: Iterable[Any], ahead: int
) -> Iterator[Any]:
    """`map` in a pool: in order, with at most `ahead` items submitted and not yet taken."""
    waiting: collections.deque[Future] = collections.deque()
    for item in items:
        if len(waiting) == ahead:
            yield waiting.popleft().result()
        waiting.append(pool.submit(function, item))
    while waiting:
        yield waiting.popleft().result()


def _batches(decoded: Iterable[_Picture], size: int) -> Iterator[list[_Picture]]:
    """Pictures with `size` decoded ones in each batch but the last."""
    batch: list[_Picture] = []
    count = 0
    for picture in decoded:
        batch.append(picture)
        count += picture.pixels is not None
        # Many bad files in a row are reported before a batch is full.
        if count == size or len(batch) == AHEAD * size:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _decode(item: FoundImage, opened: Runtime) -> _Picture:
    if item.problem is not None:
        return _Picture(item.path, None, item.problem)
    try:
        return _Picture(item.path, read_pixels(item.path, opened.config))
    except ImageFileError as error:
        return _Picture(item.path, None, error.reason)


def _run(opened: Runtime, batch: Sequence[_Picture], wanted: str) -> list[Row]:
    arrays = [picture.pixels for picture in batch if picture.pixels is not None]
    compute = opened.features if wanted == FEATURES else opened.probabilities
    values = iter(compute(np.stack(arrays)) if arrays else ())
    rows = []
    for image, pixels, problem in batch:
        if pixels is None:
            rows.append(Row(image, None, problem))
            continue
        row = next(values)
        finite = bool(np.isfinite(row).all())
        kind = "feature" if wanted == FEATURES else "probability"
        error = None if finite else f"a {kind} is not a finite number"
        rows.append(Row(image, row if finite else None, error))
    return rows


# -- what is checked


def found_images(images: Names) -> Sequence[FoundImage]:
    """The files that names refer to, without opening any."""
    if isinstance(images, str | os.PathLike):
        images = [images]
    if not isinstance(images, Iterable) or isinstance(images, bytes):
        raise ValueError(f"images must be paths, folders or globs. Received: images={images!r}")
    found: list[FoundImage] = []
    for name in images:
        if isinstance(name, FoundImage):
            found.append(name)
        elif is_path(name):
            found += find_images([os.fspath(name)])
        else:
            raise ValueError(f"images must be paths, folders or globs. Received: {name!r}")
    return found


def as_runtime(model: Any) -> Runtime:
    """The runtime of a model, which may be a path or a Keras model."""
    if isinstance(model, Runtime):
        return model
    if is_path(model):
        return open_runtime(model)
    vit = vit_of(model)
    if not isinstance(vit, ViT):
        raise ValueError(
            "model must be a Runtime, a ViT, a Classifier or a path that keras_vit.runtime.open "
            f"opens. Received: model={model!r}"
        )
    return KerasRuntime(vit)


def check_wanted(opened: Runtime, wanted: str) -> None:
    """Raises unless a model takes pictures and returns what is wanted for each of them."""
    config, path = opened.config, str(opened.path)
    if wanted not in (PROBABILITIES, FEATURES):
        raise ValueError(f"wanted must be 'probabilities' or 'features'. Received: {wanted!r}")
    if wanted == PROBABILITIES and not config.num_classes:
        raise ValueError(
            f"model must have a head to name classes; this one returns features. Received: {path}"
        )
    if wanted == PROBABILITIES and "logits" not in opened.outputs:
        raise ValueError(
            "model must return probabilities or logits. "
            f"Received: {path}, which returns {' and '.join(opened.outputs)} only"
        )
    if wanted == FEATURES and FEATURES not in opened.outputs:
        raise ValueError(
            "model must return features: a model that Keras runs, a SavedModel, an .onnx or .xml "
            "file, or a .tflite file exported with output='features'. "
            f"Received: {path}, which returns {' and '.join(opened.outputs)} only"
        )
    if config.pooling is None:
        what = "classify an image" if wanted == PROBABILITIES else "return one row for an image"
        raise ValueError(
            f"model must pool its tokens to {what}. Received: {path}, with pooling=None"
        )
    if config.in_channels not in MODES:
        raise ValueError(
            "model must take gray or RGB images. "
            f"Received: {path}, with in_channels={config.in_channels}"
        )


def check_count(name: str, value: Any) -> None:
    """Raises unless an argument is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int. Received: {name}={value!r}")


def _threads(workers: int | None) -> int:
    if workers is not None:
        check_count("workers", workers)
        return workers
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1

"""Image files through a model on the machines of a Ray cluster, by Ray Data.

Each worker is an actor that holds the model and runs `stream` on a block of files. If one is
killed, Ray starts another and computes its blocks again. The rows come back in the files' order, to
the one process that writes them.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.bulk.rows import Row
from keras_vit.bulk.stream import as_runtime, stream
from keras_vit.bulk.workers import RayWorkers
from keras_vit.images import FoundImage

BLOCK = 256
"""Images of a block: what a worker computes at once, and computes again after a kill."""
FORWARDED = ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL")
"""Variables that a worker gets from this process."""
Columns = Mapping[str, Any]


class Worker:
    """An actor of `map_batches`: it opens a model once, and takes one block at a time."""

    def __init__(self, model: str, wanted: str, batch_size: int, threads: int):
        self._model = as_runtime(model)
        self._options = {"wanted": wanted, "batch_size": batch_size, "workers": threads}

    def __call__(self, block: Columns) -> Columns:
        found = [
            FoundImage(str(path), str(problem) or None)
            for path, problem in zip(block["path"], block["problem"], strict=True)
        ]
        rows = [row for rows in stream(self._model, found, **self._options) for row in rows]
        width = next((len(row.values) for row in rows if row.values is not None), 0)
        # Plain bytes, because a column of arrays must have one shape in all blocks.
        return {
            "number": block["number"],
            "values": np.array([_packed(row.values, width) for row in rows], object),
            "error": np.array([row.error or "" for row in rows], object),
        }


def stream_on_ray(
    model: str,
    found: Sequence[FoundImage],
    ray_workers: RayWorkers,
    *,
    wanted: str,
    batch_size: int,
    workers: int | None,
) -> Iterator[list[Row]]:
    """`keras_vit.bulk.stream` on Ray.

    Args:
        model: A path that `keras_vit.runtime.open` opens on every machine.
        found: The files, in order.
        ray_workers: How many workers, and their resources.
        wanted: As in `stream`.
        batch_size: As in `stream`.
        workers: Threads that decode in each worker; None means its cores.
    """
    if not found:
        return
    ray, data = import_ray()
    with _connected(ray, ray_workers):
        blocks = data.from_items(
            [
                {"number": i, "path": os.path.abspath(item.path), "problem": item.problem or ""}
                for i, item in enumerate(found)
            ],
            override_num_blocks=-(-len(found) // BLOCK),
        )
        threads = str(ray_workers.num_cpus)
        computed = blocks.map_batches(
            Worker,
            fn_constructor_args=(
                model if "://" in model or not os.path.exists(model) else os.path.abspath(model),
                *(wanted, batch_size, workers or ray_workers.num_cpus),
            ),
            batch_size=BLOCK,
            compute=data.ActorPoolStrategy(size=ray_workers.count),
            num_cpus=ray_workers.num_cpus,
            num_gpus=ray_workers.num_gpus,
            runtime_env={
                "env_vars": {name: os.environ[name] for name in FORWARDED if name in os.environ}
                | {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
            },
        )
        position = 0
        for block in computed.iter_batches(batch_size=None, prefetch_batches=1):
            rows = _rows(block, found, position)
            position += len(rows)
            yield rows
    if position != len(found):
        raise RuntimeError(f"Ray must return {len(found)} rows. Received: {position}")


def import_ray() -> tuple[Any, Any]:
    """Imports ray and ray.data, or raises an error that says how to install them."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(
            "ray must be installed to run on several machines: pip install 'keras3-vit[ray]'. "
            f"({error})"
        ) from error
    return ray, ray.data


@contextlib.contextmanager
def _connected(ray: Any, ray_workers: RayWorkers) -> Iterator[None]:
    """A connection to a cluster, which is kept if the caller has one; the rows keep their order."""
    ours = not ray.is_initialized()
    if ours:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"address": ray_workers.address, "log_to_driver": False}
            if ray_workers.address is None and "RAY_ADDRESS" not in os.environ:
                # More workers than cores share them. They would wait for each other otherwise.
                wanted = ray_workers.count * ray_workers.num_cpus
                options["num_cpus"] = max(wanted, os.cpu_count() or 1)
            ray.init(**options, logging_level="warning")
    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False  # the caller has one
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        context.execution_options.preserve_order, context.enable_progress_bars = before
        if ours:
            ray.shutdown()


def _packed(values: np.ndarray | None, width: int) -> bytes:
    """The numbers of a row; none after an error."""
    if values is None:
        return b""
    if len(values) != width:
        raise RuntimeError(f"rows must have {width} numbers. Received: {len(values)}")
    return np.asarray(values, "<f4").tobytes()


def _rows(block: Columns, found: Sequence[FoundImage], position: int) -> list[Row]:
    """The rows of a block, which must be those after the last one."""
    numbers = np.asarray(block["number"])
    if not np.array_equal(numbers, np.arange(position, position + len(numbers))):
        raise RuntimeError(f"Ray must return rows from {position} on. Received: {numbers[:3]}, ...")
    return [
        Row(
            found[position + i].path,
            None if error else np.frombuffer(values, "<f4"),
            str(error) or None,
        )
        for i, (values, error) in enumerate(zip(block["values"], block["error"], strict=True))
    ]

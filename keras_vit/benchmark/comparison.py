"""A model and its exports, each timed in a process of its own, in turns."""

import dataclasses
import importlib
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.benchmark import timing
from keras_vit.benchmark.kinds import KERAS, Kind, chosen
from keras_vit.export.accuracy import batches, check_max_drop
from keras_vit.model import ViT
from keras_vit.runtime import KerasRuntime
from keras_vit.runtime.base import usable_cores

BATCH_SIZES = (1, 8, 32)
ROUNDS = 2
"""Each file is timed so often, in this order and then backwards: a machine's speed drifts."""
RANDOM = 16
"""Random pictures, if there are no others."""


@dataclasses.dataclass(kw_only=True)
class Measured:
    """A kind of file, and what was measured.

    Attributes:
        kind: The kind.
        times: Seconds of each call, by batch size.
        size: Bytes of the file.
        memory: Bytes that a process grows by when it opens and runs the file, at most.
        difference: The largest difference of a logit from the model's, as a share of the range of
            the model's logits; None for the model itself.
        points: Percentage points of accuracy that are lost, or None without labels.
        problem: Why there are no figures, or None.
    """

    kind: Kind
    times: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    size: int | None = None
    memory: int | None = None
    difference: float | None = None
    points: float | None = None
    problem: str | None = None

    def speed(self, batch_size: int) -> float:
        """Images a second, at the median time of a batch."""
        return batch_size / statistics.median(self.times[batch_size])

    def latency(self, batch_size: int, percent: float) -> float:
        """Milliseconds in which this share of the calls is done."""
        return 1000 * float(np.percentile(self.times[batch_size], percent))

    def command(self) -> str:
        """The options of `keras-vit export` that write this file."""
        options = "".join(f" --{name} {value}" for name, value in self.kind.options.items())
        folder = " --calibration FOLDER" if self.kind.calibrated else ""
        return f"--to {self.kind.target}{options}{folder}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All rows, the model itself first.

    Attributes:
        rows: Its rows.
        batch_sizes: Images of a call.
        machine: What was measured on.
        images: How many labeled images the accuracies are from; 0 without.
        max_drop: The most points that a winner may lose.
    """

    rows: list[Measured]
    batch_sizes: tuple[int, ...]
    machine: str
    images: int
    max_drop: float

    def winner(self, batch_size: int) -> Measured:
        """The fastest of those that do not lose more than `max_drop` points."""
        rows = [row for row in self.rows if row.times and (row.points or 0) <= self.max_drop]
        return max(rows, key=lambda row: row.speed(batch_size))

    def as_json(self) -> dict[str, Any]:
        """The same as JSON can hold it, but for the single times."""
        return {
            "machine": self.machine,
            "labeled_images": self.images,
            "max_drop": self.max_drop,
            "rows": [self._row(row) for row in self.rows],
            "fastest": {str(size): self.winner(size).kind.name for size in self.batch_sizes},
        }

    def _row(self, row: Measured) -> dict[str, Any]:
        facts = {"kind": row.kind.name, "problem": row.problem}
        if row.times:
            sizes = self.batch_sizes
            facts |= {
                "images_per_second": {str(size): row.speed(size) for size in sizes},
                "p50_ms": {str(size): row.latency(size, 50) for size in sizes},
                "p99_ms": {str(size): row.latency(size, 99) for size in sizes},
                "calls": {str(size): len(row.times[size]) for size in sizes},
                "bytes": row.size,
                "memory_bytes": row.memory,
                "difference": row.difference,
                "points_lost": row.points,
            }
        return facts


def compare(
    model: ViT,
    *,
    only: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 3.0,
    calibration: Any = None,
    accuracy_data: Any = None,
    max_drop: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Exports a model in every way that is possible here, and times each file in its own runtime.

    Each file is exported, verified, and opened by `keras_vit.runtime` in a process of its own,
    twice. What cannot be exported has a `problem` instead of figures.

    Args:
        model: A `ViT`.
        only: Targets ("onnx") and names of kinds ("onnx:dynamic"); None means all.
        batch_sizes: Images of a call.
        seconds: How long each file is timed with each batch size, half of it each time.
        calibration: Typical images for int8, as the exports take them; None leaves int8 out.
        accuracy_data: Labeled images as the exports take them, on which the accuracy is measured;
            None means that random pictures are compared.
        max_drop: The most percentage points that a winner may lose on `accuracy_data`.
        progress: Called with the steps that are done, their number, and what comes next.

    Returns:
        A `Comparison`.

    Example:

    >>> found = keras_vit.benchmark.compare(model, only=["onnx", "openvino"])
    >>> found.winner(batch_size=1).kind.name
    'openvino:bfloat16'
    """
    kinds = chosen(only)
    _check(model, batch_sizes, seconds, max_drop)
    pictures, labels = _pictures(model, accuracy_data)
    rows = [Measured(kind=kind, problem=kind.left_out(calibration is not None)) for kind in kinds]
    steps = _Counted(sum(row.problem is None for row in rows) * (1 + ROUNDS), progress)
    with tempfile.TemporaryDirectory(prefix="keras_vit-") as name:
        folder = Path(name)
        np.save(folder / timing.PICTURES, pictures)
        for row in rows:
            if row.problem is None:
                steps.next(f"Writing {row.kind.name}")
                _write(row, model, _place(row, folder), calibration)
        for turn in range(ROUNDS):
            for row in rows[:: -1 if turn % 2 else 1]:
                if row.problem is None:
                    steps.next(f"Timing {row.kind.name}")
                    _time(row, folder, batch_sizes, seconds / ROUNDS)
        steps.next("")
        _judge(rows, folder, labels)
    return Comparison(rows, tuple(batch_sizes), _machine(), len(labels), max_drop)


class _Counted:
    """Tells how many steps of the work are done."""

    def __init__(self, total, progress):
        self.total, self.progress, self.begun = total, progress, 0

    def next(self, text):
        if self.progress is not None:
            self.progress(min(self.begun, self.total), self.total, text)
        self.begun += 1


def _check(model: Any, batch_sizes: Any, seconds: Any, max_drop: Any) -> None:
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a ViT. Received: {type(model).__name__}")
    if model.config.pooling is None:
        raise ValueError("model must have pooling to be compared. Received: pooling=None")
    whole = [isinstance(size, int) and not isinstance(size, bool) for size in batch_sizes]
    if not batch_sizes or not all(whole) or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be positive ints. Received: batch_sizes={batch_sizes}")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"seconds must be a positive number. Received: seconds={seconds!r}")
    check_max_drop(max_drop)


def _pictures(model: ViT, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images `(N, H, W, C)` to compare the outputs of, and their labels; random ones have none."""
    if data is None:
        shape = (RANDOM, *model.config.input_shape)
        pixels = np.random.default_rng(0).integers(0, 256, shape, "uint8")
        return pixels, np.zeros((0,), "int64")
    parts = list(batches(KerasRuntime(model), data))
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return images, labels


def _write(row: Measured, model: ViT, folder: Path, calibration: Any) -> None:
    """Writes the file of a row, or notes why that is impossible."""
    folder.mkdir()
    path = folder / row.kind.file
    if row.kind.target == KERAS:
        model.save(path)
        row.size = path.stat().st_size
        return
    options: dict[str, Any] = dict(row.kind.options)
    if row.kind.calibrated:
        options["calibration"] = calibration
    if row.kind.target == "tflite":
        options["output"] = "logits" if model.config.num_classes else "features"
    module = importlib.import_module(f"keras_vit.export.{row.kind.target}.export")
    export = getattr(module, f"export_{row.kind.target}")
    try:
        row.size = export(model, path, **options).size
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        row.problem = str(error)


def _place(row: Measured, folder: Path) -> Path:
    """The folder of a row's file and outputs."""
    return folder / row.kind.name.replace(":", "-")


def _time(row: Measured, folder: Path, batch_sizes: Sequence[int], seconds: float) -> None:
    place = _place(row, folder)
    path = place / row.kind.file
    try:
        found = timing.time_file(path, folder / timing.PICTURES, list(batch_sizes), seconds)
    except RuntimeError as error:
        row.problem, row.times = str(error), {}
        return
    for size, times in found.times.items():
        row.times.setdefault(size, []).extend(times)
    row.memory = max(row.memory or 0, found.memory)
    np.save(place / timing.OUTPUTS, found.outputs)


def _judge(rows: list[Measured], folder: Path, labels: np.ndarray) -> None:
    """Compares the outputs with those of the model, which comes first."""
    found = [np.load(_place(row, folder) / timing.OUTPUTS) if row.times else None for row in rows]
    wanted = found[0]
    if wanted is None:
        raise RuntimeError(f"The model itself could not be run. {rows[0].problem}")
    width = float(np.ptp(wanted)) or 1.0
    for row, outputs in zip(rows, found, strict=True):
        if outputs is None:
            continue
        if row.kind.target != KERAS:
            row.difference = float(np.abs(outputs - wanted).max()) / width
        if len(labels):
            right = [int((scores.argmax(-1) == labels).sum()) for scores in (wanted, outputs)]
            row.points = 100 * (right[0] - right[1]) / len(labels)


def _machine() -> str:
    return f"{_processor()}, {usable_cores()} cores; Keras on {keras.backend.backend()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

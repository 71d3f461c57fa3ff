"""OpenVINO's two files, exported by keras_vit and run by OpenVINO on the CPU."""

import functools
import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.runtime.base import (
    RECORD,
    check_input,
    check_threads,
    described,
    parse_record,
)
from keras_vit.runtime.named_outputs import NamedOutputsRuntime
from keras_vit.weights.files.documents import check_fields, one_of, stated

OUTPUTS = {"logits", "probabilities", "features"}
WEIGHTS = ".bin"
HINTS = {"float32": "f32", "bfloat16": "bf16"}
"""OpenVINO's names of the dtypes."""


class OpenVINORuntime(NamedOutputsRuntime):
    """An `.xml` file that `export_openvino` wrote, with the `.bin` file beside it, on the CPU.

    OpenVINO would compute in bfloat16 wherever the processor can. Here it computes in the dtype of
    the export.

    Args:
        path: The `.xml` file.
        num_threads: Number of threads; None means OpenVINO's default, one per core.

    Attributes:
        record: The files' metadata: `config`, `labels`, `dtype` and so on.

    Example:

    >>> model = OpenVINORuntime("flowers.xml", num_threads=2)
    >>> model.probabilities(keras_vit.preprocessing.preprocess(image, model.config))
    """

    kind = "openvino"

    def __init__(self, path: str | os.PathLike, num_threads: int | None = None):
        check_threads(num_threads)
        model = _read(path)
        self.record = _record(model, path)
        _check_weights(path, self.record)
        super().__init__(path, **described(path, self.record))
        (taken,) = model.inputs
        shape = taken.get_partial_shape()
        check_input(path, self.config, [0, *(axis.get_length() for axis in list(shape)[1:])])
        self.images = self.record["images"]
        try:
            self._compiled = compile_model(model, self.record["dtype"], num_threads)
        except RuntimeError as error:
            raise _not_opened(path, error) from error
        self.shapes = {}
        for output in self._compiled.outputs:  # which has the names of several nodes
            for name in output.get_names() & OUTPUTS:
                self.shapes[name] = [axis.get_max_length() for axis in output.get_partial_shape()]

    def _compute(self, images: Any) -> list[np.ndarray]:
        with self._one_at_a_time:  # every call uses the same buffers
            found = self._compiled({"images": np.ascontiguousarray(images)})
        return [found[name] for name in self.shapes]

    def _engine(self) -> str:
        from importlib.metadata import version

        return f"OpenVINO {version('openvino')}"


def import_openvino() -> Any:
    """Imports openvino, or raises an error that says how to install it."""
    try:
        import openvino
    except ImportError as error:
        raise ImportError(
            "openvino must be installed to run OpenVINO's files: pip install 'keras3-vit[openvino]'"
        ) from error
    return openvino


@functools.cache
def core() -> Any:
    """OpenVINO's `Core`, one for the whole process.

    Each replaces the stack on which the process handles signals, and restores the one before when
    it ends. If two do not end in reverse order, that one is gone: the next signal, such as the
    SIGTERM after which a run saves its state, would be a segmentation fault.
    """
    return import_openvino().Core()


def compile_model(model: Any, dtype: str, num_threads: int | None = None) -> Any:
    """A model of OpenVINO, compiled for the CPU to compute in a dtype."""
    settings = {"INFERENCE_PRECISION_HINT": HINTS[dtype], "PERFORMANCE_HINT": "LATENCY"}
    if num_threads is not None:
        settings["INFERENCE_NUM_THREADS"] = str(num_threads)
    return core().compile_model(model, "CPU", settings)


def weights_hash(path: str | os.PathLike) -> str:
    """SHA-256 of the `.bin` file beside an `.xml` file."""
    with Path(path).with_suffix(WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: str | os.PathLike) -> Any:
    for file in (Path(path), Path(path).with_suffix(WEIGHTS)):
        if not file.is_file():
            raise FileNotFoundError(
                f"path must be an .xml file with its {WEIGHTS} file beside it. "
                f"Received: path={os.fspath(path)!r}, without {file.name}"
            )
    try:
        return core().read_model(os.fspath(path))
    except Exception as error:  # a RuntimeError of its own with the place in its sources
        raise _not_opened(path, error) from error


def _not_opened(path: str | os.PathLike, error: Exception) -> ValueError:
    version = import_openvino().__version__
    return ValueError(
        f"path must be an .xml file that OpenVINO {version} opens. "
        f"Received: path={os.fspath(path)!r}: {error}"
    )


def _record(model: Any, path: str | os.PathLike) -> dict[str, Any]:
    """The metadata of files that keras_vit wrote."""
    data = None
    if model.has_rt_info([RECORD]):
        data = model.get_rt_info([RECORD]).astype(str).encode()
    record = parse_record(path, data, "an OpenVINO", "export_openvino")
    check_fields(path, record, {"dtype": stated(one_of(*HINTS))})
    return record


def _check_weights(path: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Raises if the `.bin` file is not the one that was written with the `.xml` file."""
    if not hmac.compare_digest(str(record.get("weights_sha256")), weights_hash(path)):
        raise ValueError(
            f"path must have the {WEIGHTS} file beside it that was exported with it. "
            f"Received: path={os.fspath(path)!r} with another or a damaged one"
        )

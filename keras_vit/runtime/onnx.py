"""An ONNX file that we exported, on ONNX Runtime."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.runtime.base import Runtime, check_input, check_threads, stated
from keras_vit.weights.files.rules import parse_object

RECORD = "keras_vit"
"""The metadata that says what the file is, as JSON."""
FORMAT = 1
"""Of that JSON."""

AT_ONCE = 32  # images


class OnnxRuntime(Runtime):
    """An `.onnx` file that `export_onnx` wrote, on the processor.

    Args:
        path: The file.
        num_threads: Threads to run on; None means ONNX Runtime's default, one a core.

    Attributes:
        record: What the file says of itself: `config`, `labels`, `dtype` and so on.

    Example:

    >>> model = OnnxRuntime("flowers.onnx", num_threads=2)
    >>> model.probabilities(keras_vit.preprocessing.preprocess(picture, model.config))
    """

    kind = "onnx"

    def __init__(self, path: str | os.PathLike, num_threads: int | None = None):
        check_threads(num_threads)
        self._session = _session(path, num_threads)
        self.record = _record(self._session.get_modelmeta().custom_metadata_map, path)
        super().__init__(path, **stated(path, self.record))
        check_input(path, self.config, self._session.get_inputs()[0].shape)
        self.images = self.record["images"]
        self._shapes = {output.name: output.shape for output in self._session.get_outputs()}

    def run(self, images: Any) -> dict[str, np.ndarray]:
        """All the file's outputs by name, for images of its own dtype."""
        self._check_raw(images)
        return self._outputs(images)

    def _outputs(self, images: Any) -> dict[str, np.ndarray]:
        parts = [
            self._session.run(list(self._shapes), {"images": images[i : i + AT_ONCE]})
            for i in range(0, len(images), AT_ONCE)
        ]
        if not parts:
            parts = [[np.zeros((0, *shape[1:]), "float32") for shape in self._shapes.values()]]
        return dict(zip(self._shapes, map(np.concatenate, zip(*parts, strict=True)), strict=True))

    def probabilities(self, images: Any) -> np.ndarray:
        self._check_head()
        return self._run(self._checked(images))["probabilities"]

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        return self._outputs(images)

    def _engine(self) -> str:
        from importlib.metadata import version

        return f"ONNX Runtime {version('onnxruntime')}"


def import_onnxruntime() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "onnxruntime must be installed to run ONNX files: pip install 'keras3-vit[onnx]'"
        ) from error
    return onnxruntime


def _session(path: str | os.PathLike, num_threads: int | None) -> Any:
    onnxruntime = import_onnxruntime()
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must be a file. Received: path={os.fspath(path)!r}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # an error is raised, and need not be printed too
    # Threads that wait busily take the processor from whoever else works, Keras among them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    try:
        return onnxruntime.InferenceSession(
            os.fspath(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its own classes have no base but this one
        raise ValueError(
            f"path must be an ONNX file that ONNX Runtime {onnxruntime.__version__} opens. "
            f"Received: path={os.fspath(path)!r}, of which it says: {error}"
        ) from error


def _record(metadata: Mapping[str, str], path: str | os.PathLike) -> dict[str, Any]:
    """Our metadata in a file, or an error where it has none."""
    if RECORD not in metadata:
        raise ValueError(
            "path must be an ONNX file with metadata, as keras_vit.export_onnx writes it. "
            f"Received: path={os.fspath(path)!r}"
        )
    record = parse_object(Path(path), metadata[RECORD].encode())
    if record.get("format") != FORMAT:
        raise ValueError(
            f"path must be a file of format {FORMAT}; a newer keras_vit may have written it. "
            f"Received: format {record.get('format')!r} in {os.fspath(path)!r}"
        )
    return record

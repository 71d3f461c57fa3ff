"""An ONNX file exported by keras_vit, run by ONNX Runtime."""

import os
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
from keras_vit.weights.files.rules import refusal, refused_as


class OnnxRuntime(NamedOutputsRuntime):
    """An `.onnx` file that `export_onnx` wrote, run on the CPU.

    A quantized file scales the input of some or all products by its range over the whole batch.
    Such a file computes one image at a time here: an image would change the outputs of others.

    Args:
        path: The file.
        num_threads: Number of threads; None means ONNX Runtime's default, one per core.

    Attributes:
        record: The file's metadata: `config`, `labels`, `dtype` and so on.

    Example:

    >>> model = OnnxRuntime("flowers.onnx", num_threads=2)
    >>> model.probabilities(keras_vit.preprocessing.preprocess(image, model.config))
    """

    kind = "onnx"

    def __init__(self, path: str | os.PathLike, num_threads: int | None = None):
        check_threads(num_threads)
        self._session = _session(path, num_threads)
        with refused_as(path, "have metadata in UTF-8", (UnicodeDecodeError,)):
            text = self._session.get_modelmeta().custom_metadata_map.get(RECORD)
        data = None if text is None else text.encode()
        self.record = parse_record(path, data, "an ONNX", "export_onnx")
        super().__init__(path, **described(path, self.record))
        self.images = self.record["images"]
        self.shapes = {output.name: output.shape for output in self._session.get_outputs()}
        if self.record.get("quantize") is not None:  # in "int8", the first and last product
            self.at_once = 1
        self._check_sides()

    def _check_sides(self) -> None:
        """Checks that input and outputs are those that the metadata describes."""
        taken = [(item.name, item.type) for item in self._session.get_inputs()]
        kind = "tensor(uint8)" if self.images == "uint8" else "tensor(float)"
        if taken != [("images", kind)]:
            raise refusal(self.path, f"take images as one {kind}", inputs=taken)
        check_input(self.path, self.config, self._session.get_inputs()[0].shape)
        wanted = {"features", *(("logits", "probabilities") if self.config.num_classes else ())}
        if not wanted <= self.shapes.keys():
            rule = f"return {', '.join(sorted(wanted))}"
            raise refusal(self.path, rule, outputs=list(self.shapes))

    def _compute(self, images: Any) -> list[np.ndarray]:
        with refused_as(self.path, "be an ONNX file that ONNX Runtime runs", (Exception,)):
            return self._session.run(list(self.shapes), {"images": images})

    def _engine(self) -> str:
        from importlib.metadata import version

        return f"ONNX Runtime {version('onnxruntime')}"


def import_onnxruntime() -> Any:
    """Imports onnxruntime, or raises an error that says how to install it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "onnxruntime must be installed to run ONNX files: pip install 'keras3-vit[onnx]'"
        ) from error
    return onnxruntime


def session_options(num_threads: int | None) -> Any:
    """How a session is opened."""
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need not be printed too
    # Busy waiting would take the CPU from other work, such as Keras'.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    return options


def _session(path: str | os.PathLike, num_threads: int | None) -> Any:
    onnxruntime = import_onnxruntime()
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must be a file. Received: path={os.fspath(path)!r}")
    try:
        return onnxruntime.InferenceSession(
            os.fspath(path), session_options(num_threads), providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its own classes have no base but this one
        raise ValueError(
            f"path must be an ONNX file that ONNX Runtime {onnxruntime.__version__} opens. "
            f"Received: path={os.fspath(path)!r}: {error}"
        ) from error

"""A TFLite file exported by keras_vit, run by LiteRT."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.runtime.base import Runtime, check_threads, described
from keras_vit.runtime.tflite_file import check_graph, read_record
from keras_vit.runtime.tflite_interpreter import open_interpreter
from keras_vit.weights.files.documents import check_fields, one_of, stated
from keras_vit.weights.files.rules import refusal, refused_as

OUTPUTS = ("probabilities", "logits", "features")
AT_ONCE = 32  # images, if the file takes any number
LEAST = float(np.finfo("float32").tiny)  # for the logarithm of a probability of 0


class TFLiteRuntime(Runtime):
    """A `.tflite` file that `export_tflite` wrote.

    A file has one output. If it is probabilities, `logits` returns their logarithms. `features`
    needs a file that was exported with them.

    Args:
        path: The file.
        num_threads: Number of threads; None means LiteRT's default, which is one.

    Attributes:
        record: The file's metadata: `config`, `labels`, `output` and so on.
        output: "probabilities", "logits" or "features".
        batch_size: The fixed batch size of the file, or None for any.

    Example:

    >>> model = TFLiteRuntime("flowers.tflite", num_threads=2)
    >>> model.probabilities(keras_vit.preprocessing.preprocess(image, model.config))
    """

    kind = "tflite"

    def __init__(self, path: str | os.PathLike, num_threads: int | None = None):
        check_threads(num_threads)
        content = Path(path).read_bytes()
        self.record = read_record(content, path)
        super().__init__(path, **described(path, self.record))
        check_fields(path, self.record, {"output": stated(one_of(*OUTPUTS))})
        self.images = self.record["images"]
        self.output = self.record["output"]
        self.outputs = ("features",) if self.output == "features" else ("logits",)
        self.log_probabilities = self.output == "probabilities"
        check_graph(content, path, self.config)
        with self._refused():
            self._interpreter = open_interpreter(content, num_threads=num_threads)
            (self._input,) = self._interpreter.get_input_details()
            (self._output,) = self._interpreter.get_output_details()
        if self._input["dtype"] != np.dtype(self.images):
            kind = str(np.dtype(self._input["dtype"]))
            raise refusal(path, f"take images as {self.images}", input=kind)
        batch = int(self._input["shape_signature"][0])
        self.batch_size = batch if batch > 0 else None
        self._size = int(self._input["shape"][0])

    def run(self, images: Any) -> np.ndarray:
        """The file's output for any number of images of its dtype, in float32.

        A file with a fixed batch size runs several times; the last batch is padded with zeros.
        """
        array = np.asarray(images)
        if array.dtype != self._input["dtype"] or array.shape[1:] != self.config.input_shape:
            raise ValueError(
                f"images must be {np.dtype(self._input['dtype'])} of shape (batch, "
                f"{', '.join(map(str, self.config.input_shape))}). "
                f"Received: {array.dtype} of shape {array.shape}"
            )
        self._check_raw(array)
        return self._output_for(array)

    def _output_for(self, array: np.ndarray) -> np.ndarray:
        size = self.batch_size or AT_ONCE
        with self._one_at_a_time:  # an interpreter holds one input and one output
            parts = [self._invoke(array[i : i + size]) for i in range(0, len(array), size)]
        if not parts:
            return np.zeros((0, *self._output["shape"][1:]), "float32")
        return np.concatenate(parts)

    def _invoke(self, images: np.ndarray) -> np.ndarray:
        count = len(images)
        if self.batch_size and count < self.batch_size:
            rest = np.zeros((self.batch_size - count, *images.shape[1:]), images.dtype)
            images = np.concatenate([images, rest])
        if len(images) != self._size:
            with self._refused():
                self._interpreter.resize_tensor_input(self._input["index"], images.shape)
                self._interpreter.allocate_tensors()
            self._size = len(images)
        self._interpreter.set_tensor(self._input["index"], images)
        with self._refused():
            self._interpreter.invoke()
        values = self._interpreter.get_tensor(self._output["index"])
        if not values.ndim or len(values) < count:
            raise refusal(self.path, "return a row for each image", output=values.shape)
        return values[:count].astype("float32")

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        if wanted not in self.outputs:
            raise ValueError(
                f"{self.path} must have been exported with output={wanted!r}. "
                f"Received: output={self.output!r}"
            )
        values = self._output_for(images)
        if self.log_probabilities:
            return {"probabilities": values, "logits": np.log(np.maximum(values, LEAST))}
        return {wanted: values}

    def _refused(self) -> AbstractContextManager[None]:
        """Raises LiteRT's errors with the file's name."""
        rule = "be a TFLite file that LiteRT runs"
        return refused_as(self.path, rule, (ValueError, RuntimeError, MemoryError))

    def _engine(self) -> str:
        import ai_edge_litert

        return f"LiteRT {ai_edge_litert.__version__}"

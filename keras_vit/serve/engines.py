"""The engine that runs a served model: the fastest one that is installed for its file.

A SavedModel runs on TensorFlow, a TFLite file on LiteRT, an ONNX file on ONNX Runtime. A model that
Keras runs (a `.keras` file, a run folder, a checkpoint) is folded and compiled by TensorFlow, or
exported to ONNX if TensorFlow is not installed; Keras itself is the last choice.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from keras_vit import runtime
from keras_vit.model import ViT
from keras_vit.model_weights import with_token_merging
from keras_vit.preprocessing import MAX_PIXELS
from keras_vit.runtime import Runtime
from keras_vit.serve import pictures
from keras_vit.serve.errors import invalid
from keras_vit.serve.signatures import Signature, class_labels, signatures_of

ENGINES = ("auto", "tensorflow", "onnx", "keras")
SCORES, FEATURES = "scores", "features"


@dataclasses.dataclass(frozen=True)
class Engine:
    """An opened model.

    Attributes:
        runtime: Runs it.
        signatures: Its signatures by name.
        labels: The names of all classes.
        decode: From image files to uint8 pixels `(B, H, W, C)`. A SavedModel decodes them by its
            own graph, so that its answers are those of TensorFlow Serving.
        model: The `ViT`, if Keras has it in memory, for explanations. It merges no tokens: in a
            model that does, they are no patches any more.
    """

    runtime: Runtime
    signatures: Mapping[str, Signature]
    labels: np.ndarray
    decode: Callable[[Sequence[bytes]], np.ndarray]
    model: ViT | None

    def run(self, images: np.ndarray, wanted: str) -> dict[str, np.ndarray]:
        """Runs checked images; returns `probabilities` and `logits`, or `features`.

        Args:
            images: `(B, H, W, C)` of the dtype `runtime.images`.
            wanted: "scores" or "features".
        """
        return _run(self.runtime, images, wanted)


def open_engine(path: str | os.PathLike, engine: str = "auto", *, explain: bool = True) -> Engine:
    """Opens a model on an engine, and runs it once.

    Args:
        path: Anything that `keras_vit.runtime.open` opens.
        engine: One of `ENGINES`, for a model that Keras runs; an export has one engine.
        explain: Whether to keep a Keras model in memory for explanations.
    """
    if engine not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"engine must be one of {known}. Received: engine={engine!r}")
    opened = runtime.open(path, all_cores=True)
    model = None
    if isinstance(opened, runtime.KerasRuntime):
        model = opened.model
        opened = _fastest(opened) if engine == "auto" else _on(opened, engine)
    images = np.zeros((1, *opened.config.input_shape), opened.images)
    if "features" not in opened.outputs:
        kinds = (SCORES,)
    elif opened.config.num_classes and "logits" in opened.outputs:
        kinds = (SCORES, FEATURES)
    else:
        kinds = (FEATURES,)
    computed = {kind: _run(opened, images, kind) for kind in kinds}
    return Engine(
        opened,
        signatures_of(opened, computed),
        class_labels(opened),
        _decoder(opened),
        None if model is None or not explain else _unmerged(model),
    )


def _unmerged(model: ViT) -> ViT:
    """The same model without token merging."""
    return with_token_merging(model, 0) if model.config.token_merging else model


def _decoder(opened: Runtime) -> Callable[[Sequence[bytes]], np.ndarray]:
    if not isinstance(opened, runtime.SavedModelRuntime):
        return functools.partial(pictures.decode, config=opened.config)
    from keras_vit.export.saved_model.image_bytes import decoder

    most = opened.manifest.get("pixels", {}).get("max_pixels", MAX_PIXELS)
    return decoder(opened.config, most)


def _fastest(opened: runtime.KerasRuntime) -> Runtime:
    """Keras' model on the fastest engine that takes it."""
    for name, packages in (("tensorflow", ("tensorflow",)), ("onnx", ("onnx", "onnxruntime"))):
        if all(map(importlib.util.find_spec, packages)):
            try:
                return _on(opened, name)
            except ValueError:  # a quantized model, which only Keras runs
                continue
    return opened


def _on(opened: runtime.KerasRuntime, engine: str) -> Runtime:
    if engine == "keras":
        return opened
    if engine == "tensorflow":
        from keras_vit.export.folded_runtime import FoldedRuntime

        return FoldedRuntime(opened.model, opened.path)
    from keras_vit.export.onnx.export import export_onnx
    from keras_vit.runtime.onnx import OnnxRuntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        export_onnx(opened.model, file)
        return OnnxRuntime(file)


def _run(opened: Runtime, images: np.ndarray, wanted: str) -> dict[str, np.ndarray]:
    if opened.kind == "tflite" and len(images) > 1:
        # LiteRT is no faster on several images, and packs the weights again for each new count.
        parts = [_run(opened, images[i : i + 1], wanted) for i in range(len(images))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    count = len(images)
    if opened.kind == "keras":  # JAX compiles, and TensorFlow traces, each new count of images
        rest = (1 << (count - 1).bit_length()) - count
        images = np.concatenate([images, np.zeros((rest, *images.shape[1:]), images.dtype)])
    try:
        found = opened.scores(images) if wanted == SCORES else {"features": opened.features(images)}
    except Exception as error:  # TensorFlow's own classes, which a SavedModel's checks raise
        if reason := re.search(r"assertion failed: \[(.*?)\]", str(error)):
            raise invalid(reason[1]) from error
        raise
    return {name: array[:count] for name, array in found.items()}

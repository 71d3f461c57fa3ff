"""Opens saved and exported models of any format, and runs images through them."""

import os
from pathlib import Path

from keras_vit.paths import as_path
from keras_vit.runtime.base import Runtime, usable_cores
from keras_vit.runtime.keras_model import KerasRuntime, load_keras
from keras_vit.runtime.saved_model import SavedModelRuntime, check_files, version_folder

__all__ = ["KerasRuntime", "Runtime", "SavedModelRuntime", "open"]


def open(path: str | os.PathLike, *, all_cores: bool = False) -> Runtime:
    """Opens a model to run it.

    Args:
        path: A `.keras` file; a run folder with `model.keras`; a `.tflite`, `.onnx` or `.xml` file
            exported by keras_vit; a SavedModel's version folder, or its parent, whose highest
            version is opened; or anything that `keras_vit.from_pretrained` reads.
        all_cores: Whether a `.tflite` file runs on all cores, of which LiteRT takes one by default.
            The other engines take all of them in any case.

    Returns:
        A `Runtime`. The files of a SavedModel are checked against the hashes in its MANIFEST.json.

    Example:

    >>> model = keras_vit.runtime.open("savedmodels/flowers")
    >>> model.probabilities(keras_vit.preprocessing.preprocess(images, model.config))
    """
    as_path("path", path)
    if "://" in os.fspath(path):
        from keras_vit.weights import fetch  # a network client, which local files do not need

        path = fetch.fetch_weights(path)
    place = Path(path)
    if place.is_dir() and (place / "model.keras").is_file():
        place = place / "model.keras"
    if place.suffix == ".keras":
        return KerasRuntime(load_keras(place), place)
    if place.suffix == ".tflite":
        from keras_vit.runtime.tflite import TFLiteRuntime

        return TFLiteRuntime(place, num_threads=usable_cores() if all_cores else None)
    if place.suffix == ".onnx":
        from keras_vit.runtime.onnx import OnnxRuntime

        return OnnxRuntime(place)
    if place.suffix == ".xml":
        from keras_vit.runtime.openvino import OpenVINORuntime

        return OpenVINORuntime(place)
    if (folder := version_folder(place)) is not None:
        check_files(folder)
        return SavedModelRuntime(folder)
    from keras_vit.weights.load import from_pretrained

    return KerasRuntime(from_pretrained(path), path)

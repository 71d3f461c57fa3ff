"""Exports from JAX and torch, in a child process where Keras runs on TensorFlow.

A process cannot change its Keras backend. The model is passed as a `.keras` file and the arguments
as JSON, in a temporary folder. The result, or the error, comes back the same way.
"""

import builtins
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import runtime
from keras_vit.export.requirement import check_tensorflow
from keras_vit.model import ViT

MODEL, REQUEST, ANSWER = "model.keras", "request.json", "answer.json"
IMAGES, LABELED = "images.npy", ("labeled_images.npy", "labels.npy")


def in_tensorflow(
    function: str,
    model: ViT,
    arguments: Mapping[str, Any],
    images: np.ndarray | None = None,
    labeled: tuple[np.ndarray, ...] | None = None,
) -> dict[str, Any]:
    """Calls a function of this package in a child process on TensorFlow.

    Args:
        function: "module:name" in `keras_vit.export`. It is called as
            `function(model, verify=images, accuracy_data=labeled, **arguments)` and must return
            what JSON can hold.
        model: A `ViT` on any backend.
        arguments: Arguments that JSON can hold.
        images: The argument `verify`.
        labeled: The argument `accuracy_data`: images and labels.
    """
    check_tensorflow()
    with tempfile.TemporaryDirectory(prefix="keras_vit-") as name:
        folder = Path(name)
        model.save(folder / MODEL)
        if images is not None:
            np.save(folder / IMAGES, images)
        for place, array in zip(LABELED, labeled or (), strict=False):
            np.save(folder / place, array)
        request = {"function": function, "arguments": dict(arguments)}
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            # The child imports the same packages as this process.
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "CUDA_VISIBLE_DEVICES": "-1",  # this process holds the memory of the GPUs
        }
        # Its output goes to stderr, because stdout is for results.
        command = [sys.executable, "-m", __name__, name]
        done = subprocess.run(command, env=environment, stdout=2, check=False)
        if not (folder / ANSWER).is_file():
            raise RuntimeError(f"The export's process ended without an answer: {done.returncode}")
        answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    if "error" in answer:
        kind = getattr(builtins, answer["error"], RuntimeError)
        error = kind(answer["message"])
        error.add_note(answer["traceback"])
        raise error
    return answer["result"]


def main(folder: Path) -> None:
    """Runs the request in a folder and writes the answer there."""
    # "Assets written to" would name the temporary folder.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    try:
        opened = runtime.open(folder / MODEL)
        if not isinstance(opened, runtime.KerasRuntime):
            raise TypeError(f"A model was expected. Received: {opened.kind}")
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(f"keras_vit.export.{module}"), name)
        images = np.load(folder / IMAGES) if (folder / IMAGES).is_file() else None
        labeled = None
        if (folder / LABELED[0]).is_file():
            labeled = tuple(np.load(folder / place) for place in LABELED)
        given = {"verify": images, "accuracy_data": labeled, **request["arguments"]}
        answer = {"result": function(opened.model, **given)}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        answer["traceback"] = traceback.format_exc()
    temporary = folder / f"{ANSWER}.tmp"
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(temporary, folder / ANSWER)


if __name__ == "__main__":
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError("This process must run on TensorFlow.")
    main(Path(sys.argv[1]))

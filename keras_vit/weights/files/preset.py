"""Presets of KerasHub: a folder with a backbone, and often with a task around it.

A preset holds `config.json` and `model.weights.h5` of the backbone, `task.json` and
`task.weights.h5` of what a task adds, and `image_converter.json`, from pixels to the model's input.
"""

from pathlib import Path

import numpy as np

from keras_vit.weights.files.documents import read_document
from keras_vit.weights.files.h5 import H5Reader
from keras_vit.weights.files.rules import Refused, refusal

CONFIG, TASK, PIXELS = "config.json", "task.json", "image_converter.json"
BACKBONE_WEIGHTS, TASK_WEIGHTS = "model.weights.h5", "task.weights.h5"
FILES = (CONFIG, TASK, PIXELS, TASK_WEIGHTS, BACKBONE_WEIGHTS)
"""The files that are read, the backbone's weights last."""
OF_TASK = "task/"
"""Precedes the names of a task's own arrays."""


def find_preset(path: Path) -> Path | None:
    """The folder of a KerasHub preset: `path`, or the one that the weights `path` are in."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != BACKBONE_WEIGHTS:
        return None
    if not (folder / BACKBONE_WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        return None
    try:
        name = read_document(folder / CONFIG).get("registered_name")
    except Refused:  # whoever reads the folder says why
        return None
    return folder if isinstance(name, str) and name.startswith("keras_hub>") else None


class PresetReader:
    """The arrays of a preset, for `arrays.open_arrays`: the backbone's and the task's own."""

    def __init__(self, folder: Path):
        self.metadata: dict[str, str] = {}
        self._parts: dict[str, H5Reader] = {}
        try:
            for prefix, name in (("", BACKBONE_WEIGHTS), (OF_TASK, TASK_WEIGHTS)):
                if (folder / name).exists():
                    if not (folder / name).is_file():  # reading a pipe or a device may never end
                        raise refusal(folder / name, "be a regular file")
                    self._parts[prefix] = H5Reader((folder / name).open("rb"), folder / name)
        except BaseException:
            self.close()
            raise
        self.declared = {
            prefix + name: declared
            for prefix, part in self._parts.items()
            for name, declared in part.declared.items()
        }

    def read_array(self, name: str) -> np.ndarray:
        """Reads one array."""
        prefix = OF_TASK if name.startswith(OF_TASK) else ""
        return self._parts[prefix].read_array(name.removeprefix(prefix))

    def close(self) -> None:
        """Closes the files."""
        for part in self._parts.values():
            part.close()

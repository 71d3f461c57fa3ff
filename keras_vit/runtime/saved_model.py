"""A SavedModel exported by keras_vit, run by TensorFlow."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.runtime.base import RECORD_SHAPE, Runtime, check_input, described
from keras_vit.weights.files.documents import (
    INT,
    OBJECT,
    TEXT,
    Rule,
    Shape,
    check_fields,
    not_null,
    stated,
)
from keras_vit.weights.files.rules import refusal, refused_as
from keras_vit.weights.json_rules import read_json

MANIFEST = "MANIFEST.json"
SHAPE: Shape = {
    **RECORD_SHAPE,
    "max_batch_size": stated(Rule("a positive int", lambda v: type(v) is int and v > 0)),
    "versions": OBJECT,
}
FILES: Shape = {"files": stated(OBJECT)}
FILE: Shape = {"sha256": stated(TEXT)}
"""What the manifest states of an export and of its files."""
LIMITS: Shape = {
    "max_batch_size": INT._replace(or_null=False),
    "versions": not_null({"tensorflow": TEXT}),
}
"""What it states for a server."""
READ = ("saved_model.pb", "fingerprint.pb", "variables/*", "assets/*")
"""The files that TensorFlow reads, which the manifest must name."""


class SavedModelRuntime(Runtime):
    """A version folder that `export_saved_model` wrote, run by TensorFlow."""

    kind = "saved_model"

    def __init__(self, folder: str | os.PathLike):
        import tensorflow as tf

        self.manifest = read_json(Path(folder, MANIFEST))
        if "config" not in self.manifest:
            raise ValueError(
                f"path must be an export with a {MANIFEST}, as keras_vit.export_saved_model writes "
                f"it. Received: path={os.fspath(folder)!r}"
            )
        manifest = Path(folder, MANIFEST)
        check_fields(manifest, self.manifest, SHAPE)
        super().__init__(folder, **described(manifest, self.manifest))
        self.images = self.manifest["images"]
        self._max_batch_size = self.manifest["max_batch_size"]
        rule = f"be a SavedModel that TensorFlow {tf.__version__} loads"
        with refused_as(folder, rule, (Exception,)):  # it raises anything on a damaged one
            self._loaded = tf.saved_model.load(os.fspath(folder))  # keeps the weights alive
        inputs = self.signature("serving_default").structured_input_signature[1]
        if "images" not in inputs:
            raise refusal(folder, "take images in serving_default", inputs=list(inputs))
        check_input(folder, self.config, inputs["images"].shape.as_list())

    def signature(self, name: str) -> Any:
        """A signature as a TensorFlow function."""
        if name not in self._loaded.signatures:
            known = ", ".join(sorted(self._loaded.signatures))
            raise ValueError(f"signature must be one of {known}. Received: signature={name!r}")
        return self._loaded.signatures[name]

    def run(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        """Runs a signature; returns its outputs by name.

        Batches of more than the export's `max_batch_size` run in parts; errors then count images
        within their part.

        Args:
            signature: "serving_default", "serve_bytes", "classify" or "features".
            **inputs: The inputs by name: arrays, or for `bytes` a sequence of encoded images.
        """
        if "images" in inputs:
            self._check_raw(inputs["images"])
        return self._outputs(signature, inputs)

    def _outputs(self, signature: str, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        import tensorflow as tf

        function = self.signature(signature)
        specs = function.structured_input_signature[1]
        values = {
            name: tf.constant(value, specs[name].dtype if name in specs else None)
            for name, value in inputs.items()
        }
        most = self._max_batch_size
        count = max((len(value) for value in values.values() if value.ndim), default=0)
        if count > most:
            parts = [
                function(**{name: value[i : i + most] for name, value in values.items()})
                for i in range(0, count, most)
            ]
        else:
            parts = [function(**values)]
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}

    def _run(self, images: np.ndarray, wanted: str = "logits") -> Mapping[str, np.ndarray]:
        name = "features" if wanted == "features" else "serving_default"
        return self._outputs(name, {"images": images})

    def _engine(self) -> str:
        import tensorflow as tf

        devices = sorted({device.device_type for device in tf.config.list_physical_devices()})
        return f"TensorFlow {tf.__version__}, {'+'.join(devices)}"


def version_folder(path: Path) -> Path | None:
    """The path itself if it is a SavedModel, otherwise the highest version in it, or None."""
    if (path / "saved_model.pb").is_file():
        return path
    versions = path.glob("*/saved_model.pb") if path.is_dir() else ()
    folders = [p.parent for p in versions if p.parent.name.isdecimal()]
    return max(folders, key=lambda folder: int(folder.name), default=None)


def read_limits(manifest: Path) -> dict[str, Any]:
    """A manifest, whose `max_batch_size` and `versions` are checked if it states them."""
    return read_json(manifest, LIMITS)


def check_files(folder: Path) -> None:
    """Raises if a file of an export differs from its hash in the manifest."""
    manifest = folder / MANIFEST
    if not manifest.exists():  # `SavedModelRuntime` says what is missing
        return
    files = read_json(manifest, FILES)["files"]
    check_fields(manifest, files, dict.fromkeys(files, FILE), "files.")
    for path in (path for pattern in READ for path in folder.glob(pattern)):
        if path.relative_to(folder).as_posix() not in files:
            raise refusal(manifest, "state the sha256 of every file", missing=str(path))
    for name, entry in files.items():
        path = folder / name
        if ".." in path.parts or not path.is_relative_to(folder):
            raise refusal(manifest, f"name files in {folder}", name=name)
        if not path.is_file():
            raise ValueError(f"{folder} must hold what its {MANIFEST} names. {name} is missing")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry.get("sha256"):
            raise ValueError(
                f"{folder} must hold the files that its {MANIFEST} describes. Received: {name} "
                f"with sha256 {found}, not {entry.get('sha256')}"
            )

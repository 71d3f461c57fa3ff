"""MANIFEST.json: what an exported version is, and the hashes of its files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.export.record import package_versions
from keras_vit.export.saved_model.signatures import input_of
from keras_vit.runtime.saved_model import MANIFEST

PIXEL_FIELDS = ("image_size", "in_channels", "resize_method", "crop_fraction")


def describe(config: ViTConfig, serving: Any, functions: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, without the hashes and the verification."""
    fields = config.to_dict()
    return {
        "format": "keras_vit SavedModel",
        "config": fields,
        "labels": list(serving.labels) if config.num_classes else None,
        "dtype": serving.dtype,
        "activation": serving.activation,
        "images": serving.images,
        "max_batch_size": serving.max_batch_size,
        "pixels": {
            **{name: fields[name] for name in PIXEL_FIELDS},
            "mean": fields["pixel_mean"],
            "std": fields["pixel_std"],
            "images": "uint8 pixels" if serving.images == "uint8" else "(pixel / 255 - mean) / std",
            "files": "JPEG and PNG",
            "max_pixels": serving.max_pixels,
            "exif_orientation": "applied to JPEG files",
            "alpha": "left out",
        },
        "signatures": {name: _signature(function) for name, function in functions.items()},
        "versions": package_versions("tensorflow"),
    }


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes MANIFEST.json, with the hashes of all other files, into a version folder."""
    files = {
        path.relative_to(folder).as_posix(): {
            "sha256": _sha256(path),
            "bytes": path.stat().st_size,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    text = json.dumps({**content, "files": files}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _signature(function: Any) -> dict[str, Any]:
    spec = input_of(function)
    return {
        "inputs": {spec.name: _spec(spec)},
        "outputs": {name: _spec(spec) for name, spec in function.structured_outputs.items()},
    }


def _spec(spec: Any) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": [size for size in spec.shape]}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

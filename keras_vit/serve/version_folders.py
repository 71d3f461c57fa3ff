"""The versions of a model on disk: numbered folders, as TensorFlow Serving reads them."""

import os
from pathlib import Path

MODEL_FILES = (".keras", ".tflite", ".onnx", ".xml")
COMPANIONS = {".xml": ".bin"}
"""Suffixes of the files that belong to another one."""
Stamp = tuple[tuple[str, int, int], ...]


def find_versions(path: Path) -> dict[int, Path] | None:
    """The models in the numbered folders of a folder, by number.

    A numbered folder holds a SavedModel, a run's `model.keras`, or one `.keras`, `.tflite`,
    `.onnx` or `.xml` file. Others, and folders that hold none of these yet, are left out.

    Returns:
        The paths to open, or None if the path is no folder of versions, but a model itself.
    """
    if not path.is_dir() or _is_model(path):
        return None
    folders = [folder for folder in path.iterdir() if folder.name.isdecimal() and folder.is_dir()]
    if not folders:
        return None
    found = {int(folder.name): _model_in(folder) for folder in folders}
    return {number: model for number, model in found.items() if model is not None}


def number_of(path: Path) -> int:
    """The version of a model that is not in a folder of versions: its folder's number, or 1."""
    return int(path.name) if path.name.isdecimal() and path.is_dir() and int(path.name) else 1


def stamp_of(path: Path) -> Stamp:
    """Names, sizes and times of a version's files: if they change, somebody still writes."""
    if path.is_file():
        beside = path.with_suffix(COMPANIONS.get(path.suffix, path.suffix))
        files = sorted({path, beside})
    else:
        files = sorted(p for p in path.rglob("*") if p.is_file())
    return tuple((os.fspath(file), *_size_and_time(file)) for file in files)


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except FileNotFoundError:  # removed since it was listed
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _is_model(folder: Path) -> bool:
    return (folder / "saved_model.pb").is_file() or (folder / "model.keras").is_file()


def _model_in(folder: Path) -> Path | None:
    if _is_model(folder):
        return folder
    files = [file for file in folder.iterdir() if file.suffix in MODEL_FILES and file.is_file()]
    return files[0] if len(files) == 1 else None

"""Checkpoints on disk, read without Keras: their names, their manifests and a verified listing.

`keras_vit.train.checkpoint.files` describes the folders and writes them.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.weights.files.documents import (
    COUNT,
    FLAG,
    INT,
    MAX_COUNT,
    OBJECT,
    OBJECTS,
    TEXT,
    Rule,
    Shape,
    is_finite,
    read_document,
    stated,
)

ARRAYS, FACTS, MANIFEST = "state.safetensors", "state.json", "MANIFEST.json"
NAME = re.compile(r"ckpt-([0-9]{1,12})")
MAX_FACTS = 1 << 28
"""Bytes of a state.json, which holds what callbacks remember of every epoch."""
SUMMARY: Shape = {
    "time": stated(Rule("seconds since 1970", lambda v: is_finite(v) and 0 <= v < MAX_COUNT)),
    "position": stated(
        OBJECT,
        {
            "epoch": stated(COUNT),
            "step_in_epoch": stated(COUNT),
            "step": stated(COUNT),
            "stopped": stated(FLAG),
        },
    ),
    "steps_per_epoch": COUNT,
    "best": {"step": COUNT},
}
"""What state.json states for a listing."""
STATE: Shape = {
    **SUMMARY,
    "format": stated(INT),
    "inside_epoch": stated(FLAG),
    "best": {
        "name": stated(TEXT),
        "value": stated(Rule("a finite number", is_finite)),
        "step": stated(COUNT),
    },
    "versions": stated(OBJECT),
    "callbacks": stated(OBJECTS),
    "random": stated(OBJECT),
}
"""What state.json states for a run that resumes."""


class BrokenCheckpointError(ValueError):
    """A checkpoint is damaged; the message names the file."""


def verify_checkpoint(path: Path, hashes: bool = True) -> None:
    """Raises a `BrokenCheckpointError` if a checkpoint differs from its manifest.

    Args:
        path: The folder of the checkpoint.
        hashes: Whether to compare the hashes of all files, or only the sizes.
    """
    manifest = path / MANIFEST
    try:
        files = read_document(manifest)["files"]
        text = manifest.read_text(encoding="utf-8")
        # The text is compared, so that a change of any bit of the manifest is found.
        intact = manifest_text(files) == text and files.keys() == {ARRAYS, FACTS}
        intact = intact and all(file.keys() == {"size", "sha256"} for file in files.values())
    except (
        *(OSError, ValueError, RecursionError),
        *(KeyError, TypeError, AttributeError),
    ) as error:
        raise BrokenCheckpointError(f"{manifest} cannot be read: {error}") from error
    if not intact:
        raise BrokenCheckpointError(f"{manifest} is damaged")
    for name, wanted in files.items():
        try:
            size = (path / name).stat().st_size
            found = (
                file_record(path / name) if hashes and size == wanted["size"] else {"size": size}
            )
        except OSError as error:
            raise BrokenCheckpointError(f"{path / name} cannot be read: {error}") from error
        for key, value in found.items():
            if value != wanted[key]:
                raise BrokenCheckpointError(
                    f"{path / name} has {key} {value}, and {manifest} says {wanted[key]}"
                )


def read_facts(path: Path, shape: Shape = SUMMARY) -> dict[str, Any]:
    """The state.json of a checkpoint.

    Raises:
        BrokenCheckpointError: It is damaged, or of another step than its folder.
    """
    facts = _read(path, shape)
    step = facts["position"]["step"]
    if step != step_of(path):
        raise BrokenCheckpointError(
            f"{path} must be a checkpoint of that step. Received: of {step}"
        )
    return facts


def read_format(path: Path) -> int:
    """The format of a checkpoint. One of another format may state anything else in its own way."""
    return _read(path, {"format": stated(INT)})["format"]


def _read(path: Path, shape: Shape) -> dict[str, Any]:
    try:
        return read_document(path / FACTS, shape, MAX_FACTS)
    except ValueError as error:
        raise BrokenCheckpointError(str(error)) from error


def steps(folder: str | os.PathLike) -> list[int]:
    """The steps of all checkpoints, intact or not, in ascending order."""
    return [step_of(path) for path in folders(folder)]


def listing(folder: str | os.PathLike, hashes: bool = False) -> list[dict[str, Any]]:
    """Lists the checkpoints in a folder, oldest first.

    Args:
        folder: The folder.
        hashes: Whether to verify hashes, or only sizes.

    Returns:
        For each checkpoint "step", "path", "whole", "problem" (a string, or None), "bytes",
        "time" (seconds since 1970, or None), "best", and "position" (epoch, step in the epoch and
        so on; empty if state.json cannot be read).
    """
    return [entry for entry, _ in listing_with_facts(folder, hashes)]


def folders(folder: str | os.PathLike) -> list[Path]:
    """The folders of the checkpoints, by step."""
    if not Path(folder).is_dir():
        if Path(folder).exists():
            raise NotADirectoryError(errno.ENOTDIR, "must be a folder", str(folder))
        return []
    return sorted((p for p in Path(folder).iterdir() if NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    found = NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"path must be named ckpt-<step>. Received: path={str(path)!r}")
    return int(found[1])


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The manifest of these files."""
    return json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"


def file_record(path: Path) -> dict[str, Any]:
    """The entry of a file in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def listing_with_facts(
    folder: str | os.PathLike, hashes: bool
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of `listing`, each with the contents of state.json."""
    while True:
        there = folders(folder)
        found = [entry for path in there if (entry := _describe(path, hashes))]
        if found or not there:  # otherwise all were pruned meanwhile, and there are newer ones
            break
    # The newest intact one names the best.
    whole = (facts for entry, facts in reversed(found) if entry["whole"])
    best = next(whole, {}).get("best")
    best = best.get("step") if isinstance(best, dict) else None
    return [({**entry, "best": entry["step"] == best}, facts) for entry, facts in found]


def _describe(path: Path, hashes: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A checkpoint and its state.json; None if it was pruned meanwhile."""
    problem, facts = None, {}
    try:
        verify_checkpoint(path, hashes)
        facts = read_facts(path)
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    try:
        files = path.iterdir() if path.is_dir() else [path]
        size = sum(file.lstat().st_size for file in files)
    except FileNotFoundError:
        return None
    entry = {
        "step": step_of(path),
        "path": str(path),
        "whole": problem is None,
        "problem": problem,
        "bytes": size,
        "time": facts.get("time"),
        "position": facts.get("position", {}),
    }
    return entry, facts

"""The status of a run folder, read without Keras: its progress, and whether its files are intact.

recipe.json       the recipe of the run
log.jsonl         a line per epoch
checkpoints/      see `keras_vit.train.checkpoint.files`
model.keras       the trained model
objective.keras   what it was trained in, if without labels
results.json      the results; written last, so a run that has it is finished
lock              held by the process that trains
"""

import json
import os
from pathlib import Path
from typing import Any

from keras_vit.lock import LOCK
from keras_vit.train.checkpoint.manifest import listing_with_facts
from keras_vit.weights.files.documents import (
    COUNT,
    TEXT,
    Shape,
    is_count,
    not_null,
    read_document,
)

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

RECIPE, LOG, MODEL, RESULTS = "recipe.json", "log.jsonl", "model.keras", "results.json"
OBJECTIVE = "objective.keras"
CHECKPOINTS = "checkpoints"
RECIPE_SHAPE: Shape = {
    "name": TEXT,
    "data": not_null({}),
    "model": not_null({"variant": TEXT, "method": TEXT, "config": not_null({})}),
    "run": not_null({"steps": COUNT}),
}
"""What is shown of recipe.json; see `keras_vit.weights.files.documents`."""


def is_run(path: str | os.PathLike) -> bool:
    """Whether a path is a run folder."""
    return Path(path, RECIPE).is_file()


def read_run(folder: str | os.PathLike) -> dict[str, Any]:
    """Describes a run folder and its problems. The hashes of all checkpoints are verified.

    It changes nothing, and may be called during the run.

    Returns:
        "path"; "state" ("finished", "running" or "cut off"; on Windows, which has no locks, "not
        finished" instead of the last two); "process", which runs it, or None; "recipe"; "results"
        or None; "steps" of the whole run, or None if unknown; "position" of the newest intact
        checkpoint, with "steps_per_epoch", or None; "saved", its time; "checkpoints", from
        `listing`; "set_aside" and "left_over", names of folders; "log" with "epochs" and "last";
        "problems", a list of strings.
    """
    folder = Path(folder)
    problems: list[str] = []
    process = _holder(folder / LOCK)  # first, because the run may end meanwhile
    results = _read_object(folder / RESULTS, problems)
    recipe = _read_object(folder / RECIPE, problems, RECIPE_SHAPE) or {}
    try:
        found = listing_with_facts(folder / CHECKPOINTS, hashes=True)
    except NotADirectoryError as error:
        problems.append(str(error))
        found = []
    problems += [entry["problem"] for entry, _ in found if not entry["whole"]]
    facts = next((facts for entry, facts in reversed(found) if entry["whole"]), None)
    if process is not None:
        state = "running"
    elif results is not None:
        state = "finished"
        if not (folder / MODEL).is_file():
            problems.append(f"{folder / MODEL} is missing, though the run is finished")
    else:
        state = "not finished" if fcntl is None else "cut off"
    position = None
    steps = recipe.get("run", {}).get("steps")
    if facts is not None:
        position = {**facts["position"], "steps_per_epoch": facts.get("steps_per_epoch")}
        extra = facts.get("extra")
        if isinstance(extra, dict) and is_count(extra.get("steps")):
            steps = extra["steps"]
    names = sorted(path.name for path in (folder / CHECKPOINTS).glob("ckpt-*.*"))
    return {
        "path": str(folder),
        "state": state,
        "process": process,
        "recipe": recipe,
        "results": results,
        "steps": steps,
        "position": position,
        "saved": None if facts is None else facts["time"],
        "checkpoints": [entry for entry, _ in found],
        "set_aside": [name for name in names if ".broken" in name],
        "left_over": [name for name in names if ".tmp-" in name],
        "log": _read_log(folder / LOG, problems),
        "problems": problems,
    }


def _holder(path: Path) -> str | None:
    """The process that holds a lock, or None."""
    if fcntl is None or not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            # Shared and released at once, so that other readers are not locked out.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200).decode(errors="replace").strip() or "another process"
    return None


def _read_object(
    path: Path, problems: list[str], shape: Shape | None = None
) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or cannot be read."""
    try:
        return read_document(path, shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return None


def _read_log(path: Path, problems: list[str]) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        problems.append(f"{path} must be a file")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    # A last line without its end is still being written, or is removed when the run resumes.
    found = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path} cannot be read in line {number}: {error}")
            continue
        if isinstance(row, dict):
            found.append(row)
        else:
            problems.append(f"{path} must hold an object in line {number}. Received: {line}")
    return {"epochs": len(found), "last": found[-1] if found else None}

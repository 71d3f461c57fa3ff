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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.train.checkpoint.manifest import FACTS, LOCK, listing_with_facts

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

RECIPE, LOG, MODEL, RESULTS = "recipe.json", "log.jsonl", "model.keras", "results.json"
OBJECTIVE = "objective.keras"
CHECKPOINTS = "checkpoints"
MAX_COUNT = 1 << 40
"""Above any number of steps, and of seconds since 1970."""


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
    recipe = _read_object(folder / RECIPE, problems) or {}
    if wrong := _wrong_in_recipe(recipe):
        problems.append(f"{folder / RECIPE} must be a recipe. Received: {wrong}")
        recipe = {}
    try:
        found = listing_with_facts(folder / CHECKPOINTS, hashes=True)
    except NotADirectoryError as error:
        problems.append(str(error))
        found = []
    for entry, facts in found:
        if entry["whole"] and (wrong := _wrong_in_facts(facts)):
            problem = f"{Path(entry['path'], FACTS)} must be of a checkpoint. Received: {wrong}"
            entry.update(whole=False, problem=problem)
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
        if isinstance(extra, dict) and _is_count(extra.get("steps")):
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


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return None
    if not isinstance(found, dict):
        problems.append(f"{path} must hold an object. Received: {type(found).__name__}")
        return None
    return found


def _wrong_in_recipe(found: Mapping[str, Any]) -> str:
    """The first invalid entry of a recipe, or an empty string."""
    sections = {name: found.get(name, {}) for name in ("run", "data", "model")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            return f"{name}={section!r}"
    config, steps = sections["model"].get("config", {}), sections["run"].get("steps")
    if not isinstance(config, dict):
        return f"model.config={config!r}"
    return "" if steps is None or _is_count(steps) else f"run.steps={steps!r}"


def _wrong_in_facts(facts: Mapping[str, Any]) -> str:
    """The first invalid entry of a state.json, or an empty string."""
    position = facts["position"]
    numbers = {f"position.{k}": position.get(k) for k in ("step", "epoch", "step_in_epoch")}
    if facts.get("steps_per_epoch") is not None:
        numbers["steps_per_epoch"] = facts["steps_per_epoch"]
    moment = facts.get("time")
    if not isinstance(moment, int | float) or not 0 <= moment < MAX_COUNT:
        return f"time={moment!r}"
    for name, value in numbers.items():
        if not _is_count(value):
            return f"{name}={value!r}"
    stopped = position.get("stopped")
    return "" if isinstance(stopped, bool) else f"position.stopped={stopped!r}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


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

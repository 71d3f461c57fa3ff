"""Run folders, read without Keras: how far a training run is, and whether what it left is whole.

    recipe.json       what the run is made of
    log.jsonl         a line for each epoch
    checkpoints/      see below
    model.keras       the trained model
    results.json      what was reached; written last, so a run that has it is finished
    lock              held by the process that trains

A checkpoint is a folder that `keras_vit.train.checkpoint.files` writes:

    ckpt-000123/state.safetensors    every array of the state
                state.json           all the rest, and a summary at its head
                MANIFEST.json        sizes and SHA-256 of the two, written last
    ckpt-000123.tmp-4711/            being written, or left over by a kill: the next run sweeps up
    ckpt-000124.broken/              did not verify when the run went on, and was set aside
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: there is no such lock, so nobody can be asked
    fcntl = None

RECIPE, LOG, MODEL, RESULTS = "recipe.json", "log.jsonl", "model.keras", "results.json"
CHECKPOINTS, LOCK = "checkpoints", "lock"
ARRAYS, FACTS, MANIFEST = "state.safetensors", "state.json", "MANIFEST.json"
MAX_COUNT = 1 << 40
"""What no number of steps, or of seconds since 1970, reaches."""
NAME = re.compile(r"ckpt-(\d+)")


class BrokenCheckpointError(ValueError):
    """A checkpoint is not what was written; the message names the file."""


# -- a run


def is_run(path: str | os.PathLike) -> bool:
    """Whether a path is a run folder."""
    return Path(path, RECIPE).is_file()


def read(folder: str | os.PathLike) -> dict[str, Any]:
    """What is in a run folder, and what is wrong with it. Every byte of a checkpoint is read.

    It may be called while the run goes on, and changes nothing.

    Returns:
        "path"; "state" ("finished", "running", "cut off", or on Windows, where one cannot tell,
        "not finished"); "process" that runs it, or None; "recipe"; "results" or None; "steps" of
        the whole run, or None where it is not known; "position" of the newest whole checkpoint,
        its "steps_per_epoch" included, or None; "saved", when that was; "checkpoints", as of
        `listing`; "set_aside" and "left_over", names of folders; "log" with "epochs" and "last";
        "problems", a list of strings, empty where all is whole.
    """
    folder = Path(folder)
    problems: list[str] = []
    process = _holder(folder / LOCK)  # first: what it leaves when it ends is read after it
    results = _read_object(folder / RESULTS, problems)
    recipe = _read_object(folder / RECIPE, problems) or {}
    if wrong := _not_of_a_recipe(recipe):
        problems.append(f"{folder / RECIPE} must be a recipe. Received: {wrong}")
        recipe = {}
    try:
        found = _listing(folder / CHECKPOINTS, hashes=True)
    except NotADirectoryError as error:
        problems.append(str(error))
        found = []
    for entry, facts in found:
        if entry["whole"] and (wrong := _not_of_a_checkpoint(facts)):
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
            # Shared, and given back at once: nobody is kept out who only looks as well.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200).decode(errors="replace").strip() or "another process"
    return None


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A JSON file's object; None where there is no file, or none that can be read."""
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


def _not_of_a_recipe(found: Mapping[str, Any]) -> str:
    """What is not as in a recipe, whose sections are objects; empty where all is."""
    sections = {name: found.get(name, {}) for name in ("run", "data", "model")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            return f"{name}={section!r}"
    config, steps = sections["model"].get("config", {}), sections["run"].get("steps")
    if not isinstance(config, dict):
        return f"model.config={config!r}"
    return "" if steps is None or _is_count(steps) else f"run.steps={steps!r}"


def _not_of_a_checkpoint(facts: Mapping[str, Any]) -> str:
    """What is not as in a state.json of `training`; empty where all is."""
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
    # A last line without its end is being written; or was, and goes when the run goes on.
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


# -- checkpoints


def check(path: Path, hashes: bool = True) -> None:
    """Raises a `BrokenCheckpointError` where a checkpoint differs from its manifest.

    Args:
        path: The folder of the checkpoint.
        hashes: Whether to read everything, or only to compare sizes.
    """
    manifest = path / MANIFEST
    try:
        text = manifest.read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        # Nothing but what was written passes, so no bit of the manifest itself may change.
        intact = manifest_text(files) == text and files.keys() == {ARRAYS, FACTS}
        intact = intact and all(file.keys() == {"size", "sha256"} for file in files.values())
    except (
        *(OSError, ValueError, RecursionError),
        *(KeyError, TypeError, AttributeError),
    ) as error:
        raise BrokenCheckpointError(f"{manifest} cannot be read: {error}") from error
    if not intact:
        raise BrokenCheckpointError(f"{manifest} is not as it was written")
    for name, wanted in files.items():
        try:
            size = (path / name).stat().st_size
            found = measure(path / name) if hashes and size == wanted["size"] else {"size": size}
        except OSError as error:
            raise BrokenCheckpointError(f"{path / name} cannot be read: {error}") from error
        for key, value in found.items():
            if value != wanted[key]:
                raise BrokenCheckpointError(
                    f"{path / name} has {key} {value}, and {manifest} says {wanted[key]}"
                )


def read_facts(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint."""
    facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    check_step(path, facts)
    return facts


def check_step(path: Path, facts: Any) -> None:
    """Raises a `BrokenCheckpointError` where state.json is of another step than its folder."""
    try:
        step = facts["position"]["step"]
    except (KeyError, TypeError) as error:
        raise BrokenCheckpointError(f"{path / FACTS} does not say its step") from error
    if step != step_of(path):
        raise BrokenCheckpointError(
            f"{path} must be a checkpoint of that step. Received: of {step}"
        )


def steps(folder: str | os.PathLike) -> list[int]:
    """The steps there are checkpoints of, whole or not, in numeric order."""
    return [step_of(path) for path in folders(folder)]


def listing(folder: str | os.PathLike, hashes: bool = False) -> list[dict[str, Any]]:
    """What there is, oldest first.

    Args:
        folder: Where the checkpoints are.
        hashes: Whether "whole" means that every byte was read and compared, or only the sizes.

    Returns:
        For each checkpoint "step", "path", "whole", "problem" (a string, or None), "bytes",
        "time" (seconds since 1970, or None), "best", and "position" (epoch, step in the epoch and
        what else state.json says of it; empty where it cannot be read).
    """
    return [entry for entry, _ in _listing(folder, hashes)]


def folders(folder: str | os.PathLike) -> list[Path]:
    """The folders of the checkpoints, in the order of their steps."""
    if not Path(folder).is_dir():
        if Path(folder).exists():
            raise NotADirectoryError(errno.ENOTDIR, "must be a folder", str(folder))
        return []
    return sorted((p for p in Path(folder).iterdir() if NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint is of."""
    found = NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"path must be named ckpt-<step>. Received: path={str(path)!r}")
    return int(found[1])


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands in the manifest of these files."""
    return json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"


def measure(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _listing(folder, hashes) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each entry of the listing, with all that state.json holds."""
    while True:
        there = folders(folder)
        found = [entry for path in there if (entry := _describe(path, hashes))]
        if found or not there:  # or they were all pruned meanwhile: there are newer ones
            break
    # The newest whole one knows which is the best.
    whole = (facts for entry, facts in reversed(found) if entry["whole"])
    best = next(whole, {}).get("best")
    best = best.get("step") if isinstance(best, dict) else None
    return [({**entry, "best": entry["step"] == best}, facts) for entry, facts in found]


def _describe(path: Path, hashes: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A checkpoint and its state.json; None, if it was pruned meanwhile."""
    problem, facts = None, {}
    try:
        check(path, hashes)
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

"""The doors through which foreign bytes enter, and the property that holds at each of them.

A door reads a damaged seed, or refuses it with a ValueError or an OSError that names the file. It
never ends in another error, and never in a crash. `run.py` also bounds its time and memory.
"""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import mutations
import numpy as np
import seeds
import server
from mutations import Random
from seeds import Seed

READ, REFUSED = "read", "refused"


@dataclasses.dataclass(frozen=True)
class Target:
    """A door.

    Attributes:
        seeds: Makes the valid files.
        read: Reads a folder with a damaged one.
        damage: By a pattern of the name, how a file is damaged; other files are left alone.
        seal: Corrects the hashes in a folder of files, for every second input.
    """

    seeds: Callable[[], Sequence[Seed]]
    read: Callable[[Path], object]
    damage: dict[str, Callable[[bytes, Random], bytes]]
    seal: Callable[[Seed], Seed] | None = None


def make_input(target: Target, made: Sequence[Seed], name: str, number: int) -> tuple[int, Seed]:
    """The input of a number: which seed it is made of, and its files."""
    random = np.random.default_rng([int.from_bytes(name.encode()), number])
    chosen = int(random.integers(len(made)))
    files = dict(made[chosen])
    able = [file for file in files if _damager(target, file)]
    count = 2 if len(able) > 1 and random.random() < 0.2 else 1
    for file in random.choice(able, count, replace=False).tolist():
        files[file] = _damager(target, file)(files[file], random)
    if target.seal and random.random() < 0.5:
        files = target.seal(files)
    return chosen, files


def _damager(target: Target, file: str):
    return next((f for pattern, f in target.damage.items() if re.search(pattern, file)), None)


def place(files: Seed, folder: Path) -> None:
    """Writes an input."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def outcome(target: Target, folder: Path) -> str:
    """Reads an input; returns READ, REFUSED, or what is wrong with the error."""
    try:
        target.read(folder)
    except (ValueError, OSError) as error:
        named = f"{error} {getattr(error, 'filename', '')}"
        if str(folder) in named and not isinstance(error, UnicodeError):
            return REFUSED
        return f"the file is not named: {type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return READ


# -- what reads


def read_weights(folder: Path) -> None:
    """As `from_pretrained` of the folder, or of the one file in it."""
    import keras_vit

    keras_vit.from_pretrained(_alone(folder))


def read_config(folder: Path) -> None:
    """As `keras-vit info` of a checkpoint: from headers alone."""
    from keras_vit.weights.load import inspect
    from keras_vit_cli.info import checkpoint_facts, checkpoint_json

    found = inspect(folder)
    json.dumps(checkpoint_json(str(folder), folder, None, found))
    str(list(checkpoint_facts(str(folder), folder, None, found))).encode()


def open_model(folder: Path) -> None:
    """As `keras-vit predict`: opens the model and runs two images."""
    from keras_vit import runtime

    model = runtime.open(_alone(folder))
    shape = (2, *model.config.input_shape)
    images = np.zeros(shape, "uint8")
    wanted = model.features if "logits" not in model.outputs else model.logits
    wanted(images) if model.config.num_classes else model.features(images)


def read_keras(folder: Path) -> None:
    """As `keras-vit info` of a `.keras` file, which loads it."""
    from keras_vit.runtime.keras_model import inspect_keras

    inspect_keras(_alone(folder))


def read_run(folder: Path) -> None:
    """As `keras-vit info` of a run, and what a run reads before it resumes."""
    from keras_vit.train.checkpoint import files
    from keras_vit.train.run import run_folder, run_status
    from keras_vit_cli.info import run_facts

    try:
        run = run_status.read_run(folder)
        json.dumps(run)
        str(list(run_facts(run))).encode(errors="replace")
    except (ValueError, OSError) as error:  # it must list problems
        raise AssertionError(f"info raises {error}") from error
    files.newest(folder / run_status.CHECKPOINTS)
    run_folder.read_results(folder)
    run_folder.read_recipe(folder)


def read_picture(folder: Path) -> None:
    """As `keras-vit predict` reads a picture."""
    from conformance import TINY

    from keras_vit.images import read_pixels

    read_pixels(_alone(folder), TINY)


def _alone(folder: Path) -> Path:
    files = [file for file in folder.iterdir() if file.suffix not in (".json",)]
    return files[0] if len(files) == 1 and not (folder / "config.json").exists() else folder


# -- hashes


def seal_run(files: Seed) -> Seed:
    """Checkpoints with manifests that match their damaged files."""
    import hashlib

    from keras_vit.train.checkpoint.manifest import ARRAYS, FACTS, MANIFEST, manifest_text

    files = dict(files)
    for name in [name for name in files if name.endswith(MANIFEST)]:
        parts = {
            part: files.get(name.removesuffix(MANIFEST) + part, b"") for part in (ARRAYS, FACTS)
        }
        records = {
            part: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for part, data in parts.items()
        }
        files[name] = manifest_text(records).encode()
    return files


def seal_export(files: Seed) -> Seed:
    """A SavedModel whose manifest matches its damaged files, if it can be read."""
    import hashlib

    try:
        manifest = json.loads(files["MANIFEST.json"])
        for name in manifest["files"]:
            manifest["files"][name]["sha256"] = hashlib.sha256(files[name]).hexdigest()
    except (ValueError, TypeError, KeyError):
        return files
    return {**files, "MANIFEST.json": json.dumps(manifest).encode()}


# -- how each kind of file is damaged


def damage_keras(data: bytes, random: Random) -> bytes:
    """A `.keras` file: its JSON as JSON, its weights as bytes."""
    inside = {".json": mutations.damage_json}
    return mutations.damage_zip(data, random, inside)


def damage_tflite(data: bytes, random: Random) -> bytes:
    """A `.tflite` file: its metadata, or anything."""
    return mutations.damage_part(data, b'{"format"', b'"softmax"}', random)


def damage_onnx(data: bytes, random: Random) -> bytes:
    """An `.onnx` file: its metadata with its length, or anything."""
    import onnx

    if random.random() < 0.5:
        return mutations.damage_bytes(data, random)
    model = onnx.load(io.BytesIO(data))
    for entry in model.metadata_props:
        if entry.key == "keras_vit":
            text = mutations.damage_json(entry.value.encode(), random)
            entry.value = text.decode(errors="replace")
    return model.SerializeToString()


def damage_lines(data: bytes, random: Random) -> bytes:
    """A log of one object a line."""
    lines = data.split(b"\n")
    at = int(random.integers(len(lines)))
    lines[at] = mutations.damage_json(lines[at], random)
    return b"\n".join(lines)


JSON = {r"\.json$": mutations.damage_json}
WEIGHTS = {
    r"\.safetensors$": mutations.damage_safetensors,
    r"\.npz$": mutations.damage_zip,
    r"\.h5$|\.bin$": mutations.damage_bytes,
}
TARGETS = {
    "weights": Target(
        seeds.weights, read_weights, {**WEIGHTS, r"index\.json$": mutations.damage_json}
    ),
    "configs": Target(seeds.configs, read_config, JSON),
    "keras": Target(seeds.keras_files, read_keras, {r"\.keras$": damage_keras}),
    "runs": Target(seeds.runs, read_run, {**JSON, **WEIGHTS, r"\.jsonl$": damage_lines}, seal_run),
    "tflite": Target(seeds.tflite, open_model, {r"\.tflite$": damage_tflite}),
    "onnx": Target(seeds.onnx, open_model, {r"\.onnx$": damage_onnx}),
    "savedmodel": Target(
        seeds.saved_models,
        open_model,
        {**JSON, r"saved_model\.pb$|\.index$|fingerprint": mutations.damage_bytes},
        seal_export,
    ),
    "pictures": Target(seeds.pictures, read_picture, {"": mutations.damage_bytes}),
    "presets": Target(seeds.presets, read_weights, {**JSON, **WEIGHTS}),
    "requests": Target(server.requests, server.send, {"": server.damage}),
}
"""By name."""

"""Writes the config files of TensorFlow Serving, and a README for its operator.

The server reads `models.config` (which models and versions to serve) and `batching.config` (how to
batch requests); `docker-compose.yml` starts it with both.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_vit.atomic import remove_left_over, temporary_name
from keras_vit.export.serving import templates as text
from keras_vit.paths import as_output, as_path
from keras_vit.runtime.saved_model import MANIFEST, read_limits

IMAGE = "tensorflow/serving:2.21.0"
"""The server's image. It must not be older than the TensorFlow that wrote the models."""


def write_serving_config(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike | None = None,
    *,
    image: str = IMAGE,
    max_batch_size: int = 32,
    batch_timeout_micros: int = 2000,
    num_batch_threads: int = 2,
    max_enqueued_batches: int = 16,
    address: str = "127.0.0.1",
    overwrite: bool = False,
) -> list[Path]:
    """Writes models.config, batching.config, docker-compose.yml and README.md for models.

    Args:
        models: The folder of an exported model, or several: each holds version folders and is
            served under its own name.
        out: Where the files go; the folder that holds the models by default. It is what the server
            sees as /models, so every model must lie inside it.
        image: The server's Docker image, with its tag.
        max_batch_size: Images in a batch; requests should not have more.
        batch_timeout_micros: Microseconds that a request waits for others to share its batch.
        num_batch_threads: Batches that are computed at a time.
        max_enqueued_batches: Batches that may wait. Further requests are refused as UNAVAILABLE.
        address: The address on which the ports open. The server has no authentication, so by
            default it is reachable from this machine only.
        overwrite: Whether to replace existing files that differ.

    Returns:
        The four files.

    Example:

    >>> write_serving_config("savedmodels/flowers")
    """
    if models is None or isinstance(models, str | os.PathLike | int):
        models = [models]
    folders = [Path(os.path.abspath(as_path("models", folder))) for folder in models]
    target, places = _places(folders, out)
    numbers = {
        "max_batch_size": max_batch_size,
        "batch_timeout_micros": batch_timeout_micros,
        "num_batch_threads": num_batch_threads,
        "max_enqueued_batches": max_enqueued_batches,
    }
    for name, number in numbers.items():
        least = 0 if name == "batch_timeout_micros" else 1
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(
                f"{name} must be an int of at least {least}. Received: {name}={number!r}"
            )
    if not re.fullmatch(r"[\w./:-]+:[\w.-]+|[\w./:-]+@sha256:[0-9a-f]{64}", image):
        raise ValueError(f"image must be pinned by a tag or a digest. Received: image={image!r}")
    if not re.fullmatch(r"[0-9A-Fa-f.:]+", address):
        raise ValueError(f"address must be an IP address. Received: address={address!r}")
    for folder in folders:
        _check_manifests(folder, max_batch_size, image)
    names = list(places)
    files = {
        "models.config": models_config(places),
        "batching.config": batching_config(**numbers),
        "docker-compose.yml": compose_file(names, image, address),
        "README.md": text.readme(names, image, max_batch_size),
    }
    return _write(target, files, overwrite)


def models_config(places: Mapping[str, str]) -> str:
    """The text of a ModelServerConfig: names of models, and their folders under /models."""
    entries = "".join(
        text.MODEL.format(name=name, path=f"/models/{path}") for name, path in places.items()
    )
    return f"{text.MODELS}model_config_list {{\n{entries}}}\n"


def batching_config(
    *,
    max_batch_size: int,
    batch_timeout_micros: int,
    num_batch_threads: int,
    max_enqueued_batches: int,
) -> str:
    """The text of a BatchingParameters message, with the reason for each number."""
    return text.BATCHING.format(
        max_batch_size=max_batch_size,
        batch_timeout_micros=batch_timeout_micros,
        milliseconds=f"{batch_timeout_micros / 1000:g}",
        num_batch_threads=num_batch_threads,
        max_enqueued_batches=max_enqueued_batches,
        images=max_batch_size * max_enqueued_batches,
    )


def compose_file(names: Sequence[str], image: str, address: str) -> str:
    """The text of docker-compose.yml."""
    # The image has bash and grep but no curl. HTTP/1.0, so that the server closes the connection.
    ask = (
        "exec 3<>/dev/tcp/127.0.0.1/8501 && printf 'GET /v1/models/%s HTTP/1.0\\r\\n\\r\\n' {name}"
    )
    check = " && ".join(f"{ask.format(name=name)} >&3 && grep -qw AVAILABLE <&3" for name in names)
    if ":" in address:
        address = f"[{address}]"
    return text.COMPOSE.format(
        image=image, address=address, check=json.dumps(["CMD", "bash", "-c", check])
    )


def _places(folders: list[Path], out: str | os.PathLike | None) -> tuple[Path, dict[str, str]]:
    """The folder that the server sees, and the path of each model in it, by name."""
    if not folders:
        raise ValueError("models must name at least one folder. Received: models=[]")
    target = Path(os.path.abspath(as_output("out", out))) if out is not None else folders[0].parent
    places: dict[str, str] = {}
    for folder in folders:
        name = folder.name
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise ValueError(
                "models must have names of letters, digits, '.', '_' and '-'. "
                f"Received: {str(folder)!r}"
            )
        if not _versions(folder):
            raise ValueError(
                "models must be folders that hold version folders (1, 2, ...) with a "
                f"saved_model.pb. Received: {str(folder)!r}"
            )
        if not folder.is_relative_to(target) or folder == target:
            raise ValueError(
                "models must lie inside out, the only folder that the server sees. "
                f"Received: {str(folder)!r}, out={str(target)!r}"
            )
        path = folder.relative_to(target).as_posix()
        if any(not re.fullmatch(r"[\w. -]+", part, re.ASCII) for part in path.split("/")):
            raise ValueError(f"models must have plain names on their way. Received: {path!r}")
        if places.get(name, path) != path:
            raise ValueError(f"models must have different names. Received: {name!r} twice")
        places[name] = path
    return target, places


def _versions(folder: Path) -> list[int]:
    """The version folders that hold a model."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if re.fullmatch(r"[0-9]+", p.name))
    return sorted(int(p.name) for p in found if (p / "saved_model.pb").is_file())


def _check_manifests(folder: Path, max_batch_size: int, image: str) -> None:
    """Raises if the server is older than a model, or makes batches that the model refuses."""
    tag = re.search(r":(\d+)\.(\d+)[^:/]*$", image)
    for number in _versions(folder):
        file = folder / str(number) / MANIFEST
        if not file.is_file():  # a SavedModel that another program wrote
            continue
        manifest = read_limits(file)
        most = manifest.get("max_batch_size", max_batch_size)
        if max_batch_size > most:
            raise ValueError(
                f"max_batch_size must be at most {most}, what {file.parent} was exported for. "
                f"Received: max_batch_size={max_batch_size}"
            )
        written = manifest.get("versions", {}).get("tensorflow") or ""
        wrote = re.match(r"(\d+)\.(\d+)", written)
        if tag and wrote and tuple(map(int, tag.groups())) < tuple(map(int, wrote.groups())):
            raise ValueError(
                f"image must not be older than TensorFlow {written}, which wrote {file.parent}. "
                f"Received: image={image!r}"
            )


def _write(folder: Path, files: Mapping[str, str], overwrite: bool) -> list[Path]:
    paths = {folder / name: content for name, content in files.items()}
    changed = {
        path: content
        for path, content in paths.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    }
    if (there := [path.name for path in changed if path.exists()]) and not overwrite:
        raise FileExistsError(
            f"{folder} must not hold other files of these names: --overwrite (overwrite=True) "
            "replaces them, --out (out=) writes to another folder that holds the models. "
            f"Received: {', '.join(there)}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_left_over(folder)
    for path, content in changed.items():
        # Written atomically, because a running server reads models.config again.
        temporary = path.with_name(temporary_name(path.name))
        try:
            temporary.write_text(content, encoding="utf-8", newline="\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return list(paths)

"""Fetches a model from the Hugging Face Hub: only the files that are needed, each verified.

huggingface_hub caches, logs in and resumes. This module chooses the files, compares their hashes
with those that the Hub lists, and raises errors that say what to do.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from keras_vit.weights.fetch import network
from keras_vit.weights.files import pickles, preset

SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Fetched with the weights if the repository has them."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
GRAMMAR = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>refs/[\w-]+/[^/@]+|[^/@]+))?(/(?P<inside>.+))?"
)

log = logging.getLogger("keras_vit")


class Place(NamedTuple):
    """The parts of an hf:// source."""

    repo: str
    revision: str
    inside: str
    """A file or folder of the repository; "" means all of it."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf://{self.repo}{revision}" + f"/{self.inside}" * bool(self.inside)


def fetch_repository(source: str, revision: str | None, cache_dir: Path | None) -> Path:
    """The folder or file of `hf://org/name[@revision][/file]`, from the cache if possible.

    Args:
        source: The hf:// source.
        revision: Branch, tag or commit, if `source` names none.
        cache_dir: The cache. Defaults to huggingface_hub's own.
    """
    place = parse(source, revision)
    commit = re.fullmatch("[0-9a-f]{40}", place.revision)  # a commit never changes
    cached = _cached(place, cache_dir) if network.offline() or commit else None
    if cached:
        return cached
    if network.offline():
        raise network.not_cached(str(place), _cache_folder(cache_dir))
    try:
        with _explained(place):
            info = _api().model_info(
                place.repo, revision=place.revision, files_metadata=True, timeout=network.TIMEOUT
            )
    except ConnectionError as error:
        if not (cached := _cached(place, cache_dir)):
            raise
        log.warning("%s Using the cached files.", error)
        return cached
    files = {entry.rfilename: entry for entry in info.siblings or []}
    wanted = choose_files(place, list(files))
    paths = [_get(place, info.sha, files[name], cache_dir) for name in wanted]
    return paths[-1] if place.inside in files else paths[-1].parent


def upload(
    place: Place, folder: Path, card: str, *, private: bool | None, message: str | None
) -> str:
    """Uploads a folder to a repository, which is created if there is none.

    Args:
        place: The repository.
        folder: The folder.
        card: The file of the folder that is left out if the repository has one.
        private: Whether a new repository is private; None leaves it to the Hub.
        message: Message of the commit.

    Returns:
        The URL of the commit.
    """
    api = _api()
    with _explained(place):
        api.create_repo(place.repo, private=private, exist_ok=True)
        kept = api.file_exists(place.repo, card)
        commit = api.upload_folder(
            repo_id=place.repo,
            folder_path=folder,
            commit_message=message or "Upload by keras_vit",
            ignore_patterns=[card] if kept else None,
        )
    return str(commit.commit_url)


def parse(source: str, revision: str | None = None) -> Place:
    """The parts of an hf:// source, or `ValueError`."""
    found = GRAMMAR.fullmatch(source)
    inside = (found["inside"] or "").strip("/") if found else ""
    kinds = ("datasets", "spaces", "kernels", "buckets", "models")
    if not found or found["repo"].split("/")[0] in kinds or ".." in inside.split("/"):
        raise ValueError(
            "source must name a model on the Hub, hf://organization/name[@revision][/file]. "
            f"Received: source={source!r}"
        )
    if revision and found["revision"] and revision != found["revision"]:
        raise ValueError(
            f"revision must be the one that source names. Received: revision={revision!r}, "
            f"source={source!r}"
        )
    return Place(found["repo"], found["revision"] or revision or "main", inside)


def choose_files(place: Place, files: list[str]) -> list[str]:
    """The files to fetch of a repository, the weights last."""
    if place.inside in files:
        return _choose_file(place, files)
    folder = f"{place.inside}/" if place.inside else ""
    names = [f[len(folder) :] for f in files if f.startswith(folder)]
    names = [name for name in names if "/" not in name]
    if not names:
        raise FileNotFoundError(
            network.cannot_fetch(
                str(place), "there is no such file", f"There are: {_listed(files)}."
            )
        )
    weights = [WEIGHTS] if WEIGHTS in names else []
    if not weights and INDEX in names:
        weights = [*sorted(filter(SHARD.fullmatch, names)), INDEX]
    if not weights and preset.BACKBONE_WEIGHTS in names:
        return [folder + name for name in preset.FILES if name in names]
    if not weights:
        raise _no_weights(place, folder, names)
    return [folder + name for name in [*(s for s in SETTINGS if s in names), *weights]]


def _choose_file(place: Place, files: list[str]) -> list[str]:
    path = PurePosixPath(place.inside)
    if path.suffix.lower() in pickles.SUFFIXES:
        raise _only_pickles(place, [path.name])
    if path.suffix != ".safetensors":
        return [place.inside]
    settings = [str(path.with_name(name)) for name in SETTINGS]
    return [*(name for name in settings if name in files), place.inside]


def _no_weights(place: Place, folder: str, names: list[str]) -> Exception:
    """The error for a folder without model.safetensors, with what to do."""
    other = [n for n in names if n.endswith((".npz", ".safetensors", ".weights.h5", ".keras"))]
    if other:
        one = place._replace(inside=folder + other[0])
        return FileNotFoundError(
            network.cannot_fetch(
                str(place),
                f"it has no {WEIGHTS}, but {_listed(other)}",
                f"Name the file: {one}.",
            )
        )
    if binary := [n for n in names if PurePosixPath(n).suffix.lower() in pickles.SUFFIXES]:
        return _only_pickles(place, binary)
    return FileNotFoundError(
        network.cannot_fetch(
            str(place),
            f"it has no {WEIGHTS}. It has {_listed(names)}",
            "It may hold no weights, or another framework's.",
        )
    )


def _only_pickles(place: Place, names: list[str]) -> ValueError:
    name = place.repo.split("/")[1]
    target = f"{name}/{WEIGHTS}"
    return ValueError(
        network.cannot_fetch(
            str(place),
            f"its weights are a pickle ({_listed(names)}), which can run arbitrary code",
            f"Convert it on a machine with torch, and pass the folder (it reads {target}): "
            f"hf download {place.repo} {' '.join(SETTINGS)} {names[0]} --local-dir {name} "
            f"&& {pickles.conversion_command(f'{name}/{names[0]}')}",
        )
    )


def _get(place: Place, commit: str, entry: Any, cache_dir: Path | None) -> Path:
    """One file of the repository at `commit`, verified when it is downloaded."""
    from huggingface_hub import hf_hub_download

    name = entry.rfilename
    cached = _find(place._replace(revision=commit), name, cache_dir)
    if cached and cached == _find(place, name, cache_dir):
        return cached
    one = place._replace(inside=name)
    with _explained(one):
        path = hf_hub_download(
            place.repo,
            name,
            revision=place.revision,
            cache_dir=cache_dir,
            etag_timeout=network.TIMEOUT,
        )
    path = Path(path)
    if commit not in path.parts:
        why = "the repository changed during the download"
        raise ConnectionError(network.cannot_fetch(str(place), why, "Call again."))
    if not cached:
        _verify(one, path, entry)
    return path


def _verify(place: Place, path: Path, entry: Any) -> None:
    """Deletes a file whose hash the Hub does not list, and raises. The client checks sizes only."""
    if entry.lfs:
        found, stated = hashlib.sha256(), entry.lfs.sha256
    elif entry.blob_id:
        found, stated = hashlib.sha1(b"blob %d\0" % path.stat().st_size), entry.blob_id
    else:
        return
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    if found.hexdigest() != stated:
        for copy in {path.resolve(), path}:
            copy.unlink()
        raise ValueError(
            network.cannot_fetch(
                str(place),
                f"its {found.name} must be {stated}, as the Hub lists it. "
                f"Received: {found.name}={found.hexdigest()}; the download was deleted",
                "Call again. If it fails again, a proxy or mirror modifies the file.",
            )
        )


def _cached(place: Place, cache_dir: Path | None) -> Path | None:
    """The cached file or folder, if it is complete."""
    if place.inside and (file := _find(place, place.inside, cache_dir)):
        return file
    folder = f"{place.inside}/" if place.inside else ""
    if weights := _find(place, folder + WEIGHTS, cache_dir):
        if not _find(
            place, folder + SETTINGS[0], cache_dir
        ):  # another program fetched only the weights
            log.warning("%s: the cache has its weights, but no %s", place, SETTINGS[0])
        return weights.parent
    if index := _find(place, folder + INDEX, cache_dir):
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        if all((index.parent / shard).is_file() for shard in shards):
            return index.parent
    return None


def _find(place: Place, name: str, cache_dir: Path | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(place.repo, name, cache_dir, place.revision)
    return Path(found) if isinstance(found, str) else None  # a marker object means "does not exist"


@contextlib.contextmanager
def _explained(place: Place) -> Iterator[None]:
    """Replaces the client's many errors by few that say what to do."""
    from huggingface_hub import errors

    login = "log in: hf auth login, or HF_TOKEN."
    page = f"https://huggingface.co/{place.repo}"
    explanations = (  # a subclass before its class
        (errors.GatedRepoError, PermissionError, "access is gated",
         f"Accept its terms at {page}, and {login}"),
        (errors.RepositoryNotFoundError, FileNotFoundError,
         f"the Hub has no {place.repo}, or it is private",
         f"Check the name. For a private one {login}"),
        (errors.RevisionNotFoundError, FileNotFoundError,
         f"it has no revision {place.revision!r}",
         "Pass a branch, a tag or a commit that its page lists."),
        (errors.EntryNotFoundError, FileNotFoundError, "it does not exist",
         "Call again: the repository may have changed."),
        (errors.OfflineModeIsEnabled, ConnectionError, "HF_HUB_OFFLINE was set",
         "Unset it, and restart Python."),
    )  # fmt: skip
    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # nothing cached, and the Hub cannot be reached
        raise network.unreachable(str(place), error.__cause__ or error) from error
    except Exception as error:
        for kind, raised, why, remedy in explanations:
            if isinstance(error, kind):
                raise raised(network.cannot_fetch(str(place), why, remedy)) from error
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            denied = status in (401, 403)
            remedy = f"To use a token that may read it, {login}" if denied else "Try again later."
            text = network.cannot_fetch(str(place), f"the Hub answered {status}", remedy)
            raise (PermissionError if denied else ConnectionError)(text) from error
        # The client's HTTP library is httpx or httpx2. Its own checks raise plain OSErrors.
        corrupt = type(error) is OSError and "Consistency check failed" in str(error)
        if corrupt or type(error).__module__.startswith("httpx"):
            raise network.unreachable(str(place), error) from error
        raise


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="keras_vit")


def _cache_folder(cache_dir: Path | None) -> str:
    from huggingface_hub import constants

    return str(cache_dir or constants.HF_HUB_CACHE)


def _listed(names: list[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + f" and {len(names) - 8} more" * (len(names) > 8)

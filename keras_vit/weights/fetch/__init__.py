"""`fetch_weights`: from a path, a known name, the Hugging Face Hub or an https:// URL."""

import difflib
import logging
import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from keras_vit.paths import as_output, is_path
from keras_vit.weights.fetch import https, hub, known, network
from keras_vit.weights.files import pickles

log = logging.getLogger("keras_vit")

EXAMPLES = (
    "a path, a known name (see `keras-vit models`), hf://organization/name[@revision][/file] or "
    "https://.../file"
)


def fetch_weights(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Path:
    """Downloads weights if needed, and returns their path.

    Downloads are written to a cache atomically and reused. With HF_HUB_OFFLINE=1 in the environment
    nothing is downloaded. Downloaded code is never run.

    Args:
        source: One of

            - the path of a file or folder, which is returned unchanged;
            - a known name such as `"vit_b16.augreg_in21k"` (`keras-vit models` lists them);
            - `"hf://organization/name"`: config.json and model.safetensors of a model on the
              Hugging Face Hub, optionally with `@revision` and `/file`;
            - `"https://.../file"`, optionally with `#sha256=...`.
        revision: Branch, tag or commit on the Hub.
        cache_dir: The cache. Defaults to huggingface_hub's, and for URLs to `models/keras_vit` in
            Keras' own.

    Returns:
        The path of the file or folder.

    Example:

    >>> fetch_weights("hf://google/vit-base-patch16-224")
    """
    if not is_path(source):
        raise ValueError(f"source must be {EXAMPLES}. Received: source={source!r}")
    text = os.fspath(source)
    folder = None if cache_dir is None else as_output("cache_dir", cache_dir).expanduser()
    if "://" not in text:
        path = Path(text).expanduser()
        if path.exists():
            _require_no_revision(text, revision)
            return path
        row = known.find(text)
        if row is None:
            raise FileNotFoundError(_not_found(text))
        if row.format == "torchvision":
            raise ValueError(_torchvision_pickle(row))
        log.info("%s is %s", text, row.source)
        text = row.source
    if text.startswith("hf://"):
        return hub.fetch_repository(text, revision, folder)
    _require_no_revision(text, revision)
    network.check_address(text)
    if PurePosixPath(urlsplit(text).path).suffix.lower() in pickles.SUFFIXES:
        raise ValueError(_url_of_pickle(text))
    return https.download(text, folder)


def _require_no_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(
            "revision must be None if source is not on the Hugging Face Hub. "
            f"Received: revision={revision!r}, source={source!r}"
        )


def _not_found(source: str) -> str:
    """The error for a source that is neither a path nor a known name, with suggestions."""
    hints, folder = [], Path(source).parent
    if re.fullmatch(r"[\w-]+/[\w.-]+", source):
        if folder.is_dir():  # a local folder, not an organization
            names = [path.name for path in folder.iterdir()]
            close = difflib.get_close_matches(Path(source).name, names, 1)
            hints += [f"the path {folder / name}" for name in close]
        else:
            hints.append(f"hf://{source} on the Hugging Face Hub")
    if near := known.nearest(source):
        one = "the known name" if len(near) == 1 else "one of the known names"
        hints.append(f"{one} {', '.join(near)}")
    meant = f" Did you mean {', or '.join(hints)}?" if hints else ""
    return f"source must be {EXAMPLES}. Received: source={source!r}, which does not exist.{meant}"


def _torchvision_pickle(row: known.Known) -> str:
    model, weights = row.reference.rpartition(", ")[2].split("_Weights.")
    file = f"{row.name}.safetensors"
    return network.cannot_fetch(
        row.name,
        f"torchvision publishes it as a pickle ({row.source}), which can run arbitrary code",
        "Convert it on a machine with torchvision, and pass the file: "
        'python -c "import torchvision.models as m, safetensors.torch as s; '
        f"s.save_file(m.get_model('{model.lower()}', weights='{weights}').state_dict(), "
        f"'{file}')\"",
    )


def _url_of_pickle(url: str) -> str:
    name = PurePosixPath(urlsplit(url).path).name
    return network.cannot_fetch(
        url,
        "it is named as a pickle, which can run arbitrary code",
        "Download it, convert it on a machine with torch, and pass the file: "
        + pickles.conversion_command(name),
    )

"""Fetching weights: from a path, a known name, the Hugging Face Hub or an https:// address."""

import logging
import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from keras_vit.paths import as_path, is_path
from keras_vit.weights.fetch import https, hub, known, network
from keras_vit.weights.files import pickles

log = logging.getLogger("keras_vit")

EXAMPLES = (
    "a path, a known name (see `keras-vit models`), hf://organisation/name[@revision][/file] or "
    "https://.../file"
)


def fetch_weights(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Path:
    """The file or folder that `source` means, on this machine.

    What is fetched is kept in a cache, appears there whole or not at all, and is not fetched again.
    With HF_HUB_OFFLINE=1 in the environment nothing is fetched. Nothing that is fetched is run.

    Args:
        source: One of

            - the path of a file or a folder, which is returned as it is;
            - a known name such as `"vit_b16.augreg_in21k"` (`keras-vit models` lists them);
            - `"hf://organisation/name"`: config.json and model.safetensors of a model of the
              Hugging Face Hub; with `@revision` and `/file` if you like;
            - `"https://.../file"`, with `#sha256=...` if you know it.
        revision: Branch, tag or commit of a model of the Hub.
        cache_dir: Folder to keep it in; by default that of huggingface_hub, or `models/keras_vit`
            in Keras' own for an address.

    Returns:
        Path of the file or the folder.

    Example:

    >>> fetch_weights("hf://google/vit-base-patch16-224")
    """
    if not is_path(source):
        raise ValueError(f"source must be {EXAMPLES}. Received: source={source!r}")
    text = os.fspath(source)
    folder = None if cache_dir is None else as_path("cache_dir", cache_dir).expanduser()
    if "://" not in text:
        path = Path(text).expanduser()
        if path.exists():
            _refuse_revision(text, revision)
            return path
        row = known.find(text)
        if row is None:
            raise FileNotFoundError(_missing(text))
        if row.format == "torchvision":
            raise ValueError(_convert_torchvision(row))
        log.info("%s is %s", text, row.source)
        text = row.source
    if text.startswith("hf://"):
        return hub.fetch_repository(text, revision, folder)
    _refuse_revision(text, revision)
    network.check_address(text)
    if PurePosixPath(urlsplit(text).path).suffix.lower() in pickles.SUFFIXES:
        raise ValueError(_convert_address(text))
    return https.download(text, folder)


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(
            "revision must be None where source is not on the Hugging Face Hub. "
            f"Received: revision={revision!r}, source={source!r}"
        )


def _missing(source: str) -> str:
    """The text for what is neither a path nor a name: what may have been meant."""
    hints = []
    if re.fullmatch(r"[\w-]+/[\w.-]+", source):
        hints.append(f"hf://{source} on the Hugging Face Hub")
    if near := known.nearest(source):
        one = "the known name" if len(near) == 1 else "one of the known names"
        hints.append(f"{one} {', '.join(near)}")
    meant = f" Did you mean {', or '.join(hints)}?" if hints else ""
    return f"source must be {EXAMPLES}. Received: source={source!r}, which does not exist.{meant}"


def _convert_torchvision(row: known.Known) -> str:
    model, weights = row.reference.rpartition(", ")[2].split("_Weights.")
    file = f"{row.name}.safetensors"
    return network.refusal(
        row.name,
        f"torchvision publishes it as a pickle ({row.source}), which can run any code",
        "Convert it where torchvision is, and pass the file: "
        'python -c "import torchvision.models as m, safetensors.torch as s; '
        f"s.save_file(m.get_model('{model.lower()}', weights='{weights}').state_dict(), "
        f"'{file}')\"",
    )


def _convert_address(url: str) -> str:
    name = PurePosixPath(urlsplit(url).path).name
    return network.refusal(
        url,
        "it is a pickle by its name, which can run any code",
        f"Download it and convert it where torch is, and pass the file: {pickles.command(name)}",
    )

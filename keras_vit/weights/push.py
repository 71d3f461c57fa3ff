"""`push_to_hub`: publishes a model on the Hugging Face Hub, with a model card."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.classifier import vit_of
from keras_vit.model import ViT
from keras_vit.weights import keras_files
from keras_vit.weights.formats import FORMATS
from keras_vit.weights.model_card import CARD
from keras_vit.weights.save import save_pretrained

RUN_RESULTS = "results.json"


def push_to_hub(
    model: ViT | str | os.PathLike,
    repo: str,
    *,
    format: str = "timm",
    results: Mapping[str, Any] | None = None,
    license: str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
) -> str:
    """Writes a model as `save_pretrained` does, and uploads it to the Hugging Face Hub.

    `from_pretrained("hf://organization/name")` reads it, and so does the library of the format. The
    login is huggingface_hub's: `hf auth login`, or HF_TOKEN. The repository is created if there is
    none. A model card that is there already is kept; the weights and the config are replaced.

    Args:
        model: A `ViT`, a `Classifier`, or a run folder, whose results the card then states.
        repo: "organization/name".
        format: A format of `save_pretrained` that is a folder.
        results: What the model reaches, for the card: numbers by what was measured.
        license: An identifier of the Hub's list, such as "apache-2.0", for the card.
        private: Whether a new repository is private; None leaves it to the Hub.
        commit_message: Message of the commit.

    Returns:
        The URL of the commit.

    Example:

    >>> keras_vit.push_to_hub(model, "me/flowers", results={"test accuracy": 0.97})
    """
    from keras_vit.weights.fetch import hub, network  # a network client

    place = hub.parse(f"hf://{repo}")
    if place.inside or place.revision != "main":
        raise ValueError(f"repo must be 'organization/name'. Received: repo={repo!r}")
    if format in FORMATS and not FORMATS[format].json_files:
        raise ValueError(
            "format must be one that is a folder, such as 'timm' or 'huggingface'. "
            f"Received: format={format!r}"
        )
    if network.offline():
        raise ConnectionError("HF_HUB_OFFLINE must be unset to push. Received: HF_HUB_OFFLINE")
    if isinstance(model, str | os.PathLike):
        model, results = _of_run(Path(model), results)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        save_pretrained(
            vit_of(model), path, format, results=results, license=license, repo=place.repo
        )
        return hub.upload(place, path, CARD, private=private, message=commit_message)


def _of_run(
    folder: Path, results: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    """The model of a run folder, and what it reached unless results are given."""
    from keras_vit.weights.load import from_pretrained

    if keras_files.find_keras(folder) is None:
        raise FileNotFoundError(
            f"model must be a model, a run folder or a .keras file. Received: {str(folder)!r}"
        )
    if results is None and (path := folder / RUN_RESULTS).is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        names = {"top1": "top-1 on the test images", "top5": "top-5", "knn": "k-NN accuracy"}
        results = {title: found[name] for name, title in names.items() if name in found}
    return from_pretrained(folder), results

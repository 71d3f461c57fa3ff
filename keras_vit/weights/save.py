"""`save_pretrained`: writes a `ViT` as a checkpoint that another library loads strictly."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.atomic import atomic_path
from keras_vit.classifier import takes_classifier
from keras_vit.model import ViT
from keras_vit.paths import as_output
from keras_vit.weights import json_rules
from keras_vit.weights.files.writers import write_npz, write_safetensors
from keras_vit.weights.formats import FORMATS, WRITABLE
from keras_vit.weights.formats.table import Empty, Format, Pair
from keras_vit.weights.model_card import CARD, model_card

WEIGHTS = "model.safetensors"


@takes_classifier
def save_pretrained(
    model: ViT,
    path: str | os.PathLike,
    format: str = "timm",
    *,
    results: Mapping[str, Any] | None = None,
    license: str | None = None,
    repo: str | None = None,
) -> Path:
    """Writes a model's weights for another library, and for a folder its model card.

    "timm", "beit" (timm's BEiT), "huggingface", "huggingface_clip" (SigLIP) and
    "huggingface_dinov3" are folders with `config.json` and `model.safetensors`. "google" and
    "big_vision" are one .npz, "torchvision" and "vit_pytorch" one .safetensors file. Weights are
    written in float32, without their `trainable` flags, which `model.save` keeps. A model that the
    other library cannot compute is an error, and nothing is written.

    The card is a README.md with the classes, the pixel contract and how to load the model. One that
    is there already is kept.

    Args:
        model: A `ViT` without LoRA and quantization.
        path: A folder, or a file if the name ends in .npz or .safetensors.
        format: "timm", "beit", "huggingface", "huggingface_clip", "huggingface_dinov3", "google",
            "big_vision", "torchvision" or "vit_pytorch".
        results: What the model reaches, for the card: numbers by what was measured.
        license: An identifier of the Hub's list, such as "apache-2.0", for the card.
        repo: Where the card says that the model is on the Hub, "organization/name".

    Returns:
        The folder or file that was written.

    Example:

    >>> keras_vit.save_pretrained(model, "flowers", format="timm")
    >>> timm.create_model("local-dir:flowers", pretrained=True)
    """
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a ViT. Received: model={model!r}")
    if format not in WRITABLE:
        raise ValueError(
            f"format must be one of {', '.join(map(repr, WRITABLE))}. Received: format={format!r}"
        )
    _check_layers(model)
    to, config = FORMATS[format], model.config
    if problems := list(to.unsupported(config)):
        raise ValueError(
            f"format must be one that supports the model: {'; '.join(problems)}. "
            f"Received: format={format!r}"
        )
    table = _Table(model, to)
    if wrong := table.unmatched():
        raise ValueError(
            "format must be one that has arrays for all weights of the model. "
            f"Received: format={format!r}, which differs in {', '.join(wrong)}"
        )
    target = as_output("path", path)
    as_file = target.suffix in (".npz", ".safetensors")
    if as_file and target.suffix != to.suffix:
        raise ValueError(
            f"path must end in {to.suffix!r} for format={format!r}. Received: path={str(path)!r}"
        )
    if not to.json_files:
        return _write(target if as_file else target.with_name(target.name + to.suffix), table, to)
    if as_file:
        return _write(target, table, to)
    _check_processor(target, to)
    card = model_card(model, format, repo=repo, results=results, license=license)
    with atomic_path(target) as folder:
        folder.mkdir()
        if not (target / CARD).exists():
            (folder / CARD).write_text(card, encoding="utf-8")
        _write(folder / WEIGHTS, table, to)
        for name, content in to.json_files.items():
            text = json.dumps(content(config), indent=2, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
    return target


class _Table(Mapping):
    """The arrays of a format by name, each computed from the model's weights on access."""

    def __init__(self, model: ViT, to: Format):
        self.config = model.config
        self._weights = {weight.path: weight for weight in model.weights}
        rows = (to.rows_to_write or to.rows)(model.config)
        self._rows = {row.source: row for row in rows if isinstance(row, Pair | Empty)}

    def __getitem__(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self._rows[name].to_source(self._value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def unmatched(self) -> list[str]:
        """Paths of weights that only the model has, or only the format."""
        theirs = {path for row in self._rows.values() for path in row.paths}
        return sorted(theirs ^ self._weights.keys())

    def _value(self, path: str) -> np.ndarray:
        value = keras.ops.convert_to_numpy(self._weights[path].value)
        return value.astype(np.float32, copy=False)


def _write(path: Path, table: _Table, to: Format) -> Path:
    if to.suffix == ".npz":
        write_npz(path, table)
    else:
        alone = not to.json_files or path.name != WEIGHTS
        metadata = json_rules.metadata(table.config) if alone else {"format": "pt"}
        write_safetensors(path, table, metadata)
    return path


def _check_processor(target: Path, to: Format) -> None:
    """Refuses a folder whose pixels transformers would read in place of those that we write."""
    path = target / json_rules.PROCESSOR
    if "preprocessor_config.json" not in to.json_files:
        return
    if json_rules.read_json(path).get("image_processor") is not None:
        raise ValueError(
            f"path must be a folder without a {json_rules.PROCESSOR} that states an "
            "image_processor: transformers would read it, and not the pixels of this model. "
            f"Remove the file, or pass another folder. Received: path={str(target)!r}"
        )


def _check_layers(model: ViT) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise ValueError(
                "model must be without LoRA and quantization. To merge LoRA, save and reload the "
                f"model. Received: a changed layer {layer.path!r}"
            )

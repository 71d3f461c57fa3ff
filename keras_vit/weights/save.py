"""Saving: a `ViT` as a checkpoint that its source's own code loads strictly."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.paths import as_path
from keras_vit.weights import own
from keras_vit.weights.files import arrays
from keras_vit.weights.formats import FORMATS, WRITTEN
from keras_vit.weights.formats.table import Derived, Format, Pair

WEIGHTS = "model.safetensors"


def save_pretrained(model: ViT, path: str | os.PathLike, format: str = "timm") -> Path:
    """Writes a model's weights for another library.

    "timm" and "huggingface" are folders with `config.json` and `model.safetensors`; "google" and
    "big_vision" are one .npz, "torchvision" and "vit_pytorch" one .safetensors file. Weights are
    written in float32. `trainable` flags are not, as in Keras' `.weights.h5`; `model.save` keeps
    them. What the format's own code cannot compute is an error, and nothing is written.

    Args:
        model: A `ViT` without LoRA and quantisation.
        path: A folder, or a file where the name ends in .npz or .safetensors.
        format: "timm", "huggingface", "google", "big_vision", "torchvision" or "vit_pytorch".

    Returns:
        The folder or file that was written.

    Example:

    >>> keras_vit.save_pretrained(model, "flowers", format="timm")
    >>> timm.create_model("local-dir:flowers", pretrained=True)
    """
    if not isinstance(model, ViT):
        raise ValueError(f"model must be a ViT. Received: model={model!r}")
    if format not in WRITTEN:
        raise ValueError(
            f"format must be one of {', '.join(map(repr, WRITTEN))}. Received: format={format!r}"
        )
    _check_layers(model)
    to, config = FORMATS[format], model.config
    if problems := list(_problems(to, config)):
        raise ValueError(
            f"format must be able to express the model; {format!r} cannot: "
            + "; ".join(problems)
            + f". Received: format={format!r}"
        )
    table = _Table(model, to)
    target = as_path("path", path)
    as_file = target.suffix in (".npz", ".safetensors")
    if as_file and target.suffix != to.suffix:
        raise ValueError(
            f"path must end in {to.suffix!r} for format={format!r}. Received: path={str(path)!r}"
        )
    if to.config_json is None:
        return _write(target if as_file else target.with_name(target.name + to.suffix), table, to)
    if as_file:
        return _write(target, table, to)
    with arrays.atomic_path(target) as folder:
        folder.mkdir()
        _write(folder / WEIGHTS, table, to)
        for name, content in {own.CONFIG: to.config_json, **to.extra_json}.items():
            text = json.dumps(content(config), indent=2, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
    return target


class _Table(Mapping):
    """The arrays of a format by name, each made of the model's weights when it is asked for."""

    def __init__(self, model: ViT, to: Format):
        self.config = model.config
        self._weights = {weight.path: weight for weight in model.weights}
        rows = (to.written or to.pairs)(model.config)
        self._rows = {row.source: row for row in rows if not isinstance(row, Derived)}

    def __getitem__(self, name: str) -> np.ndarray:
        row = self._rows[name]
        if isinstance(row, Pair):
            return np.ascontiguousarray(row.write(self._value))
        return np.zeros(row.shape, np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _value(self, path: str) -> np.ndarray:
        value = keras.ops.convert_to_numpy(self._weights[path].value)
        return value.astype(np.float32, copy=False)


def _write(path: Path, table: _Table, to: Format) -> Path:
    if to.suffix == ".npz":
        arrays.write_npz(path, table)
    else:
        lone = to.config_json is None or path.name != WEIGHTS
        metadata = own.metadata(table.config) if lone else {"format": "pt"}
        arrays.write_safetensors(path, table, metadata)
    return path


def _problems(to: Format, config: ViTConfig) -> Iterable[str]:
    """What the format cannot say of this config, each as the field, the rule and the value."""
    for name, allowed in (to.writes or {}).items():
        value = getattr(config, name)
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            yield f"{name} must be {' or '.join(map(repr, allowed))}, it is {value!r}"
    yield from to.complaints(config)


def _check_layers(model: ViT) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise ValueError(
                "model must be without LoRA and quantisation: save it and load it again to merge "
                f"LoRA. Received: a changed layer {layer.path!r}"
            )

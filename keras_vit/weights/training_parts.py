"""Reads what trained a ViT and is in the file of its weights: MAE's decoder, DINO's head."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.weights import keras_files
from keras_vit.weights.files.arrays import Arrays, non_finite, open_arrays
from keras_vit.weights.files.rules import mismatch, refusal
from keras_vit.weights.formats import recognize
from keras_vit.weights.formats.dino_head import Head, read_head
from keras_vit.weights.formats.mae_decoder import Decoder, read_decoder
from keras_vit.weights.formats.table import Header, Row, Shape
from keras_vit.weights.json_rules import CONFIG
from keras_vit.weights.load import read_json_files

LOG = logging.getLogger("keras_vit")


def find_decoder(path: Path, num_heads: int | None = None) -> Decoder:
    """What a file holds of a masked autoencoder's decoder.

    Args:
        path: A file or folder.
        num_heads: Attention heads of the decoder, if the caller knows them.

    Raises:
        ValueError: The file has no decoder.
    """
    rule = (
        "hold a masked autoencoder with its decoder. For an encoder alone (mae_pretrain_*), call "
        "MAE(keras_vit.from_pretrained(...)), whose decoder is new"
    )
    format, header = _read_header(path, rule)
    decoder = read_decoder(format, header, num_heads)
    if decoder is None:
        raise refusal(path, rule, format=format)
    if decoder.heads_assumed:
        heads = decoder.sizes["decoder_heads"]
        LOG.warning("%s does not state decoder_heads. Assumed: %d, as published", path, heads)
    return decoder


def find_head(path: Path) -> Head:
    """What a file holds of DINO's projection head.

    Raises:
        ValueError: The file has none.
    """
    rule = (
        "hold a ViT with DINO's head, the teacher of a full checkpoint. For a ViT alone, call "
        "DINO(keras_vit.from_pretrained(...), steps), whose head is new"
    )
    head = read_head(_read_header(path, rule)[1])
    if head is None:
        raise refusal(path, rule)
    return head


def read_values(
    path: Path,
    rows: Iterable[Row],
    shapes: Mapping[str, Shape],
    names_of_part: str,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """The weights of a part by our names.

    Args:
        path: A file or folder.
        rows: The table of names.
        shapes: Shapes of our weights by name.
        names_of_part: A pattern of the part's arrays; one that no row names is an error.
        optional: Our weights that are left out where their shape is another.

    Raises:
        ValueError: Arrays are missing, have another shape, hold NaN or Inf, or are unknown; the
            error lists them all.
    """
    values: dict[str, np.ndarray] = {}
    lines: list[str] = []
    with open_arrays(path) as file:
        _, header, names = _header(file, path)
        seen: set[str] = set()
        for row in rows:
            for name, shape in row.source_shapes(shapes).items():
                seen.add(name)
                found = header.shapes.get(name)
                if found == shape:
                    array = file[names[name]].astype(np.float32, copy=False)
                    lines += filter(None, [non_finite(names[name], array)])
                    values |= row.to_ours({name: array}, shapes)
                elif found is None:
                    lines.append(f"missing: {name!r}")
                elif not set(row.paths) <= set(optional):
                    lines.append(f"wrong shape: {names[name]!r} {found}, expected {shape}")
        unknown = [n for n in header.shapes if re.match(names_of_part, n) and n not in seen]
        lines += [f"extra: {names[name]!r}" for name in sorted(unknown)]
        if lines:
            raise mismatch(file.path, lines)
    return values


def _read_header(path: Path, rule: str) -> tuple[str, Header]:
    """The format of the ViT, and the header. `rule` says what a file of another kind must hold."""
    if keras_files.find_weights_h5(path) is not None:
        raise refusal(path, rule)
    with open_arrays(path) as file:
        format, header, _ = _header(file, path)
    return format, header


def _header(file: Arrays, path: Path) -> tuple[str, Header, dict[str, str]]:
    """The ViT's format, the header without its prefix, and the names in the file."""
    config: Mapping[str, Any] = read_json_files(file, path).get(CONFIG, {})
    format, prefix = recognize(file.shapes, config)
    names = {name.removeprefix(prefix): name for name in file.shapes}
    return format.name, Header({k: file.shapes[v] for k, v in names.items()}, config), names

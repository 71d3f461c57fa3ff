"""The decoder in files of masked autoencoders: facebookresearch's own and transformers'.

Our names are those of `keras_vit.train.objectives.mae_decoder.MAEDecoder`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface, timm
from keras_vit.weights.formats.table import Header, Pair, Row
from keras_vit.weights.formats.timm_reading import NAMES
from keras_vit.weights.formats.torch_names import TABLE, linear, norm

HEADS = 16
"""Attention heads of every published decoder, which no array shows."""
# By the name of the encoder's format: what precedes the decoder's names, and what its blocks may be
# called. Published files have "layers"; transformers 5 writes its own renaming of them.
PLACES = {
    "mae": ("", ("decoder_blocks",)),
    "huggingface": ("decoder.", ("decoder.decoder_layers", "decoder.decoder_encoder.layer")),
}
OURS_OF_JSON = {"mask_ratio": "mask_ratio", "norm_pix_loss": "normalize_pixels"}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What a file holds of a decoder."""

    sizes: Mapping[str, Any]
    """Width, depth, heads and hidden size of the MLPs, as arguments of `MAE`."""
    stated: Mapping[str, Any]
    """What `config.json` states of `mask_ratio` and `normalize_pixels`."""
    rows: tuple[Row, ...]
    """The table of names."""
    heads_assumed: bool
    """Whether neither the caller nor the file states the heads."""


def read_decoder(format: str, header: Header, num_heads: int | None = None) -> Decoder | None:
    """Reads from a header what there is of a decoder.

    Args:
        format: The name of the encoder's format.
        header: What is known of the file.
        num_heads: Attention heads of the decoder, if the caller knows them.

    Returns:
        The decoder, or None if the file has none.
    """
    before, places = PLACES.get(format, ("", ()))
    if not places or not header.has(re.escape(f"{before}decoder_embed.")):
        return None
    blocks = next((name for name in places if header.has(re.escape(name))), places[0])
    depth = header.count(rf"{re.escape(blocks)}\.(\d+)\.")
    width = header.shape(f"{before}decoder_embed.weight", 2)[0]
    names, mlp = NAMES, "mlp.fc1"
    if format == "huggingface":
        new = f"{blocks}.0.attention.q_proj.weight" in header.shapes
        names = huggingface.NEW if new else huggingface.OLD
        mlp = names["mlp"][0]
    mlp_dim = header.shape(f"{blocks}.0.{mlp}.weight", 2)[0]
    heads = num_heads or header.config.get("decoder_num_attention_heads")
    # A block of the decoder is a plain one. Its heads are in the shapes of our weights.
    plain = ViTConfig(width=width, depth=depth, num_heads=1, mlp_dim=mlp_dim)
    return Decoder(
        sizes={
            "decoder_width": width,
            "decoder_depth": depth,
            "decoder_heads": heads or HEADS,
            "decoder_mlp_dim": mlp_dim,
        },
        stated={
            ours: header.config[word]
            for word, ours in OURS_OF_JSON.items()
            if header.config.get(word) is not None
        },
        rows=tuple(_rows(format, before, blocks, plain, names)),
        heads_assumed=heads is None,
    )


def _rows(
    format: str, before: str, blocks: str, config: ViTConfig, names: Mapping[str, Any]
) -> Iterator[Row]:
    yield from linear(f"{before}decoder_embed", "embed")
    yield Pair(f"{before}mask_token", ("mask_token",))
    yield Pair(f"{before}decoder_pos_embed", ("positions",), TABLE)
    for i in range(config.depth):
        theirs, ours = f"{blocks}.{i}", f"block_{i}"
        if format == "mae":
            yield from timm.block_rows(config, theirs, ours, names)
        else:
            yield from huggingface.block_rows(config, names, theirs, ours)
    yield from norm(f"{before}decoder_norm", "norm")
    yield from linear(f"{before}decoder_pred", "pixels")

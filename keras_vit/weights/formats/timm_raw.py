"""Raw state dicts of DeiT-III, DINO, DINOv2 and MAE, which share nearly all names with timm's."""

import dataclasses

from keras_vit.weights.formats.table import Header, Reading
from keras_vit.weights.formats.timm import TIMM
from keras_vit.weights.formats.timm_reading import (
    FREQUENCIES,
    NAMES,
    RAW_SCALES,
    ROPE,
    read_timm,
)
from keras_vit.weights.formats.torch_names import IMAGENET_PIXELS

RAW_DEIT3 = {**NAMES, "scales": RAW_SCALES}
RAW_DINOV2 = {**NAMES, "registers": "register_tokens", "head": "linear_head"}


def read_deit3(header: Header) -> Reading:
    """Raw DeiT-III: LayerScale's gains have no module of their own."""
    reading = read_timm(header, RAW_DEIT3)
    if "pos_embed" not in header.shapes or header.has(f"reg_token$|{FREQUENCIES}$"):
        return reading  # timm's Eva, in a file alone
    # RoPE-ViT, which has rotary positions beside the table, was trained with the same code.
    return _raw(reading, "deit", ("num_heads", "position_embedding", *ROPE))


def read_dinov2(header: Header) -> Reading:
    """Raw DINOv2: registers have another name, and the table has a resampling rule of its own.

    Its linear classifier reads the class token and the mean of the patches of the last block.
    """
    registers = "register_tokens" in header.shapes
    reading = read_timm(header, RAW_DINOV2)
    if header.size("linear_head.weight", 1, 0) == 2 * reading.fields["width"]:
        reading.fields["pooling"] = "token_mean"
    return _raw(reading, "huggingface_dinov2_registers" if registers else "dinov2")


def read_dino(header: Header) -> Reading:
    """Raw DINO with its head, which is dropped: the teacher of a "full checkpoint".

    A published backbone alone has timm's names and nothing that tells them apart.
    """
    return _raw(read_timm(header), "dinov2")


def read_mae(header: Header) -> Reading:
    """Raw MAE: an encoder, and a decoder that is dropped."""
    return _raw(read_timm(header), "deit")


def _raw(
    reading: Reading, interpolation: str, unstated: tuple[str, ...] = ("num_heads",)
) -> Reading:
    """Adds these projects' pixel range. Their code fixes every field that is not `unstated`."""
    pixels = {
        "interpolation": interpolation,
        "resize_method": "bicubic",
        "crop_fraction": 224 / 256,
    }
    if reading.fields["in_channels"] == 3:
        pixels |= IMAGENET_PIXELS
    assumed = tuple(name for name in reading.assumed if name in unstated)
    return Reading(reading.fields | pixels, reading.style, assumed)


# Read-only, with the same rows.
RAW = dataclasses.replace(TIMM, writable=None, limits=(), json_files={}, bare=True)
DEIT3 = dataclasses.replace(
    RAW, name="deit3", read_config=read_deit3, needs=(r"blocks\.0\.gamma_1$",)
)
DINOV2 = dataclasses.replace(
    RAW, name="dinov2", read_config=read_dinov2, needs=(r"mask_token$", r"register_tokens$")
)
DINO = dataclasses.replace(
    RAW,
    name="dino",
    read_config=read_dino,
    needs=(r"head\.last_layer\.",),
    dropped={
        **RAW.dropped,
        r"head\.(mlp|last_layer)\.": "DINO's head: keras_vit.train.DINO.from_pretrained reads it",
    },
)
MAE = dataclasses.replace(RAW, name="mae", read_config=read_mae, needs=(r"decoder_embed\.",))

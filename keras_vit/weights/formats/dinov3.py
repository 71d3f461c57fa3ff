"""Raw files of DINOv3, and of what its code trained: EUPE and LingBot-Vision.

The names are timm's but for the registers, the gated MLP and one bias of queries, keys and values,
whose middle third their code multiplies by 0. The periods of the rotary positions are stored in
bfloat16; like timm and transformers, a `ViT` computes them anew.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.table import Checked, Header, Reading, Row
from keras_vit.weights.formats.timm import timm_rows
from keras_vit.weights.formats.timm_raw import RAW
from keras_vit.weights.formats.timm_reading import NAMES, read_timm
from keras_vit.weights.formats.torch_names import IMAGENET_PIXELS

PERIODS = "rope_embed.periods"
# Published models whose heads are not 64 wide, by width.
HEADS = {4096: 32}


def read_dinov3(header: Header) -> Reading:
    """The config: from shapes, and what DINOv3's code fixes."""
    width = header.shape("patch_embed.proj.weight", 4)[0]
    quarter = header.size(PERIODS, 0, None)
    known: dict[str, Any] = {"position_embedding": "rope"}
    if quarter or width % 64 == 0:
        known["num_heads"] = width // (4 * quarter) if quarter else HEADS.get(width, width // 64)
    masked = header.has(r"blocks\.0\.attn\.qkv\.bias_mask$")
    names = {**NAMES, "registers": "storage_tokens", "masked": masked}
    reading = read_timm(dataclasses.replace(header, given={**known, **header.given}), names)
    fields = {
        "norm_epsilon": 1e-5,
        "key_bias": not masked,
        "position_embedding": "rope",
        "pooling": "token",
        "resize_method": "bilinear",
    }
    if reading.fields["in_channels"] == 3:
        fields |= IMAGENET_PIXELS
    style = {**reading.style, "periods": quarter}
    assumed = () if quarter else tuple(header.unstated(("num_heads",), {}))
    return Reading(reading.fields | fields, style, assumed)


def dinov3_rows(config: ViTConfig, periods: int | None = None, **style: Any) -> Iterator[Row]:
    """The table of names. `periods` is how many the file holds, `style` is as for `timm_rows`."""
    yield from timm_rows(config, **style)
    if periods:

        def check(found: np.ndarray) -> None:
            expected = config.rope_base ** (np.arange(periods) / periods)
            if np.abs(found / expected - 1).max() > 2**-7:  # twice bfloat16's rounding
                raise ValueError(
                    f"rope_base must be that of the periods in {PERIODS!r}, which do not fit "
                    f"rope_base={config.rope_base}. Received: {found.tolist()}"
                )

        yield Checked(PERIODS, (periods,), check)


DINOV3 = dataclasses.replace(
    RAW,
    name="dinov3",
    read_config=read_dinov3,
    rows=dinov3_rows,
    needs=(r"storage_tokens$", r"rope_embed\.periods$"),
    dropped={
        r"mask_token$": "the mask token of pretraining",
        r"blocks\.\d+\.attn\.qkv\.bias_mask$": "which third of the bias is not used",
        r"local_cls_norm\.": "a LayerNorm for small crops in pretraining",
        r"projectors\.": "the heads of distillation",
    },
    refused={
        r"cls_norm\.": "a LayerNorm of its own for the class token",
        r"blocks\.0\.attn\.wq\.": "fewer keys than queries (Sapiens2)",
        r"blocks\.0\.0\.": "blocks in chunks (save it without block chunks)",
    },
)

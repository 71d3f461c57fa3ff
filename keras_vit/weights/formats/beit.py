"""State dicts of BEiT and BEiT v2: timm's `Beit`, whose names raw files have too."""

import dataclasses
import math
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import timm_config
from keras_vit.weights.formats.table import PLAIN, STANDARD_HEADS, Header, Limit, Reading
from keras_vit.weights.formats.timm import TIMM, timm_rows
from keras_vit.weights.formats.timm_reading import NAMES as TIMM_NAMES
from keras_vit.weights.formats.timm_reading import RAW_SCALES, read_timm

NAMES = {
    **TIMM_NAMES,
    "scales": RAW_SCALES,
    "relative": ("blocks.{}.attn.", "rel_pos_bias."),
}


def read_beit(header: Header) -> Reading:
    """BEiT, BEiT v2: raw files have timm's names."""
    return read_timm(header, NAMES)


def config_json(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` from which timm builds a `Beit`."""
    content = timm_config.config_json(config)
    shared = ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio")
    shared += ("qkv_bias", "init_values", "global_pool")
    arguments = {name: content["model_args"][name] for name in shared}
    arguments |= {
        "use_rel_pos_bias": True,
        "use_abs_pos_emb": config.position_table is not None,
        "use_fc_norm": config.final_norm == "after_pooling",
    }
    return {**content, "architecture": "beit_base_patch16_224", "model_args": arguments}


def _is_square_table(rows: int, columns: int) -> bool:
    """Whether a table of relative positions has as many rows as that of a square grid."""
    offsets = (2 * rows - 1) * (2 * columns - 1)
    return math.isqrt(offsets) ** 2 == offsets


BEIT = dataclasses.replace(
    TIMM,
    name="beit",
    read_config=read_beit,
    rows_to_write=lambda config: timm_rows(config, NAMES),
    writable={
        **{name: values for name, values in PLAIN.items() if name != "layer_scale"},
        "position_embedding": ("relative_bias", "learned+relative_bias"),
        "class_token": (True,),
        "qkv_bias": (True, False),
        "key_bias": (True, False),
        "gelu": ("exact",),
        "norm_epsilon": (1e-6,),
        "representation_size": (None,),
        "pooling": ("mean", "token", None),
        "final_norm": ("before_pooling", "after_pooling"),
    },
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: c.position_table is None or c.class_row,
            "position_class_row must be True, where there is a table",
        ),
        Limit(
            lambda c: c.key_bias != c.qkv_bias,
            "key_bias must be False, because BEiT's keys have no bias",
        ),
        Limit(
            lambda c: c.grid[0] == c.grid[1] or not _is_square_table(*c.grid),
            "image_size must have another grid than {0.grid}, which timm takes for a square one",
        ),
    ),
    json_files={"config.json": config_json},
    needs=(r"blocks\.0\.attn\.relative_position_bias_table$", r"rel_pos_bias\."),
)

"""The JSON beside weights and in their metadata: what each field that is used must be.

Others wrote these files, so a known name may hold anything. The formats and `ViTConfig` check which
values fit together.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.config_rules import MAX_SIZE
from keras_vit.weights.files import preset
from keras_vit.weights.files.documents import (
    COUNT,
    FLAG,
    INT,
    NUMBER,
    NUMBERS,
    OBJECT,
    TEXT,
    Rule,
    Shape,
    check_fields,
    each,
    is_finite,
    is_text,
    read_document,
    stated,
)
from keras_vit.weights.files.rules import Refused, refusal

CONFIG = "config.json"
PROCESSOR = "processor_config.json"
"""Where transformers 5 writes the settings of a processor of images and text."""
METADATA = "keras_vit"
"""The name of our config in the metadata of a safetensors file."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE


def _is_pair(value: Any) -> bool:
    return each(_is_size)(value) and len(value) == 2


def _is_side(value: Any) -> bool:
    """What transformers has for a size: one side, a pair, or sides by name."""
    sides = value.values() if isinstance(value, dict) else (value,)
    return _is_pair(value) or all(side is None or _is_size(side) for side in sides)


def _is_labels(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(is_text(name) or type(name) in (int, float) for name in value.values())


SIZE = Rule(f"an int from 1 to {MAX_SIZE}", _is_size)
PAIR = Rule(f"an int from 1 to {MAX_SIZE} or two of them", lambda v: _is_size(v) or _is_pair(v))
SIZES = Rule(f"three ints from 1 to {MAX_SIZE}", lambda v: each(_is_size)(v) and len(v) == 3)
SIDES = Rule(f"an int from 1 to {MAX_SIZE}, two of them, or an object of them", _is_side)
LABELS = Rule("an object of strings", _is_labels)
STATED_NUMBER = NUMBER._replace(or_null=False)

PIXELS: Shape = {
    "input_size": SIZES,
    "mean": NUMBERS,
    "std": NUMBERS,
    "crop_pct": NUMBER,
    "crop_mode": TEXT,
    "interpolation": TEXT,
}
ENCODER: Shape = {
    "model_type": TEXT._replace(or_null=False),
    "num_attention_heads": SIZE,
    "num_channels": SIZE,
    "image_size": PAIR,
    "patch_size": PAIR,
    "layer_norm_eps": STATED_NUMBER,
    "rms_norm_eps": STATED_NUMBER,
    "layerscale_value": NUMBER,
    "rope_theta": STATED_NUMBER,
    "hidden_act": TEXT,
    "is_native": FLAG._replace(or_null=False),
}
IMAGE_PROCESSOR: Shape = {
    "image_mean": NUMBERS,
    "image_std": NUMBERS,
    "resample": INT,
    "do_normalize": FLAG,
    "do_center_crop": FLAG,
    "size": SIDES,
    "crop_size": SIDES,
}
NESTED: Shape = {"image_processor": IMAGE_PROCESSOR}
"""transformers' processor_config.json; older ones hold nothing of images."""
FIELDS: Shape = {
    # transformers: config.json and preprocessor_config.json
    **ENCODER,
    **IMAGE_PROCESSOR,
    "vision_config": ENCODER,  # of a model of images and text
    "id2label": LABELS,
    "decoder_num_attention_heads": SIZE,
    "mask_ratio": Rule("a number from 0 to 1", lambda v: is_finite(v) and 0 <= v <= 1),
    "norm_pix_loss": FLAG,
    # timm
    "architecture": TEXT._replace(or_null=False),
    "global_pool": TEXT,
    "model_args": {
        "num_heads": SIZE,
        "img_size": PAIR,
        "init_values": NUMBER,
        "pool_include_prefix": FLAG,
        "dynamic_img_pad": FLAG,
        "use_rot_pos_emb": FLAG,
        "rope_rotate_half": FLAG,
        "rope_grid_offset": NUMBER,
        "ref_feat_shape": PAIR,
        "pos_embed": TEXT,
        "global_pool": TEXT,
    },
    "pretrained_cfg": PIXELS,
    **PIXELS,  # files written before 2023 have them at the top level
}
"""A shape; see `keras_vit.weights.files.documents`."""


_NUMBERS = Rule("a number or a list of them", lambda v: is_finite(v) or each(is_finite)(v))


def _serialized(inside: Shape) -> Shape:
    return {"class_name": stated(TEXT), "config": stated(OBJECT, inside)}


BACKBONES = (
    *("ViTBackbone", "DeiTBackbone", "DINOV2Backbone", "DINOV3Backbone"),
    *("CLIPBackbone", "CLIPVisionEncoder", "SigLIPBackbone", "SigLIPVisionEncoder"),
)
_TOWER: Shape = {
    "image_shape": SIZES,
    "position_embedding_shape": Rule("two or three sizes", each(_is_size)),
    "num_heads": SIZE,
    "num_register_tokens": COUNT._replace(or_null=False),
    "use_mask_token": FLAG._replace(or_null=False),
    "layer_norm_epsilon": STATED_NUMBER,
    "layer_norm_eps": STATED_NUMBER,
    "layer_scale_init_value": STATED_NUMBER,
    "rope_theta": STATED_NUMBER,
    "hidden_activation": TEXT._replace(or_null=False),
    "intermediate_activation": TEXT._replace(or_null=False),
    "use_mha_bias": FLAG,
}
BACKBONE = _serialized({**_TOWER, "vision_encoder": _serialized(_TOWER)})
TASK = _serialized(
    {"num_classes": SIZE, "pooling": TEXT, "activation": TEXT, "intermediate_dim": SIZE}
)
CONVERTER = _serialized(
    {
        "scale": _NUMBERS,
        "offset": _NUMBERS,
        "interpolation": TEXT,
        "crop_to_aspect_ratio": FLAG,
    }
)
"""What KerasHub's presets state."""


def read_preset(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a preset of KerasHub states of the model, with its task, and of its pixels."""
    backbone = read_document(folder / CONFIG, {"class_name": stated(TEXT)})
    if (name := backbone["class_name"]) not in BACKBONES:
        rule = f"state a backbone that keras_vit knows, one of {', '.join(BACKBONES)}"
        raise refusal(folder / CONFIG, rule, class_name=name)
    check_fields(folder / CONFIG, backbone, BACKBONE)
    task = read_json(folder / preset.TASK, TASK)
    converter = read_json(folder / preset.PIXELS, CONVERTER)
    return {**backbone, "task": task.get("config")}, converter.get("config", {})


def read_json(path: Path, shape: Shape | None = None) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no file."""
    return read_document(path, shape) if path.exists() else {}


def parse_config(path: str | os.PathLike, fields: Any) -> ViTConfig:
    """The `ViTConfig` that a file of ours states. Errors name the file and the field."""
    if not isinstance(fields, Mapping):
        raise refusal(path, "state its config as an object", config=fields)
    try:
        return ViTConfig.from_dict(fields)
    except ValueError as error:
        raise Refused(f"{error}, as {os.fspath(path)!r} states") from error


def metadata(config: ViTConfig) -> dict[str, str]:
    """The metadata of a safetensors file of ours, which states its config."""
    return {"format": "pt", METADATA: json.dumps(config.to_dict())}

"""All formats, and `recognize`: whose names does a file have?"""

from collections.abc import Iterable, Mapping
from typing import Any

from keras_vit.config_rules import short
from keras_vit.weights.formats import timm_config
from keras_vit.weights.formats.beit import BEIT
from keras_vit.weights.formats.big_vision import BIG_VISION
from keras_vit.weights.formats.dinov3 import DINOV3
from keras_vit.weights.formats.google import GOOGLE
from keras_vit.weights.formats.huggingface import HUGGINGFACE
from keras_vit.weights.formats.huggingface_aimv2 import HUGGINGFACE_AIMV2
from keras_vit.weights.formats.huggingface_clip import HUGGINGFACE_CLIP
from keras_vit.weights.formats.huggingface_dinov3 import HUGGINGFACE_DINOV3
from keras_vit.weights.formats.keras_hub import KERAS_HUB
from keras_vit.weights.formats.keras_hub_dinov3 import KERAS_HUB_DINOV3
from keras_vit.weights.formats.keras_hub_towers import KERAS_HUB_TOWERS
from keras_vit.weights.formats.open_clip import OPEN_CLIP
from keras_vit.weights.formats.table import Format
from keras_vit.weights.formats.timm import TIMM
from keras_vit.weights.formats.timm_naflex import TIMM_NAFLEX
from keras_vit.weights.formats.timm_raw import DEIT3, DINO, DINOV2, MAE
from keras_vit.weights.formats.torchvision import TORCHVISION
from keras_vit.weights.formats.vit_pytorch import VIT_PYTORCH

# The raw files come before timm's, which have nearly the same names.
FORMATS = {
    f.name: f
    for f in (
        GOOGLE,
        BIG_VISION,
        TORCHVISION,
        HUGGINGFACE,
        HUGGINGFACE_CLIP,
        HUGGINGFACE_AIMV2,
        HUGGINGFACE_DINOV3,
        OPEN_CLIP,
        VIT_PYTORCH,
        KERAS_HUB,
        KERAS_HUB_DINOV3,
        KERAS_HUB_TOWERS,
        MAE,
        DINO,
        BEIT,
        DINOV3,
        DINOV2,
        DEIT3,
        TIMM_NAFLEX,
        TIMM,
    )
}
WRITABLE = tuple(name for name, f in FORMATS.items() if f.writable is not None)


def recognize(names: Iterable[str], config: Mapping[str, Any]) -> tuple[Format, str]:
    """The format with these names, and their prefix.

    Args:
        names: Names of all arrays.
        config: The `config.json` beside them.
    """
    names = list(names)
    for format in FORMATS.values():
        if format.bare and "architecture" in config:
            continue
        prefix = format.prefix(names)
        if prefix is not None:
            return format, prefix
    if "architecture" in config:
        timm_config.check_architecture(config["architecture"])
    shown = ", ".join(map(short, names[:5])) or "none"
    stated = [
        f", {key}={short(config[key])}" for key in ("model_type", "architecture") if key in config
    ]
    raise ValueError(
        f"source must have the names of one of {', '.join(FORMATS)}. "
        f"Received: {len(names)} arrays, first {shown}{''.join(stated)}"
    )

"""Presets of KerasHub: the image towers of its CLIP and SigLIP.

A preset holds a whole model of images and text, of which only the tower is loaded, or the tower
alone. A whole CLIP has the projection of the class token too, which becomes the head. Keras names
arrays by class and number; the layouts are Keras' own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.config_rules import short
from keras_vit.weights.formats.keras_hub import attention_rows, dense_rows, norm_rows, pixel_fields
from keras_vit.weights.formats.open_clip import TOKEN
from keras_vit.weights.formats.table import Checked, Format, Header, Pair, Reading, Row
from keras_vit.weights.formats.torch_names import CLIP_PIXELS

# Names of the parts: the embedding, the blocks, a block's attention, norms and MLP, the last norm.
CLIP = {
    "embedding": "layers/clip_vision_embedding",
    "blocks": "layers/clip_encoder_layer",
    "attention": "attention",
    "norms": ("layer_norm_1", "layer_norm_2"),
    "mlp": ("dense_1", "dense_2"),
    "norm": "layers/layer_normalization_1",
}
SIGLIP = {
    "embedding": "layers/sig_lip_vision_embedding",
    "blocks": "layers/sig_lip_encoder_layer",
    "attention": "self_attn",
    "norms": ("layer_norm1", "layer_norm2"),
    "mlp": ("mlp/fc1", "mlp/fc2"),
    "norm": "layers/layer_normalization",
}
EMBEDDING_NORM = "layers/layer_normalization"  # of CLIP, before the blocks
POOLING = "layers/sig_lip_multi_head_attention_pooling"
PROJECTION = "layers/dense"  # the images' comes first
GELUS = {"gelu": "exact", "gelu_approximate": "tanh", "quick_gelu": "quick"}
CLIP_GELUS = ("gelu", "quick_gelu")
EPSILON = 1e-6  # of SigLIP's last LayerNorm, whatever the preset states of the others


def read_towers(header: Header) -> Reading:
    """The config: from shapes, then from the preset's JSON files."""
    clip = f"{CLIP['embedding']}/patch_embedding/vars/0" in header.shapes
    names = CLIP if clip else SIGLIP
    stated = _stated(header)
    embedding, block = names["embedding"], names["blocks"]
    ph, pw, channels, width = header.shape(f"{embedding}/patch_embedding/vars/0", 4)
    rows, _ = header.shape(f"{embedding}/position_embedding/vars/0", 2)
    shape = tuple(stated.get("image_shape") or ())
    image_size, _ = header.table_size(rows, [int(clip)], (ph, pw), shape[:2])
    _, heads, _ = header.shape(f"{block}/{names['attention']}/query_dense/vars/0", 3)
    gelu = _gelu(stated, clip)
    projected = header.size(f"{PROJECTION}/vars/0", 1, 0) if clip else 0
    hidden = header.shape(f"{block}/{names['mlp'][0]}/vars/0", 2)[1]
    fields = {
        "image_size": image_size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "patch_bias": not clip,
        "width": width,
        "depth": header.count(rf"({block}(?:_\d+)?)/"),
        "num_heads": heads,
        "mlp_dim": hidden,
        "norm_epsilon": 1e-5 if clip else _epsilon(stated),
        "gelu": gelu,
        "class_token": clip,
        "embedding_norm": clip,
        "pooling": "token" if clip else "map",
        "num_classes": projected,
        "head_bias": None if projected else 0.0,
        "interpolation": "huggingface",
        **_family_pixels(clip, channels),
        **pixel_fields(header.pixels, channels),
    }
    hidden_fields = () if "intermediate_activation" in stated else ("gelu",)
    return Reading(fields, assumed=tuple(header.unstated(hidden_fields, {})))


def _family_pixels(clip: bool, channels: int) -> dict[str, Any]:
    if not clip:
        return {"pixel_mean": 0.5, "pixel_std": 0.5}
    return dict(CLIP_PIXELS) if channels == 3 else {}


def _stated(header: Header) -> Mapping[str, Any]:
    """What `config.json` states of the tower, alone or inside a whole model."""
    config = header.config.get("config") or {}
    if (tower := config.get("vision_encoder")) is not None:
        return tower.get("config") or {}
    return config


def _gelu(stated: Mapping[str, Any], clip: bool) -> str:
    known = CLIP_GELUS if clip else tuple(GELUS)[:2]
    name = stated.get("intermediate_activation", known[-1])
    if name not in known:
        raise ValueError(
            f"intermediate_activation in config.json must be one of {', '.join(known)}. "
            f"Received: intermediate_activation={short(name)}"
        )
    return GELUS[name]


def _epsilon(stated: Mapping[str, Any]) -> float:
    if (epsilon := stated.get("layer_norm_epsilon", EPSILON)) != EPSILON:
        raise ValueError(
            f"layer_norm_epsilon in config.json must be {EPSILON}, which KerasHub's SigLIP takes "
            f"for its last LayerNorm in any case. Received: layer_norm_epsilon={epsilon}"
        )
    return epsilon


def tower_rows(config: ViTConfig) -> Iterator[Row]:
    """The table of names."""
    names = CLIP if config.class_token else SIGLIP
    embedding = names["embedding"]
    yield from dense_rows(
        f"{embedding}/patch_embedding", "patches/projection", bias=config.patch_bias
    )
    if config.class_token:
        yield Pair(f"{embedding}/vars/0", ("class_token/tokens",), TOKEN)
    yield Pair(f"{embedding}/position_embedding/vars/0", ("position_embedding/table",))
    rows = config.grid[0] * config.grid[1] + config.class_token
    ids = f"{embedding}/vars/{int(config.class_token)}"
    yield Checked(ids, (1, rows), _check_positions)
    if config.embedding_norm:
        yield from norm_rows(EMBEDDING_NORM, "embedding_norm")
    for i in range(config.depth):
        ours, theirs = f"encoder_block_{i}", names["blocks"] + (f"_{i}" if i else "")
        for norm, branch in zip(names["norms"], ("attention", "mlp"), strict=True):
            yield from norm_rows(f"{theirs}/{norm}", f"{ours}/{branch}_norm")
        yield from attention_rows(f"{theirs}/{names['attention']}", f"{ours}/attention")
        for number, name in enumerate(names["mlp"], 1):
            yield from dense_rows(f"{theirs}/{name}", f"{ours}/mlp/dense_{number}")
    yield from norm_rows(names["norm"], "encoder_norm")
    if config.attention_pooling:
        yield Pair(f"{POOLING}/vars/0", ("pooling/probe",))
        yield from attention_rows(f"{POOLING}/attention", "pooling/attention")
        yield from norm_rows(f"{POOLING}/layer_norm", "pooling/norm")
        for number in (1, 2):
            yield from dense_rows(f"{POOLING}/mlp/fc{number}", f"pooling/mlp/dense_{number}")
    if config.num_classes:
        yield from dense_rows(PROJECTION, "head", bias=False)


def _check_positions(ids: np.ndarray) -> None:
    """A CLIP that KerasHub makes without published weights has zeros here."""
    if not np.array_equal(ids, np.arange(ids.size)[None]):
        raise ValueError(
            f"position_ids must be 0 to {ids.size - 1}: each token has a position of its own. "
            f"Received: {short(ids.ravel().tolist())}"
        )


KERAS_HUB_TOWERS = Format(
    name="keras_hub_towers",
    mark=r"(?P<prefix>(?:layers/(?:clip|sig_lip)_vision_encoder/)?)"
    r"layers/(?:clip|sig_lip)_vision_embedding/patch_embedding/vars/0",
    read_config=read_towers,
    rows=tower_rows,
    dropped={
        r"layers/(clip|sig_lip)_text_encoder/": "the text tower",
        r"layers/dense_1/": "the projection of texts",
        r"layers/(clip|sig_lip)_head/": "the scale of similarities of images and texts",
    },
)

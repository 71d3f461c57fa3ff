"""The published sizes of the plain ViT and of its hybrids: a table, and a factory for each.

All factories take the same arguments, `ARGUMENTS` and the fields of `ViTConfig`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from keras_vit.config import ViTConfig
from keras_vit.config_docs import with_fields
from keras_vit.config_names import check_names
from keras_vit.model import ViT


class Size(NamedTuple):
    """A published size and its source."""

    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    source: str
    stem: str | None = None
    stem_depths: tuple[int, ...] = ()
    mlp: str = "mlp"


VIT = "arXiv 2010.11929, Table 1"
VIT_HYBRID = "arXiv 2010.11929, Section 4.1; vision_transformer, configs/models.py"
DEIT = "arXiv 2012.12877, Table 1"
AUGREG = "arXiv 2106.10270"
SCALING = "arXiv 2106.04560, Table 2"
BIG_VISION = "big_vision, models/vit.py: decode_variant"
DINOV2 = "arXiv 2304.07193"
DINOV3 = "arXiv 2508.10104; dinov3, hub/backbones.py"
SO400M = "arXiv 2305.13035; big_vision, models/vit.py: decode_variant"

SIZES = {
    "vit_ti16": Size(16, 192, 12, 3, 768, DEIT),
    "vit_s8": Size(8, 384, 12, 6, 1536, BIG_VISION),
    "vit_s16": Size(16, 384, 12, 6, 1536, DEIT),
    "vit_s32": Size(32, 384, 12, 6, 1536, AUGREG),
    "vit_m16": Size(16, 512, 12, 8, 2048, BIG_VISION),
    "vit_b8": Size(8, 768, 12, 12, 3072, AUGREG),
    "vit_b16": Size(16, 768, 12, 12, 3072, VIT),
    "vit_b32": Size(32, 768, 12, 12, 3072, VIT),
    "vit_l14": Size(14, 1024, 24, 16, 4096, DINOV2),
    "vit_l16": Size(16, 1024, 24, 16, 4096, VIT),
    "vit_l32": Size(32, 1024, 24, 16, 4096, VIT),
    "vit_h14": Size(14, 1280, 32, 16, 5120, VIT),
    "vit_g14": Size(14, 1408, 40, 16, 6144, SCALING),
    "vit_gigantic14": Size(14, 1664, 48, 16, 8192, SCALING),
    "vit_so400m14": Size(14, 1152, 27, 16, 4304, SO400M),
    "vit_giant2_14": Size(14, 1536, 40, 24, 4096, DINOV2, mlp="swiglu"),
    "vit_splus16": Size(16, 384, 12, 6, 1536, DINOV3, mlp="swiglu"),
    "vit_hplus16": Size(16, 1280, 32, 20, 5120, DINOV3, mlp="swiglu"),
    "vit_7b16": Size(16, 4096, 40, 32, 8192, DINOV3, mlp="swiglu"),
    # Hybrids, whose patch size is that of the whole: R+Ti/16 has 32 pixels, four a cell of the
    # root's map and eight cells a patch.
    "vit_r_ti16": Size(32, 192, 12, 3, 768, AUGREG, "resnet", ()),
    "vit_r26_s32": Size(32, 384, 12, 6, 1536, AUGREG, "resnet", (2, 2, 2, 2)),
    "vit_r50_b16": Size(16, 768, 12, 12, 3072, VIT_HYBRID, "resnet", (3, 4, 9)),
    "vit_r50_l32": Size(32, 1024, 24, 16, 4096, AUGREG, "resnet", (3, 4, 6, 3)),
}

DINO_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "layer_scale": 1e-5,
        "resize_method": "bicubic",
        "pixel_mean": (0.485, 0.456, 0.406),
        "pixel_std": (0.229, 0.224, 0.225),
    }
)
DINOV3_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        **DINO_FIELDS,
        "position_embedding": "rope",
        "num_registers": 4,
        "key_bias": False,
        "norm_epsilon": 1e-5,
    }
)
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "vit_so400m14": {"class_token": False, "pooling": "mean", "gelu": "tanh"},
    "vit_giant2_14": DINO_FIELDS,
    "vit_splus16": DINOV3_FIELDS,
    "vit_hplus16": DINOV3_FIELDS,
    "vit_7b16": {**DINOV3_FIELDS, "qkv_bias": False},
}
"""Fields of a variant beside its size, which differ from those of `ViTConfig`."""
ARGUMENTS = {
    "num_classes": "Number of classes; 0 means no head. None means the number of `labels`, or that "
    "of the checkpoint, or 1000.",
    "weights": "A name that `keras-vit models` lists, with or without the variant, or what else "
    "`from_pretrained` takes. The fields below then default to the checkpoint's. None means random "
    "weights.",
    "name": "Name of the model; None means that of the variant.",
    "dtype": "dtype policy of the model; None means Keras' global one.",
    "trainable": "Whether the weights are trainable; None means True.",
}
"""The arguments of every factory that are not fields of `ViTConfig`."""


def list_variants() -> list[str]:
    """Names of the published sizes; each is a function in `keras_vit`.

    Example:

    >>> keras_vit.list_variants()[:2]
    ['vit_ti16', 'vit_s8']
    """
    return list(SIZES)


def vit_ti16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-Ti/16, 5.7 M parameters."""
    return _build("vit_ti16", num_classes, weights, fields)


def vit_s8(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-S/8, 22.1 M parameters."""
    return _build("vit_s8", num_classes, weights, fields)


def vit_s16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-S/16, 22.1 M parameters."""
    return _build("vit_s16", num_classes, weights, fields)


def vit_s32(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-S/32, 22.9 M parameters."""
    return _build("vit_s32", num_classes, weights, fields)


def vit_m16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-M/16, 38.8 M parameters."""
    return _build("vit_m16", num_classes, weights, fields)


def vit_b8(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-B/8, 86.6 M parameters."""
    return _build("vit_b8", num_classes, weights, fields)


def vit_b16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-B/16, 86.6 M parameters.

    Example:

    >>> model = keras_vit.vit_b16(num_classes=10, image_size=32, patch_size=4, drop_path=0.1)
    >>> model.output_shape
    (None, 10)
    >>> model = keras_vit.vit_b16(num_classes=10, weights="augreg_in21k")
    """
    return _build("vit_b16", num_classes, weights, fields)


def vit_b32(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-B/32, 88.2 M parameters."""
    return _build("vit_b32", num_classes, weights, fields)


def vit_l14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-L/14, 304 M parameters."""
    return _build("vit_l14", num_classes, weights, fields)


def vit_l16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-L/16, 304 M parameters."""
    return _build("vit_l16", num_classes, weights, fields)


def vit_l32(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-L/32, 307 M parameters."""
    return _build("vit_l32", num_classes, weights, fields)


def vit_h14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-H/14, 632 M parameters."""
    return _build("vit_h14", num_classes, weights, fields)


def vit_g14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-g/14, 1.0 G parameters."""
    return _build("vit_g14", num_classes, weights, fields)


def vit_gigantic14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """ViT-G/14, 1.8 G parameters."""
    return _build("vit_gigantic14", num_classes, weights, fields)


def vit_so400m14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """The trunk of SigLIP's So400m/14, 412 M parameters without a head.

    It has no class token. Tokens are averaged; SigLIP's own head is `pooling="map"`, which adds
    15.2 M parameters.
    """
    return _build("vit_so400m14", num_classes, weights, fields)


def vit_giant2_14(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """DINOv2's ViT-g/14, 1.14 G parameters: gated MLPs and LayerScale."""
    return _build("vit_giant2_14", num_classes, weights, fields)


def vit_splus16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """DINOv3's ViT-S+/16, 28.7 M parameters: rotary positions, gated MLPs, four registers."""
    return _build("vit_splus16", num_classes, weights, fields)


def vit_hplus16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """DINOv3's ViT-H+/16, 840 M parameters: rotary positions, gated MLPs, four registers."""
    return _build("vit_hplus16", num_classes, weights, fields)


def vit_7b16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """DINOv3's ViT-7B/16, 6.7 G parameters: rotary positions, gated MLPs, four registers."""
    return _build("vit_7b16", num_classes, weights, fields)


def vit_r_ti16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """R+ViT-Ti/16, 6.3 M parameters: the root of a ResNet, then patches of 8 x 8 cells.

    Its patches are 32 x 32 pixels.
    """
    return _build("vit_r_ti16", num_classes, weights, fields)


def vit_r26_s32(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """R26+ViT-S/32, 36.4 M parameters: a ResNet-26, then patches of one cell."""
    return _build("vit_r26_s32", num_classes, weights, fields)


def vit_r50_b16(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """R50+ViT-B/16, 98.7 M parameters: three stages of a ResNet-50, then patches of one cell.

    Example:

    >>> model = keras_vit.vit_r50_b16(num_classes=10, image_size=384)
    """
    return _build("vit_r50_b16", num_classes, weights, fields)


def vit_r50_l32(num_classes: int | None = None, weights: Any = None, **fields: Any) -> ViT:
    """R50+ViT-L/32, 329 M parameters: a ResNet-50, then patches of one cell."""
    return _build("vit_r50_l32", num_classes, weights, fields)


def _size(variant: str) -> dict[str, Any]:
    """The fields of a published size."""
    size = SIZES[variant]._asdict()
    del size["source"]
    return size


def _build(variant: str, num_classes: int | None, weights: Any, fields: dict[str, Any]) -> ViT:
    model = {k: fields.pop(k) for k in ("name", "dtype", "trainable") if k in fields}
    model = {k: v for k, v in model.items() if v is not None}
    check_names(fields, ViTConfig.__dataclass_fields__)
    size, defaults = _size(variant), DEFAULTS.get(variant, {})
    if weights is None:
        given = fields if num_classes is None else {**fields, "num_classes": num_classes}
        fields = {**size, **defaults, **given}
        return ViT(ViTConfig.from_dict(fields), **{"name": variant, **model})

    from keras_vit.weights import load

    trainable = model.pop("trainable", True)
    model = {"name": variant, **model}
    vit = load.from_variant(
        variant, size, weights, defaults=defaults, num_classes=num_classes, **model, **fields
    )
    vit.trainable = trainable
    return vit


for _name in SIZES:
    _defaults = {**_size(_name), **DEFAULTS.get(_name, {})}
    with_fields(globals()[_name], ViTConfig, _defaults, ARGUMENTS)

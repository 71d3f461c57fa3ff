"""transformers' `config.json` and `preprocessor_config.json`: what they state, and ours."""

from collections.abc import Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.config_rules import is_int, short
from keras_vit.preprocessing import uncropped
from keras_vit.weights.formats.table import per_channel
from keras_vit.weights.formats.torch_names import CLIP_PIXELS, IMAGENET_PIXELS

# Model types with a plain ViT as encoder, and the defaults of epsilon and image size.
MODEL_TYPES = {
    "vit": (1e-12, 224),
    "deit": (1e-12, 224),
    "vit_mae": (1e-12, 224),
    "vit_msn": (1e-6, 224),
    "dinov2": (1e-6, 224),
    "dinov2_with_registers": (1e-6, 224),
    "ijepa": (1e-12, 224),
    "dpt": (1e-12, 384),
    "flava_image_model": (1e-12, 224),
    "beit": (1e-12, 224),
    "data2vec-vision": (1e-12, 224),
}
# The pixels that the published checkpoints of a type have in common. ViT, MSN, I-JEPA, Data2Vec and
# DPT have none in common, or other ones than they were trained on.
PIXELS: Mapping[str, Mapping[str, Any]] = {
    "deit": {**IMAGENET_PIXELS, "resize_method": "bicubic", "crop_fraction": 224 / 256},
    "dinov2": {**IMAGENET_PIXELS, "resize_method": "bicubic", "crop_fraction": 224 / 256},
    "vit_mae": IMAGENET_PIXELS,
    "flava_image_model": {**CLIP_PIXELS, "resize_method": "bicubic"},
    "beit": {"pixel_mean": 0.5, "pixel_std": 0.5},
}
PIXELS = {**PIXELS, "dinov2_with_registers": PIXELS["dinov2"]}
GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"}
ACTS = {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


def stated_fields(
    config: Mapping[str, Any],
    pixels: Mapping[str, Any],
    channels: int,
    model_types: Mapping[str, tuple[float, int]] = MODEL_TYPES,
) -> dict[str, Any]:
    """Fields of a `ViTConfig` that the two files state, or transformers' defaults.

    `image_size`, `num_heads` and `labels` are hints that the caller checks against the arrays.
    """
    fields: dict[str, Any] = {}
    if "model_type" in config:
        kind = config["model_type"]
        if kind not in model_types:
            raise ValueError(
                "model_type in config.json must be that of a plain ViT, one of "
                f"{', '.join(model_types)}. Received: model_type={short(kind)}"
            )
        # Some versions of transformers omit default values.
        epsilon, size = model_types[kind]
        defaults = {"num_attention_heads": 12, "hidden_act": "gelu"}
        config = {**defaults, "layer_norm_eps": epsilon, "image_size": size, **config}
    if "num_attention_heads" in config:
        fields["num_heads"] = config["num_attention_heads"]
    if "image_size" in config:
        fields["image_size"] = config["image_size"]
    if "layer_norm_eps" in config:
        fields["norm_epsilon"] = float(config["layer_norm_eps"])
    if "hidden_act" in config:
        fields["gelu"] = _gelu(config["hidden_act"])
    for name in ("layerscale_value", "layer_scale_init_value"):
        if isinstance(config.get(name), float) and config[name] > 0:
            fields["layer_scale"] = config[name]
    if labels := _labels(config.get("id2label")):
        fields["labels"] = labels
    return fields | (_pixels(pixels, channels) if pixels else {})


def family_pixels(kind: str | None, channels: int) -> dict[str, Any]:
    """What a model type's published checkpoints expect of pixels, for files that do not say it."""
    pixels = PIXELS.get(kind or "", {})
    return {
        name: value
        for name, value in pixels.items()
        if not isinstance(value, tuple) or len(value) == channels
    }


def _gelu(act: Any) -> str:
    if act not in GELUS:
        raise ValueError(
            f"hidden_act in config.json must be one of {', '.join(GELUS)}. "
            f"Received: hidden_act={short(act)}"
        )
    return GELUS[act]


def _labels(names: Any) -> tuple[str, ...] | None:
    """Class names in order; None if they are placeholders such as LABEL_0."""
    if not isinstance(names, Mapping) or not names:
        return None
    try:
        ordered = [names[key] for key in sorted(names, key=int)]
    except ValueError:
        return None
    if all(label == f"LABEL_{i}" for i, label in enumerate(ordered)):
        return None
    return tuple(map(str, ordered))


def _pixels(pixels: Mapping[str, Any], channels: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if pixels.get("do_normalize", True):
        for theirs, ours in (("image_mean", "pixel_mean"), ("image_std", "pixel_std")):
            values = tuple(float(v) for v in pixels.get(theirs) or ())
            if len(values) == channels:
                fields[ours] = values[0] if len(set(values)) == 1 else values
    else:
        fields |= {"pixel_mean": 0.0, "pixel_std": 1.0}
    if pixels.get("resample") in RESAMPLE:
        fields["resize_method"] = RESAMPLE[pixels["resample"]]
    if pixels.get("do_center_crop"):
        size, crop = _side(pixels.get("size")), _side(pixels.get("crop_size"))
        if size and crop and crop <= size:
            fields["crop_fraction"] = crop / size
    elif {"do_center_crop", "size"} & {*pixels}:
        fields["crop_fraction"] = None
    return fields


def _side(size: Any) -> int | None:
    """The shortest side."""
    if isinstance(size, Mapping):
        height, width = size.get("height"), size.get("width")
        if isinstance(height, int) and isinstance(width, int):
            return min(height, width)
        size = size.get("shortest_edge")
    return size if is_int(size) else None


def config_json(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` of a ViT's or a DeiT's classifier, or without a head of its encoder."""
    labels = config.labels or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    classes = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    pooler = {} if config.num_classes else {"pooler_output_size": config.representation_size}
    family = "DeiT" if config.distillation_token else "ViT"
    with_teacher = "WithTeacher" if config.pooling == "token_pair" else ""
    classifier = f"ForImageClassification{with_teacher}" if config.num_classes else "Model"
    return {
        "architectures": [family + classifier],
        "model_type": family.lower(),
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": ACTS[config.gelu],
        "layer_norm_eps": config.norm_epsilon,
        "image_size": _size(config.image_size),
        "patch_size": _size(config.patch_size),
        "num_channels": config.in_channels,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "pooler_act": "tanh",
        **pooler,
        **(classes if config.num_classes else {}),
    }


def preprocessor_json(config: ViTConfig) -> dict[str, Any]:
    """The `preprocessor_config.json`."""
    height, width = config.image_size
    numbers = {name: number for number, name in RESAMPLE.items()}
    size: dict[str, Any] = {"size": {"height": height, "width": width}}
    if config.crop_fraction is not None:
        size = {
            "size": {"shortest_edge": min(uncropped(config))},
            "crop_size": {"height": height, "width": width},
        }
    channels = config.in_channels
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_center_crop": config.crop_fraction is not None,
        **size,
        "resample": numbers[config.resize_method],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": per_channel(config.pixel_mean, channels),
        "image_std": per_channel(config.pixel_std, channels),
    }


def _size(pair: tuple[int, int]) -> int | list[int]:
    return pair[0] if pair[0] == pair[1] else list(pair)

"""State dicts of torchvision's `models.vision_transformer`.

LayerNorm's epsilon is 1e-6, GELU exact; the table is resampled as `interpolate_embeddings` does.
Pixels as in its weights that were trained from scratch: ImageNet's statistics.
"""

from collections.abc import Iterator

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.table import Format, Header, Pair, Reading, table_grid
from keras_vit.weights.formats.torch_names import CONV, FROM_HEADS, TABLE, linear, norm, qkv

IMAGENET = {"pixel_mean": (0.485, 0.456, 0.406), "pixel_std": (0.229, 0.224, 0.225)}
MLP = {"new": ("mlp.0", "mlp.3"), "old": ("mlp.linear_1", "mlp.linear_2")}
LAYER = "encoder.layers.encoder_layer_"


def read(header: Header) -> Reading:
    """The config; a file on its own does not state the heads."""
    width, channels, ph, pw = header.shape("conv_proj.weight", 4)
    mlp = "old" if header.has(LAYER + r"0\.mlp\.linear_1\.") else "new"
    rows = header.shape("encoder.pos_embedding", 3)[1]
    grid, _ = table_grid(rows, [1], (ph, pw), given=header.given.get("image_size"))
    size = (grid[0] * ph, grid[1] * pw)
    head = header.shapes.get("heads.head.weight")
    fields = {
        "image_size": size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(r"encoder\.layers\.encoder_layer_(\d+)\."),
        "num_heads": header.heads(width),
        "mlp_dim": header.shape(f"{LAYER}0.{MLP[mlp][0]}.weight", 2)[0],
        "norm_epsilon": 1e-6,
        "gelu": "exact",
        "representation_size": (header.shapes.get("heads.pre_logits.weight") or (None,))[0],
        "num_classes": head[0] if head else 0,
        "interpolation": "torchvision",
        "resize_method": "bilinear" if size == (224, 224) else "bicubic",
        "crop_fraction": 224 / 256 if size == (224, 224) else 1.0,
    }
    assumed = tuple(header.unstated(("num_heads",), {}))
    return Reading(fields | (IMAGENET if channels == 3 else {}), {"mlp": mlp}, assumed=assumed)


def pairs(config: ViTConfig, mlp: str = "new") -> Iterator[Pair]:
    """The table of names."""
    yield from linear("conv_proj", "patches/projection", CONV)
    yield Pair("class_token", ("class_token/tokens",))
    yield Pair("encoder.pos_embedding", ("position_embedding/table",), TABLE)
    for i in range(config.depth):
        ours, theirs = f"encoder_block_{i}", f"{LAYER}{i}"
        attention = f"{theirs}.self_attention"
        yield from norm(f"{theirs}.ln_1", f"{ours}/attention_norm")
        yield from qkv(
            f"{attention}.in_proj_weight", f"{attention}.in_proj_bias", f"{ours}/attention"
        )
        yield from linear(f"{attention}.out_proj", f"{ours}/attention/attention_output", FROM_HEADS)
        yield from norm(f"{theirs}.ln_2", f"{ours}/mlp_norm")
        for number, name in enumerate(MLP[mlp], 1):
            yield from linear(f"{theirs}.{name}", f"{ours}/mlp/dense_{number}")
    yield from norm("encoder.ln", "encoder_norm")
    if config.representation_size is not None:
        yield from linear("heads.pre_logits", "pre_logits")
    if config.num_classes:
        yield from linear("heads.head", "head")


def complaints(config: ViTConfig) -> Iterator[str]:
    """What torchvision's class cannot build."""
    for name in ("image_size", "patch_size"):
        height, width = getattr(config, name)
        if height != width:
            yield f"{name} must be a square, it is {(height, width)}"
    if config.num_heads * config.key_dim != config.width:
        yield f"head_dim must be width / num_heads, it is {config.head_dim}"
    if not config.num_classes:
        yield "num_classes must be greater than 0: the model always has a head"


TORCHVISION = Format(
    name="torchvision",
    mark=r"(?P<prefix>.*)encoder\.layers\.encoder_layer_0\.self_attention\.in_proj_weight",
    read=read,
    pairs=pairs,
    refused={r"conv_proj\.conv_": "a stem of several convolutions"},
    writes={
        "gelu": ("exact",),
        "norm_epsilon": (1e-6,),
        "block_norm": ("pre",),
        "in_channels": (3,),
        "qkv_bias": (True,),
        "qk_norm": (False,),
        "layer_scale": (None,),
        "class_token": (True,),
        "num_registers": (0,),
        "patch_norm": (False,),
        "position_embedding": ("learned",),
        "position_class_row": (True,),
        "pooling": ("token",),
        "final_norm": ("before_pooling",),
        "classifier_activation": (None,),
    },
    complaints=complaints,
)

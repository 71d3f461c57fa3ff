"""State dicts of torchvision's `models.vision_transformer`.

LayerNorm's epsilon is 1e-6 and GELU is exact. The position table is resampled as
`interpolate_embeddings` does. Pixels have ImageNet's statistics, as in the weights that torchvision
trained from scratch.
"""

from collections.abc import Iterator

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.table import (
    HAS_HEAD,
    PLAIN,
    STANDARD_HEADS,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
)
from keras_vit.weights.formats.torch_names import (
    CONV,
    FROM_HEADS,
    IMAGENET_PIXELS,
    TABLE,
    linear,
    norm,
    qkv,
)

MLP = {"new": ("mlp.0", "mlp.3"), "old": ("mlp.linear_1", "mlp.linear_2")}
LAYER = "encoder.layers.encoder_layer_"


def read_torchvision(header: Header) -> Reading:
    """The config. The file does not state the number of heads."""
    width, channels, ph, pw = header.shape("conv_proj.weight", 4)
    mlp = "old" if header.has(LAYER + r"0\.mlp\.linear_1\.") else "new"
    size, _ = header.table_size(header.shape("encoder.pos_embedding", 3)[1], [1], (ph, pw))
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
        "representation_size": header.size("heads.pre_logits.weight", 0, None),
        "num_classes": header.size("heads.head.weight", 0, 0),
        "interpolation": "torchvision",
        "resize_method": "bilinear" if size == (224, 224) else "bicubic",
        "crop_fraction": 224 / 256 if size == (224, 224) else 1.0,
        **(IMAGENET_PIXELS if channels == 3 else {}),
    }
    return Reading(fields, {"mlp": mlp}, assumed=tuple(header.unstated(("num_heads",), {})))


def torchvision_rows(config: ViTConfig, mlp: str = "new") -> Iterator[Pair]:
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


TORCHVISION = Format(
    name="torchvision",
    mark=r"(?P<prefix>.*)encoder\.layers\.encoder_layer_0\.self_attention\.in_proj_weight",
    read_config=read_torchvision,
    rows=torchvision_rows,
    refused={r"conv_proj\.conv_": "a stem of several convolutions"},
    writable=PLAIN
    | {
        "gelu": ("exact",),
        "norm_epsilon": (1e-6,),
        "in_channels": (3,),
        "class_token": (True,),
        "position_class_row": (True,),
        "pooling": ("token",),
    },
    limits=(
        Limit(
            lambda c: c.image_size[0] == c.image_size[1],
            "image_size must be a square, it is {0.image_size}",
        ),
        Limit(
            lambda c: c.patch_size[0] == c.patch_size[1],
            "patch_size must be a square, it is {0.patch_size}",
        ),
        STANDARD_HEADS,
        HAS_HEAD,
    ),
)

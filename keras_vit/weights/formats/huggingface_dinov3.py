"""Checkpoints of transformers' DINOv3 (`dinov3_vit`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import huggingface_config
from keras_vit.weights.formats.table import (
    PLAIN,
    STANDARD_HEADS,
    Empty,
    Format,
    Header,
    Limit,
    Pair,
    Reading,
    Row,
)
from keras_vit.weights.formats.torch_names import (
    CONV,
    FROM_HEADS,
    HEADS_BIAS,
    IMAGENET_PIXELS,
    INTO_HEADS,
    QKV,
    linear,
    mlp,
    norm,
)

MODEL_TYPES = {"dinov3_vit": (1e-5, 224)}
# Published models whose heads are not 64 wide, by width; the others' are.
HEADS = {4096: 32}
# Names of the blocks in files, and in the memory of transformers 5.
BLOCKS = ("layer", "model.layer")
UNGATED, GATED = ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")


def read_huggingface_dinov3(header: Header) -> Reading:
    """The config: from shapes, then from `config.json`."""
    width, channels, ph, pw = header.shape("embeddings.patch_embeddings.weight", 4)
    config = header.config
    if "model_type" in config:
        config = {"num_attention_heads": 6, "rope_theta": 100.0, **config}
    gated = header.has(r"(model\.)?layer\.0\.mlp\.gate_proj\.")
    if gated:
        config = _without_gate(config)
    stated = huggingface_config.stated_fields(config, header.pixels, channels, MODEL_TYPES)
    unstated = ("num_heads", "rope_base", "norm_epsilon", *(() if gated else ("gelu",)))
    if "rope_theta" in config:
        stated["rope_base"] = config["rope_theta"]
    assumed = tuple(sorted(header.unstated(unstated, stated)))
    blocks = next(name for name in BLOCKS if f"{name}.0.norm1.weight" in header.shapes)
    heads = stated.pop("num_heads", None) or HEADS.get(width) or max(1, width // 64)
    fields = {
        "image_size": 224,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(rf"{blocks}\.(\d+)\."),
        "num_heads": header.heads(width, heads),
        "mlp_dim": header.shape(f"{blocks}.0.mlp.up_proj.weight", 2)[0],
        "mlp": "swiglu" if gated else "mlp",
        "norm_epsilon": 1e-5,
        "qkv_bias": f"{blocks}.0.attention.q_proj.bias" in header.shapes,
        "key_bias": f"{blocks}.0.attention.k_proj.bias" in header.shapes,
        "layer_scale": stated.pop("layer_scale", 1.0),
        "num_registers": header.size("embeddings.register_tokens", 1, 0),
        "position_embedding": "rope",
        "num_classes": 0,
        **(IMAGENET_PIXELS if channels == 3 else {}),
    }
    if not fields["qkv_bias"]:
        del fields["key_bias"]
    stated.pop("labels", None)
    empty = fields["num_registers"] == 0 and "embeddings.register_tokens" in header.shapes
    style = {"blocks": blocks, "empty_registers": empty}
    return Reading(fields | stated, style, assumed)


def _without_gate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a gated MLP without its activation, after a check of it."""
    act = config.get("hidden_act", "gelu" if "model_type" in config else "silu")
    if act != "silu":
        raise ValueError(
            "hidden_act in config.json must be 'silu' for a gated MLP. "
            f"Received: hidden_act={act!r}"
        )
    return {name: value for name, value in config.items() if name != "hidden_act"}


def huggingface_dinov3_rows(
    config: ViTConfig, blocks: str = BLOCKS[0], empty_registers: bool = False
) -> Iterator[Row]:
    """The table of names."""
    yield from linear("embeddings.patch_embeddings", "patches/projection", CONV)
    yield Pair("embeddings.cls_token", ("class_token/tokens",))
    if config.num_registers:
        yield Pair("embeddings.register_tokens", ("registers/tokens",))
    elif empty_registers:
        yield Empty("embeddings.register_tokens", (1, 0, config.width))
    for i in range(config.depth):
        yield from _block(config, f"{blocks}.{i}", f"encoder_block_{i}")
    yield from norm("norm", "encoder_norm")


def _block(config, theirs, ours) -> Iterator[Row]:
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm")
    for name in QKV:
        source = f"{theirs}.attention.{name[0]}_proj"
        yield Pair(f"{source}.weight", (f"{ours}/attention/{name}/kernel",), INTO_HEADS)
        if config.qkv_bias and (config.key_bias or name != "key"):
            yield Pair(f"{source}.bias", (f"{ours}/attention/{name}/bias",), HEADS_BIAS)
    output = f"{ours}/attention/attention_output"
    yield from linear(f"{theirs}.attention.o_proj", output, FROM_HEADS)
    yield from norm(f"{theirs}.norm2", f"{ours}/mlp_norm")
    gated = config.mlp == "swiglu"
    yield from mlp(f"{theirs}.mlp", f"{ours}/mlp", GATED if gated else UNGATED, gated)
    for number, branch in enumerate(("attention", "mlp"), 1):
        yield Pair(f"{theirs}.layer_scale{number}.lambda1", (f"{ours}/{branch}_scale/gamma",))


def _rows_to_write(config: ViTConfig) -> Iterator[Row]:
    """The table of names of a DINOv3ViTModel, which has a mask token too."""
    yield from huggingface_dinov3_rows(config, empty_registers=True)
    yield Empty("embeddings.mask_token", (1, 1, config.width))


def config_json(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` of a DINOv3ViTModel."""
    gated = config.mlp == "swiglu"
    (height, width), (patch_height, patch_width) = config.image_size, config.patch_size
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "silu" if gated else huggingface_config.ACTS[config.gelu],
        "use_gated_mlp": gated,
        "layer_norm_eps": config.norm_epsilon,
        "image_size": height if height == width else [height, width],
        "patch_size": patch_height if patch_height == patch_width else [patch_height, patch_width],
        "num_channels": config.in_channels,
        "query_bias": config.qkv_bias,
        "key_bias": config.qkv_bias and config.key_bias,
        "value_bias": config.qkv_bias,
        "layerscale_value": config.layer_scale,
        "num_register_tokens": config.num_registers,
        "rope_theta": config.rope_base,
        "pos_embed_rescale": config.rope_rescale,
        "attention_dropout": config.attention_dropout,
    }


FREE = ("qkv_bias", "key_bias", "mlp", "layer_scale", "num_registers")
HUGGINGFACE_DINOV3 = Format(
    name="huggingface_dinov3",
    mark=r"(?P<prefix>.*)embeddings\.patch_embeddings\.weight",
    needs=(r"(model\.)?layer\.0\.attention\.q_proj\.weight$",),
    read_config=read_huggingface_dinov3,
    rows=huggingface_dinov3_rows,
    rows_to_write=_rows_to_write,
    dropped={r"embeddings\.mask_token$": "the mask token of pretraining"},
    writable={name: values for name, values in PLAIN.items() if name not in FREE}
    | {
        "position_embedding": ("rope",),
        "rope_coordinates": ("centered",),
        "rope_order": ("rows_first",),
        "rope_pairs": ("halves",),
        "rope_offset": (0.0,),
        "class_token": (True,),
        "pooling": ("token",),
        "num_classes": (0,),
        "representation_size": (None,),
    },
    limits=(
        STANDARD_HEADS,
        Limit(
            lambda c: c.layer_scale is not None,
            "layer_scale must be a number: the format's models have LayerScale",
        ),
    ),
    json_files={
        "config.json": config_json,
        "preprocessor_config.json": huggingface_config.preprocessor_json,
    },
)

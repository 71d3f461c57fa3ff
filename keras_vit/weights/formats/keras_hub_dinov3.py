"""Presets of KerasHub: its DINOv3.

Keras names arrays by class and number. Kernels are matrices, from all heads to all heads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.config_rules import short
from keras_vit.weights.formats.keras_hub import dense_rows, norm_rows, pixel_fields
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Format, Header, Pair, Reading, Row
from keras_vit.weights.formats.torch_names import HEADS_BIAS, IMAGENET_PIXELS, QKV

EMBEDDING = "layers/dinov3_embedding"
PROJECTION = f"{EMBEDDING}/patch_embeddings/projection"
BLOCKS = "layers/dinov3_encoder/layers/dinov3_layer"
INTO_HEADS = Layout("i h d -> i (h d)")
FROM_HEADS = Layout("h d o -> (h d) o")
ACTIVATIONS = {False: "gelu", True: "silu"}  # by whether the MLP is gated
# KerasHub's defaults
DEFAULTS = {"use_mask_token": True, "num_register_tokens": 4, "hidden_activation": "gelu"}


def read_dinov3(header: Header) -> Reading:
    """The config: from shapes, then from the preset's JSON files."""
    stated = header.config.get("config") or {}
    ph, pw, channels, width = header.shape(f"{PROJECTION}/vars/0", 4)
    gated = f"{BLOCKS}/mlp/gate_proj/vars/0" in header.shapes
    known = {**DEFAULTS, **stated}
    if (found := known["hidden_activation"]) != ACTIVATIONS[gated]:
        kind = "a gated MLP" if gated else "an MLP without a gate"
        raise ValueError(
            f"hidden_activation in config.json must be {ACTIVATIONS[gated]!r} for {kind}. "
            f"Received: hidden_activation={short(found)}"
        )
    shape = tuple(stated.get("image_shape") or (224, 224, channels))
    if shape[2] != channels:
        raise ValueError(
            f"image_shape in config.json must be (height, width, {channels}). Received: {shape}"
        )
    bias = _has_qkv_bias(header)
    fields = {
        "image_size": shape[:2],
        "patch_size": (ph, pw),
        "in_channels": channels,
        "width": width,
        "depth": header.count(rf"({BLOCKS}(?:_\d+)?)/"),
        "num_heads": header.heads(width, stated.get("num_heads")),
        "mlp_dim": header.shape(f"{BLOCKS}/mlp/up_proj/vars/0", 2)[1],
        "mlp": "swiglu" if gated else "mlp",
        "norm_epsilon": stated.get("layer_norm_eps", 1e-5),
        "gelu": "exact",
        "qkv_bias": bias,
        **({"key_bias": f"{BLOCKS}/attention/key_dense/vars/1" in header.shapes} if bias else {}),
        "layer_scale": stated.get("layer_scale_init_value", 1.0),
        "num_registers": known["num_register_tokens"],
        "position_embedding": "rope",
        "rope_base": stated.get("rope_theta", 100.0),
        "num_classes": 0,
        **(IMAGENET_PIXELS if channels == 3 else {}),
        **pixel_fields(header.pixels, channels),
    }
    theirs = {"num_heads": "num_heads", "norm_epsilon": "layer_norm_eps", "rope_base": "rope_theta"}
    unstated = [ours for ours, name in theirs.items() if name not in stated]
    style = {"tokens": _tokens(header, known)}
    return Reading(fields, style, assumed=tuple(sorted(header.unstated(unstated, {}))))


def _tokens(header: Header, known: Mapping[str, Any]) -> dict[str, str]:
    """Names of the tokens, which Keras numbers in the order of creation."""
    own = [name for i in range(4) if (name := f"{EMBEDDING}/vars/{i}") in header.shapes]
    wanted = [
        "class_token",
        *(["mask_token"] if known["use_mask_token"] else []),
        *(["registers"] if known["num_register_tokens"] else []),
    ]
    if len(own) != len(wanted):
        raise ValueError(
            f"source must hold {', '.join(wanted)} as {EMBEDDING}/vars, as config.json states. "
            f"Received: {len(own)} arrays"
        )
    return dict(zip(wanted, own, strict=True))


def _has_qkv_bias(header: Header) -> bool:
    """Whether queries and values have a bias. Refuses other products without one."""
    parts = ("attention/query", "attention/value", "attention/output")
    dense = [f"{part}_dense" for part in parts]
    others = [name for name in ("gate_proj", "up_proj", "down_proj") if _bias(header, name) is None]
    found = [name for name in dense if f"{BLOCKS}/{name}/vars/1" in header.shapes]
    without = [name for name in others if f"{BLOCKS}/mlp/{name}/vars/0" in header.shapes]
    if without or dense[2] not in found or len(found) == 2:
        raise ValueError(
            "source must have biases in the output of attention and in the MLP, and in both of "
            "query and value or in neither (use_query_bias, use_value_bias, use_proj_bias, "
            f"use_mlp_bias). Received: biases in {', '.join(found) or 'none of attention'}"
            + (f", none in {', '.join(without)}" if without else "")
        )
    return len(found) == 3


def _bias(header: Header, name: str) -> Any:
    return header.shapes.get(f"{BLOCKS}/mlp/{name}/vars/1")


def dinov3_rows(config: ViTConfig, tokens: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The table of names."""
    tokens = tokens or {}
    yield from dense_rows(PROJECTION, "patches/projection")
    for ours in ("class_token", "registers"):
        if ours in tokens:
            yield Pair(tokens[ours], (f"{ours}/tokens",))
    for i in range(config.depth):
        yield from _block(config, BLOCKS + (f"_{i}" if i else ""), f"encoder_block_{i}")
    yield from norm_rows("layers/layer_normalization", "encoder_norm")


def _block(config: ViTConfig, theirs: str, ours: str) -> Iterator[Pair]:
    for number, branch in enumerate(("attention", "mlp"), 1):
        yield from norm_rows(f"{theirs}/norm{number}", f"{ours}/{branch}_norm")
        yield Pair(f"{theirs}/layer_scale{number}/vars/0", (f"{ours}/{branch}_scale/gamma",))
    for name in QKV:
        source, path = f"{theirs}/attention/{name}_dense/vars", f"{ours}/attention/{name}"
        yield Pair(f"{source}/0", (f"{path}/kernel",), INTO_HEADS)
        if config.qkv_bias and (config.key_bias or name != "key"):
            yield Pair(f"{source}/1", (f"{path}/bias",), HEADS_BIAS)
    source, path = f"{theirs}/attention/output_dense/vars", f"{ours}/attention/attention_output"
    yield Pair(f"{source}/0", (f"{path}/kernel",), FROM_HEADS)
    yield Pair(f"{source}/1", (f"{path}/bias",))
    if config.mlp == "swiglu":
        yield from dense_rows(f"{theirs}/mlp/gate_proj", f"{ours}/mlp/gate")
    yield from dense_rows(f"{theirs}/mlp/up_proj", f"{ours}/mlp/dense_1")
    yield from dense_rows(f"{theirs}/mlp/down_proj", f"{ours}/mlp/dense_2")


KERAS_HUB_DINOV3 = Format(
    name="keras_hub_dinov3",
    mark=r"(?P<prefix>)layers/dinov3_encoder/.+/vars/0",
    read_config=read_dinov3,
    rows=dinov3_rows,
    dropped={rf"{EMBEDDING}/vars/1$": "the mask token of pretraining"},
)

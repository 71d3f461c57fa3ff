"""Presets of KerasHub: its ViT, DeiT and DINOv2, and the classifiers of the first two.

Keras names arrays by class and number, so the names are the same in every preset. The layouts are
Keras' own. GELU is exact.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.config_rules import short
from keras_vit.weights.files.preset import OF_TASK
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Derived, Format, Header, Pair, Reading, Row
from keras_vit.weights.formats.torch_names import QKV, TABLE

# Names of the parts: the embedding, its Conv2D, the blocks, a block's layers, the last norm.
VIT = {
    "embedding": "layers/vi_t_patching_and_embedding",
    "projection": "patch_embedding",
    "blocks": "layers/vi_t_encoder/encoder_layers/vi_t_encoder_block",
    "norms": ("layer_norm_1", "layer_norm_2"),
    "attention": "mha",
    "mlp": ("mlp/dense_1", "mlp/dense_2"),
    "norm": "layers/vi_t_encoder/layer_norm",
}
DEIT = {
    **VIT,
    "embedding": "layers/dei_t_embeddings",
    "blocks": "layers/dei_t_encoder/encoder_layers/dei_t_encoder_block",
    "mlp": ("mlp/dense", "output_layer/dense"),
    "norm": "layers/dei_t_encoder/layer_norm",
}
DINOV2 = {
    "embedding": "layers/dinov2_embedding",
    "projection": "patch_embeddings/projection",
    "blocks": "layers/dinov2_encoder/layers/dinov2_layer",
    "norms": ("norm1", "norm2"),
    "attention": "attention/attention",
    "mlp": ("mlp/fc1", "mlp/fc2"),
    "norm": "layers/layer_normalization",
}
GATED_DINOV2 = {**DINOV2, "mlp": ("mlp/weights_in", "mlp/weights_out")}
POOLINGS = ("token", "gap")
HEAD = f"{OF_TASK}layers/dense"


def read_keras_hub(header: Header) -> Reading:
    """The config: from shapes, then from the preset's JSON files."""
    names = _names(header)
    stated = header.config.get("config") or {}
    block, embedding = names["blocks"], names["embedding"]
    dino = embedding == DINOV2["embedding"]
    projection = f"{embedding}/{names['projection']}/vars"
    ph, pw, channels, width = header.shape(f"{projection}/0", 4)
    _, heads, size = header.shape(f"{block}/{names['attention']}/query_dense/vars/0", 3)
    tokens = _tokens(header, names)
    token, deit = "class_token" in tokens, "distillation_token" in tokens
    shape = tuple(stated.get("image_shape") or ())
    if dino and header.given.get("image_size") not in (None, *shape[:1], shape[:2]):
        # KerasHub, too, resamples another size from the table of training.
        tokens["table"] = tokens["first_table"]
        shape = tuple(stated.get("position_embedding_shape") or ())
    rows, _ = header.shapes[tokens["table"]][-2:]
    image_size, _ = header.table_size(rows, [token + deit], (ph, pw), shape[:2])
    _check_biases(header, names)
    epsilon = "layer_norm_epsilon"
    fields = {
        "image_size": image_size,
        "patch_size": (ph, pw),
        "in_channels": channels,
        "patch_bias": f"{projection}/1" in header.shapes,
        "width": width,
        "depth": header.count(rf"({block}(?:_\d+)?)/"),
        "num_heads": heads,
        "head_dim": None if heads * size == width else size,
        "mlp_dim": header.shape(f"{block}/{names['mlp'][1]}/vars/0", 2)[0],
        "mlp": "swiglu" if names is GATED_DINOV2 else "mlp",
        "norm_epsilon": stated.get(epsilon, 1e-6),  # DINOv2's is 1e-6
        "gelu": "exact",
        "layer_scale": stated.get("layer_scale_init_value", 1.0) if dino else None,
        "class_token": token,
        "distillation_token": deit,
        "num_registers": header.size(tokens.get("registers", ""), 1, 0),
        "interpolation": "huggingface",
        **_head(header, token),
        **pixel_fields(header.pixels, channels),
    }
    hidden = () if dino or epsilon in stated else header.unstated(("norm_epsilon",), {})
    return Reading(fields, {"names": names, "tokens": tokens}, assumed=tuple(hidden))


def _names(header: Header) -> Mapping[str, Any]:
    for names in (VIT, DEIT, GATED_DINOV2, DINOV2):
        if f"{names['blocks']}/{names['mlp'][0]}/vars/0" in header.shapes:
            return names
    raise ValueError("source must hold a ViT's, a DeiT's or a DINOv2's blocks. Received: none")


def _tokens(header: Header, names: Mapping[str, Any]) -> dict[str, str]:
    """Names of the tokens and of the table, which Keras numbers in the order of creation."""
    own = [name for i in range(6) if (name := f"{names['embedding']}/vars/{i}") in header.shapes]
    if names is VIT:
        found = {"class_token": own[0]} if own else {}
        return {**found, "table": f"{names['embedding']}/position_embedding/vars/0"}
    if names is DEIT:
        wanted = ("class_token", "distillation_token", "table")
    else:  # the last table is that of the size of training, from which the one before is resampled
        rest = ["mask_token"] if len(header.shapes.get(_at(own, 1), ())) == 2 else []
        registers = ["registers"] if len(own) == 4 + len(rest) else []
        wanted = ("class_token", *rest, *registers, "table", "first_table")
    if len(own) != len(wanted):
        raise ValueError(
            f"source must hold {', '.join(wanted)} as {names['embedding']}/vars. "
            f"Received: {len(own)} arrays"
        )
    return dict(zip(wanted, own, strict=True))


def _at(names: list[str], index: int) -> str:
    return names[index] if index < len(names) else ""


def _head(header: Header, token: bool) -> dict[str, Any]:
    """The fields of a classifier, or of a backbone without one."""
    task = header.config.get("task")
    pooling = (task or {}).get("pooling") or "token"
    if pooling not in POOLINGS or (task and pooling == "token" and not token):
        raise ValueError(
            "pooling in task.json must be 'gap', or 'token' with a class token. "
            f"Received: pooling={short(pooling)}"
        )
    if pooling == "gap" or not token:
        pooling = "mean_all" if token else "mean"
    inner = header.size(f"{HEAD}_1/vars/0", 0, None)  # the width of a layer before the head
    head = HEAD if inner is None else f"{HEAD}_1"
    return {
        "pooling": pooling,
        "num_classes": header.size(f"{head}/vars/0", 1, 0),
        "representation_size": inner,
        "classifier_activation": (task or {}).get("activation"),
    }


def pixel_fields(converter: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """(pixel / 255 - mean) / std as the converter has it, pixel * scale + offset."""
    if not converter:
        return {}
    scale, offset = (
        [value] * channels if isinstance(value, int | float) else list(value)
        for value in (converter.get("scale") or 1.0, converter.get("offset") or 0.0)
    )
    if len(scale) != channels or len(offset) != channels or not all(scale):
        raise ValueError(
            f"scale and offset in image_converter.json must be {channels} numbers other than 0 or "
            f"one. Received: scale={short(scale)}, offset={short(offset)}"
        )
    std = tuple(1 / (255 * s) for s in scale)
    mean = tuple(-o * d for o, d in zip(offset, std, strict=True))
    fields: dict[str, Any] = {
        "pixel_mean": mean[0] if len(set(mean)) == 1 else mean,
        "pixel_std": std[0] if len(set(std)) == 1 else std,
    }
    if converter.get("interpolation") in ("nearest", "bilinear", "bicubic"):
        fields["resize_method"] = converter["interpolation"]
    if converter.get("crop_to_aspect_ratio", True):
        fields["crop_fraction"] = 1.0
    return fields


def _check_biases(header: Header, names: Mapping[str, Any]) -> None:
    """Refuses blocks with products that have no bias."""
    block, attention = names["blocks"], names["attention"]
    parts = [*(f"{attention}/{name}_dense" for name in (*QKV, "output")), *names["mlp"]]
    without = [part for part in parts if f"{block}/{part}/vars/1" not in header.shapes]
    if without:
        raise ValueError(
            "source must have biases in all products of its blocks (use_mha_bias, use_mlp_bias). "
            f"Received: none in {', '.join(without)}"
        )


def keras_hub_rows(
    config: ViTConfig, names: Mapping[str, Any] = VIT, tokens: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """The table of names."""
    tokens = tokens or {}
    embedding = names["embedding"]
    yield from dense_rows(
        f"{embedding}/{names['projection']}", "patches/projection", bias=config.patch_bias
    )
    for ours in ("class_token", "distillation_token", "registers"):
        if ours in tokens:
            yield Pair(tokens[ours], (f"{ours}/tokens",))
    layout = Layout("") if names is VIT else TABLE
    yield Pair(tokens["table"], ("position_embedding/table",), layout)
    for i in range(config.depth):
        ours, theirs = f"encoder_block_{i}", names["blocks"] + (f"_{i}" if i else "")
        yield from norm_rows(f"{theirs}/{names['norms'][0]}", f"{ours}/attention_norm")
        yield from attention_rows(f"{theirs}/{names['attention']}", f"{ours}/attention")
        yield from norm_rows(f"{theirs}/{names['norms'][1]}", f"{ours}/mlp_norm")
        first, second = (f"{theirs}/{name}" for name in names["mlp"])
        if config.mlp == "swiglu":
            both = {f"{first}/vars/0": (config.width, 2 * config.mlp_dim)}
            for part, take in (("gate", _first_half), ("dense_1", _second_half)):
                yield Derived(f"{ours}/mlp/{part}/kernel", both, take)
            yield Pair(f"{first}/vars/1", (f"{ours}/mlp/gate/bias", f"{ours}/mlp/dense_1/bias"))
        else:
            yield from dense_rows(first, f"{ours}/mlp/dense_1")
        yield from dense_rows(second, f"{ours}/mlp/dense_2")
        if config.layer_scale is not None:
            for number, branch in enumerate(("attention", "mlp"), 1):
                yield Pair(
                    f"{theirs}/layer_scale{number}/vars/0", (f"{ours}/{branch}_scale/gamma",)
                )
    yield from norm_rows(names["norm"], "encoder_norm")
    inner = config.representation_size is not None
    if inner:
        yield from dense_rows(HEAD, "pre_logits")
    if config.num_classes:
        yield from dense_rows(f"{HEAD}_1" if inner else HEAD, "head")


def _first_half(kernel: np.ndarray) -> np.ndarray:
    return kernel[:, : kernel.shape[1] // 2]


def _second_half(kernel: np.ndarray) -> np.ndarray:
    return kernel[:, kernel.shape[1] // 2 :]


def attention_rows(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of a `MultiHeadAttention`."""
    for name in QKV:
        yield from dense_rows(f"{theirs}/{name}_dense", f"{ours}/{name}")
    yield from dense_rows(f"{theirs}/output_dense", f"{ours}/attention_output")


def dense_rows(theirs: str, ours: str, bias: bool = True) -> Iterator[Pair]:
    """The rows of a Dense or a Conv2D."""
    yield Pair(f"{theirs}/vars/0", (f"{ours}/kernel",))
    if bias:
        yield Pair(f"{theirs}/vars/1", (f"{ours}/bias",))


def norm_rows(theirs: str, ours: str) -> Iterator[Pair]:
    """The rows of a LayerNormalization."""
    yield Pair(f"{theirs}/vars/0", (f"{ours}/gamma",))
    yield Pair(f"{theirs}/vars/1", (f"{ours}/beta",))


KERAS_HUB = Format(
    name="keras_hub",
    mark=r"(?P<prefix>)layers/(vi_t_encoder|dei_t_encoder|dinov2_encoder)/.+/vars/0",
    read_config=read_keras_hub,
    rows=keras_hub_rows,
    dropped={
        r"layers/dinov2_embedding/vars/1$": "the mask token of pretraining",
        r"layers/dinov2_embedding/vars/\d$": "the position table of another size",
    },
)

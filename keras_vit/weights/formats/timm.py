"""State dicts of timm's `VisionTransformer` and `Eva`.

LayerNorm's epsilon is 1e-6 and GELU is exact unless the architecture says otherwise. `config.json`
states the pixel range.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.weights.formats import resnet_names, timm_config
from keras_vit.weights.formats.relative_positions import (
    INDEX,
    INDEX_REASON,
    relative_rows,
)
from keras_vit.weights.formats.table import (
    POOLING_SIZES,
    STANDARD_HEADS,
    Derived,
    Format,
    Limit,
    Pair,
    Row,
)
from keras_vit.weights.formats.timm_reading import FREQUENCIES, NAMES, read_timm
from keras_vit.weights.formats.torch_names import (
    CONV,
    FROM_HEADS,
    HEADS_BIAS,
    INTO_HEADS,
    QKV,
    TABLE,
    linear,
    mlp,
    norm,
    qkv,
)

DROPPED = {
    r"mask_token$": "the mask token of pretraining",
    r"decoder_": "the decoder of pretraining",
    r"lm_head\.": "the head of pretraining",
    INDEX: INDEX_REASON,
}
REFUSED = {
    r"blocks\.0\.0\.": "blocks in chunks (save it without block chunks)",
    r"patch_embed\.(backbone\.(?!(stem\.)?(conv|norm)\.|stages\.)|conv1)": "a stem of several "
    "convolutions that is not ViT's ResNet",
    r"rope\.freqs_|blocks\.0\.attn\.rope\.": "tables of rotary positions (raw EVA-02)",
}


def timm_rows(
    config: ViTConfig, names: Mapping[str, Any] = NAMES, fold: int = 0, relative: str = "own"
) -> Iterator[Row]:
    """The table of names. `fold` rows of the position table are the registers'."""
    if config.stem:
        yield from resnet_names.timm_stem_rows(config)
    yield from linear("patch_embed.proj", "patches/projection", CONV, bias=config.patch_bias)
    if config.patch_norm:
        yield from norm("patch_embed.norm", "patches/norm_after", config.norm)
    if config.class_token:
        yield Pair("cls_token", ("class_token/tokens",))
    if config.distillation_token:
        yield Pair("dist_token", ("distillation_token/tokens",))
    if fold:
        yield from folded_registers(config, names["registers"], "pos_embed", fold)
    else:
        if config.num_registers:
            yield Pair(names["registers"], ("registers/tokens",))
        if config.position_table == "learned":
            yield Pair("pos_embed", ("position_embedding/table",), TABLE)
    if config.embedding_norm:
        yield from norm("norm_pre", "embedding_norm", config.norm)
    for i in range(config.depth):
        yield from block_rows(config, f"blocks.{i}", f"encoder_block_{i}", names)
        own, shared = names["relative"]
        yield from relative_rows(config, i, own.format(i), shared, relative)
        if config.attention_positions == "rope_mixed":
            yield Derived(
                f"encoder_block_{i}/attention/rotary/frequencies",
                {FREQUENCIES: (2, config.depth, config.num_heads, config.key_dim // 2)},
                lambda frequencies, i=i: frequencies[:, i],
            )
    if config.final_norm != "none":
        after = config.final_norm == "after_pooling"
        yield from norm("fc_norm" if after else "norm", "encoder_norm", config.norm)
    if config.attention_pooling:
        yield from _attention_pooling()
    if config.representation_size is not None:
        yield from linear("pre_logits.fc", "pre_logits")
    if config.num_classes and config.pooling == "token_pair":
        yield from linear("head", "head/class")
        yield from linear("head_dist", "head/distillation")
    elif config.num_classes:
        yield from linear(names["head"], "head")


def block_rows(config, theirs, ours, names) -> Iterator[Row]:
    """The rows of a block."""
    yield from norm(f"{theirs}.norm1", f"{ours}/attention_norm", config.norm)
    yield from _projections(config, f"{theirs}.attn", f"{ours}/attention", names)
    if config.qk_norm:
        yield from norm(f"{theirs}.attn.q_norm", f"{ours}/attention/query_norm", config.norm)
        yield from norm(f"{theirs}.attn.k_norm", f"{ours}/attention/key_norm", config.norm)
    if config.attention_inner_norm:
        yield from norm(f"{theirs}.attn.norm", f"{ours}/attention/inner_norm", config.norm)
    output = f"{ours}/attention/attention_output"
    yield from linear(f"{theirs}.attn.proj", output, FROM_HEADS, bias=config.dense_bias)
    yield from norm(f"{theirs}.norm2", f"{ours}/mlp_norm", config.norm)
    gated = config.mlp == "swiglu"
    yield from mlp(f"{theirs}.mlp", f"{ours}/mlp", names["mlp"], gated, bias=config.dense_bias)
    if config.mlp_inner_norm:
        yield from norm(f"{theirs}.mlp.norm", f"{ours}/mlp/inner_norm", config.norm)
    if config.layer_scale is not None:
        for theirs_scale, branch in zip(names["scales"], ("attention", "mlp"), strict=True):
            yield Pair(f"{theirs}.{theirs_scale}", (f"{ours}/{branch}_scale/gamma",))


def _projections(config, theirs, ours, names) -> Iterator[Row]:
    """Query, key and value: in one matrix, or in timm's Eva one each, with or without biases."""
    biased = [name for name in QKV if config.qkv_bias and (config.key_bias or name != "key")]
    if names.get("separate"):
        for name in QKV:
            yield Pair(f"{theirs}.{name[0]}_proj.weight", (f"{ours}/{name}/kernel",), INTO_HEADS)
        for name in biased:
            yield Pair(f"{theirs}.{name[0]}_proj.bias", (f"{ours}/{name}/bias",), HEADS_BIAS)
        return
    together = f"{theirs}.qkv.bias" if len(biased) == len(QKV) else None
    yield from qkv(f"{theirs}.qkv.weight", together, ours)
    for name in () if together else biased:
        place = f"{ours}/{name}/bias"
        if names.get("masked"):  # DINOv3's own code multiplies the keys' third of the bias by 0
            size, start = config.num_heads * config.key_dim, QKV.index(name)
            third = slice(start * size, (start + 1) * size)
            yield Derived(place, {f"{theirs}.qkv.bias": (3 * size,)}, lambda b, part=third: b[part])
        else:
            yield Pair(f"{theirs}.{name[0]}_bias", (place,), HEADS_BIAS)


def _attention_pooling() -> Iterator[Pair]:
    yield Pair("attn_pool.latent", ("pooling/probe",))
    ours = "pooling/attention"
    yield from linear("attn_pool.q", f"{ours}/query", INTO_HEADS, HEADS_BIAS)
    yield from qkv("attn_pool.kv.weight", "attn_pool.kv.bias", ours, ("key", "value"))
    yield from linear("attn_pool.proj", f"{ours}/attention_output", FROM_HEADS)
    yield from norm("attn_pool.norm", "pooling/norm")
    for i in (1, 2):
        yield from linear(f"attn_pool.mlp.fc{i}", f"pooling/mlp/dense_{i}")


def folded_registers(
    config: ViTConfig, registers: str, positions: str, rows: int
) -> Iterator[Derived]:
    """Registers with rows in the position table: the rows are added to them once."""
    token, width = config.num_prefix_rows, config.width
    table = (1, token + rows + config.num_patches, width)
    yield Derived(
        "registers/tokens",
        {registers: (1, rows, width), positions: table},
        lambda tokens, all_rows: tokens + all_rows[:, token : token + rows],
    )
    yield Derived(
        "position_embedding/table",
        {positions: table},
        lambda all_rows: np.delete(all_rows[0], np.s_[token : token + rows], axis=0),
    )


TIMM = Format(
    name="timm",
    mark=r"(?P<prefix>.*)patch_embed\.proj\.weight",
    read_config=read_timm,
    rows=timm_rows,
    needs=(
        r"blocks\.0\.attn\.qkv\.weight$",
        r"blocks\.0\.attn\.q_proj\.weight$",
        r"norm_pre\.",
    ),
    dropped=DROPPED,
    refused=REFUSED,
    writable={
        "norm_epsilon": (1e-6, 1e-5),
        "block_norm": ("pre", "res_post"),
        "norm": ("layer",),
        "key_bias": (True,),
        "score_scale": ("fixed",),
        "score_diagonal": (True,),
        "patch_shift": (False,),
        "patch_norm": (False,),
        "position_embedding": ("learned", "none"),
        "representation_size": (None,),
        "classifier_activation": (None,),
        "token_merging": (0,),
    },
    limits=(
        STANDARD_HEADS,
        POOLING_SIZES,
        Limit(
            lambda c: c.pooling != "token_mean",
            "pooling must be another than 'token_mean', which timm does not have",
        ),
        Limit(
            lambda c: (
                not c.distillation_token
                or (c.pooling == "token_pair" and c.class_row and not c.num_registers)
            ),
            "distillation_token must be False, or pooling 'token_pair', with rows in the table for "
            "both tokens and without registers",
        ),
        Limit(
            lambda c: (
                not (c.distillation_token or c.stem)
                or (c.mlp, c.block_norm, c.norm_epsilon) == ("mlp", "pre", 1e-6)
            ),
            "mlp must be 'mlp', block_norm 'pre' and norm_epsilon 1e-06 with a distillation token "
            "or a stem",
        ),
        Limit(
            lambda c: not (c.distillation_token and c.stem),
            "stem must be None with a distillation token",
        ),
        Limit(
            lambda c: c.patch_bias != c.embedding_norm,
            "patch_bias must be the opposite of embedding_norm={0.embedding_norm}: timm's models "
            "have one of the two",
        ),
        Limit(
            lambda c: (c.mlp, c.block_norm) == ("mlp", "pre") or c.norm_epsilon == 1e-6,
            "norm_epsilon must be 1e-06 for mlp={0.mlp!r} and block_norm={0.block_norm!r}",
        ),
        Limit(
            lambda c: c.mlp == "mlp" or not c.attention_pooling,
            "mlp must be 'mlp' for pooling={0.pooling!r}, whose own MLP would be twice as large",
        ),
        Limit(
            lambda c: not c.distillation_token or c.num_classes > 0,
            "num_classes must be greater than 0 with a distillation token: timm averages features",
        ),
        Limit(
            lambda c: c.mlp == "mlp" or c.block_norm == "pre",
            "block_norm must be 'pre' for mlp={0.mlp!r}, it is {0.block_norm!r}",
        ),
        Limit(
            lambda c: not (c.num_registers and c.class_row),
            "position_class_row must be False if there are registers: timm's table has rows for "
            "all tokens before the patches, or for none",
        ),
        Limit(
            lambda c: not c.stem or resnet_names.TIMM.items() <= c.to_dict().items(),
            "stem_standardization must be 'variance' and stem_epsilon 1e-05",
        ),
        Limit(
            lambda c: not c.stem or (c.stem_depths in timm_config.HYBRIDS and c.stem_width == 64),
            "stem_width must be 64 and stem_depths one of "
            + ", ".join(map(str, timm_config.HYBRIDS)),
        ),
    ),
    json_files={"config.json": timm_config.config_json},
)

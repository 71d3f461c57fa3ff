"""What the fields of a `ViTConfig` may be: their choices, their limits, and the errors."""

import reprlib
from typing import Any

from keras_vit.resample import PRESETS

RESIZE_METHODS = ("nearest", "bilinear", "bicubic", "lanczos")
POSITION_TABLES = ("learned", "learned_2d", "sincos_2d")
"""What `position_embedding` may add to the tokens."""
ATTENTION_POSITIONS = ("rope", "rope_mixed", "relative", "relative_bias", "relative_mlp")
"""What `position_embedding` may do in attention, alone or beside a table, as in "learned+rope"."""
CHOICES = {
    "stem": (None, "resnet", "conv"),
    "stem_standardization": ("deviation", "variance"),
    "block_norm": ("pre", "post", "res_post"),
    "score_scale": ("fixed", "learned"),
    "norm": ("layer", "rms"),
    "mlp": ("mlp", "swiglu"),
    "gelu": ("exact", "tanh", "quick"),
    "position_embedding": (
        *POSITION_TABLES,
        "none",
        *ATTENTION_POSITIONS,
        *(f"{table}+{word}" for table in POSITION_TABLES for word in ATTENTION_POSITIONS),
    ),
    "rope_coordinates": ("centered", "index"),
    "rope_order": ("rows_first", "columns_first"),
    "rope_pairs": ("halves", "neighbors"),
    "interpolation": tuple(PRESETS),
    "pooling": ("token", "token_pair", "token_mean", "mean", "mean_all", "map", "map_all", None),
    "final_norm": ("before_pooling", "after_pooling", "none"),
    "head_init": ("zeros", "truncated_normal"),
    "resize_method": RESIZE_METHODS,
    "token_merging_schedule": ("constant", "decreasing"),
}
"""The fields that take one of a few values."""

# Limits far above every published model. A config often comes from an untrusted file, where a
# larger number could only exhaust memory.
MAX_SIZE = 1 << 20
"""Largest width, head count, register count, channel count, and height or width in pixels."""
MAX_DEPTH = 1 << 12
"""Most encoder blocks."""
MAX_CLASSES = 1 << 24
"""Most classes; face recognition has about ten million."""
MAX_PATCHES = 1 << 20
"""Most patches: 16,384 x 16,384 pixels in patches of 16."""
MAX_FIXED_TABLE = 1 << 28
"""Most numbers in a computed table ("sincos_2d", "rope"), which no file's size bounds."""
MAX_TOKEN_PAIRS = 1 << 26
"""Most pairs of tokens with relative positions, each of which has an index in memory."""
FLAGS = (
    "ignore_remainder",
    "qkv_bias",
    "key_bias",
    "qk_norm",
    "attention_inner_norm",
    "score_diagonal",
    "mlp_inner_norm",
    "class_token",
    "dense_bias",
    "distillation_token",
    "patch_bias",
    "patch_shift",
    "embedding_norm",
    "position_class_row",
)
LIMITS = {
    **dict.fromkeys(("in_channels", "width", "num_heads", "mlp_dim", "num_registers"), MAX_SIZE),
    **dict.fromkeys(("head_dim", "representation_size", "relative_mlp_dim"), MAX_SIZE),
    **dict.fromkeys(("pooling_heads", "pooling_mlp_dim"), MAX_SIZE),
    "depth": MAX_DEPTH,
    "stem_width": MAX_SIZE,
    "num_classes": MAX_CLASSES,
}


def require(condition: Any, name: str, rule: str, value: Any) -> None:
    """Raises `ValueError` with the name, the rule and the value unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} must {rule}. Received: {name}={short(value)}")


def short(value: Any) -> str:
    """A value for an error; cut, because a file may state one of any length and depth."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 12
    return short.repr(value)


def is_int(value: Any) -> bool:
    """Whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number of a sane size and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def as_pair(name: str, value: Any) -> tuple[int, int]:
    """Two positive ints: one of them for both, or a pair."""
    pair = (value, value) if is_int(value) else value
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    rule = "be a positive int or a (height, width) pair of them"
    require(is_pair and all(is_int(v) and v > 0 for v in pair), name, rule, value)
    require(max(pair) <= MAX_SIZE, name, f"be at most {MAX_SIZE}", max(pair))
    return pair[0], pair[1]


def as_labels(value: Any) -> Any:
    """A list or a one-dimensional array of labels as a tuple; anything else unchanged."""
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):  # NumPy, pandas
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


def in_other_order(labels: Any, others: Any) -> bool:
    """Whether two models or datasets have the same classes under other numbers."""
    if not labels or not others:
        return False
    return tuple(labels) != tuple(others) and sorted(labels) == sorted(others)

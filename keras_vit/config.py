"""What a Vision Transformer is, as data: one flat, frozen, self-validating dataclass."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from keras_vit.config_docs import documented
from keras_vit.config_merging import check_merging, merged_tokens
from keras_vit.config_names import check_names, pooling_hint
from keras_vit.config_rules import (
    ATTENTION_POSITIONS,
    CHOICES,
    FLAGS,
    LIMITS,
    MAX_FIXED_TABLE,
    MAX_PATCHES,
    MAX_SIZE,
    MAX_TOKEN_PAIRS,
    POSITION_TABLES,
    as_labels,
    as_pair,
    is_int,
    is_number,
    require,
)
from keras_vit.config_stem import check_stem


@documented
@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The architecture, the numerics and the preprocessing of a `ViT`.

    The defaults are ViT-B/16 as in the paper (arXiv 2010.11929, Table 1). An invalid field raises a
    `ValueError` at construction, which names the field, the rule and the value.

    Example:

    >>> config = ViTConfig(image_size=32, patch_size=4, width=192, num_heads=3, num_classes=10)
    >>> config.grid
    (8, 8)
    """

    # -- the input
    image_size: Any = (224, 224)
    """Height and width of the images; one int means a square."""
    patch_size: Any = (16, 16)
    """Height and width of a patch; one int means a square."""
    ignore_remainder: bool = False
    """Whether pixels to the right of and below the last whole patch are ignored. If False,
    `image_size` must be a multiple of `patch_size`."""
    in_channels: int = 3
    """Channels of the images."""

    # -- the stem
    stem: str | None = None
    """None: tokens are patches of the image; "resnet": of the feature map of a ResNet (hybrid);
    "conv": of that of a few 3x3 convolutions. `patch_size` is in pixels of the image always."""
    stem_depths: Any = ()
    """Bottlenecks of each stage of the ResNet; () means its root alone. Its stride is 4 with up to
    one stage, and twice as much with each further one. Or convolutions of each stage of "conv",
    which halves the map; () means one for each factor of 2 that both sides of a patch have."""
    stem_width: int = 64
    """Channels of the ResNet's root, a multiple of 32, or of the first stage of "conv", of 16."""
    stem_epsilon: float = 1e-6
    """Epsilon of the stem's group norms."""
    stem_standardization: str = "deviation"
    """What its standardized kernels are divided by: "deviation", std + 1e-5, as in
    vision_transformer, or "variance", sqrt(var + 1e-8), as in timm."""

    # -- the encoder
    width: int = 768
    """D, the size of a token."""
    depth: int = 12
    """L, the number of encoder blocks."""
    num_heads: int = 12
    """h, the number of attention heads."""
    head_dim: int | None = None
    """d, the size of a head; None means width / num_heads. `config.key_dim` is the result."""
    mlp_dim: int = 3072
    """M, the hidden size of the MLP; of each of the two halves of a gated one."""
    mlp: str = "mlp"
    """"mlp", as in the paper, or "swiglu": SiLU(z W_g) * (z W_1) instead of GELU(z W_1)."""
    mlp_inner_norm: bool = False
    """Whether a LayerNorm is applied to the M hidden values of the MLP (EVA-02, BEiT-3)."""
    block_norm: str = "pre"
    """"pre": z + f(LN(z)), as in the paper; "post": LN(z + f(z)); "res_post": z + LN(f(z))."""
    norm: str = "layer"
    """"layer" or "rms" (no mean and no offset): of every norm of the model."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    key_bias: bool = True
    """Whether the key projection has a bias too, where `qkv_bias` is True."""
    dense_bias: bool = True
    """Whether the other Dense layers of a block have a bias: attention's output and the MLP."""
    qk_norm: bool = False
    """Whether a LayerNorm is applied to each head's queries and keys."""
    score_scale: str = "fixed"
    """What multiplies q k^T: "fixed" (1 / sqrt(d)) or "learned", a weight of each head (LSA)."""
    score_diagonal: bool = True
    """Whether a token attends to itself; False masks the diagonal of the scores (LSA)."""
    attention_inner_norm: bool = False
    """Whether a LayerNorm is applied to the concatenated heads, before the projection (BEiT-3)."""
    gelu: str = "exact"
    """"exact" (erf), "tanh" (its approximation) or "quick" (x sigmoid(1.702 x)); mlp="swiglu" has
    none."""
    norm_epsilon: float = 1e-6
    """Epsilon of every LayerNorm."""
    layer_scale: float | None = None
    """Initial value of LayerScale on both branches of a block; None means no LayerScale."""

    # -- the tokens
    class_token: bool = True
    """Whether a learned class token precedes the patches."""
    distillation_token: bool = False
    """Whether a learned distillation token follows the class token (DeiT)."""
    num_registers: int = 0
    """Number of learned register tokens in front of the patches."""
    patch_bias: bool = True
    """Whether the patch projection has a bias."""
    patch_shift: bool = False
    """Whether patches are cut from the image and four copies of it, shifted by half a patch along
    the diagonals (SPT)."""
    patch_norm: bool | str = False
    """Whether a LayerNorm precedes and follows the patch projection (vit-pytorch), or one alone:
    "before" (SPT) or "after" (AIMv2)."""
    position_embedding: str = "learned"
    """A table added to the tokens: "learned" (one row per position), "learned_2d" (rows + columns),
    "sincos_2d" or "none".

    Attention may know positions instead, or too, as in "learned+rope": "rope" rotates queries and
    keys, "rope_mixed" by learned frequencies; "relative" (Appendix D.4) has a learned key for each
    offset of two tokens, "relative_bias" (BEiT) a learned bias, "relative_mlp" one by an MLP."""
    position_class_row: bool = True
    """Whether a learned table has a row for the class token, and one for the distillation token.
    Ignored without a class token."""
    embedding_norm: bool = False
    """Whether a LayerNorm precedes the first block (CLIP)."""
    interpolation: str = "google"
    """How `resized` resamples position tables: a name in `keras_vit.resample.PRESETS`."""
    relative_mlp_dim: int = 128
    """Hidden size of the MLP of "relative_mlp"."""
    rope_base: float = 100.0
    """Rotary positions: quotient of the highest and the lowest frequency; the initial one of
    "rope_mixed"."""
    rope_coordinates: str = "centered"
    """"centered": patch centers in [-1, 1], times 2 pi (DINOv3); "index": 0, 1, 2, ..."""
    rope_order: str = "rows_first"
    """Which coordinate has the first frequencies: "rows_first" or "columns_first"."""
    rope_pairs: str = "halves"
    """What is rotated together: "halves" (i and i + d/2) or "neighbors" (2i and 2i + 1)."""
    rope_offset: float = 0.0
    """Added to the number of each row and column."""
    rope_grid: Any = None
    """Rows and columns onto which "index" coordinates are scaled at any resolution (EVA-02), or
    None."""
    rope_rescale: float | None = None
    """In training, all coordinates are multiplied by a log-uniform factor in [1 / r, r]; None means
    they are not."""

    # -- the output
    pooling: str | None = "token"
    """"token", "token_pair" (class and distillation token, whose two heads are averaged),
    "token_mean" (class token and mean of the patch tokens, one behind the other), "mean" (of the
    patch tokens), "mean_all" (of all tokens), "map" (attention pooling of the patch tokens),
    "map_all" (of all tokens) or None (no pooling)."""
    pooling_heads: int | None = None
    """Heads of attention pooling; None means `num_heads`."""
    pooling_mlp_dim: int | None = None
    """Hidden size of the MLP of attention pooling; None means `mlp_dim`."""
    final_norm: str = "before_pooling"
    """Where the last LayerNorm is applied: "before_pooling", "after_pooling" or "none"."""
    representation_size: int | None = None
    """Size of the paper's Dense + tanh before the head; None means no such layer."""
    num_classes: int = 1000
    """Number of classes; 0 means no head, so that the model returns its features."""
    labels: Any = None
    """The `num_classes` class names, a sequence or an array of strings, or None."""
    head_init: str = "zeros"
    """"zeros" (the paper's, for fine-tuning) or "truncated_normal" (0.02)."""
    head_bias: float | None = 0.0
    """Initial bias of the head, such as -6.9 for a sigmoid loss over 1,000 classes; None means no
    bias."""
    classifier_activation: str | None = None
    """Activation applied to the logits, such as "softmax"; None returns logits."""

    # -- regularization, all rates in [0, 1)
    dropout: float = 0.0
    """Dropout after the position embedding, after attention and after each Dense of an MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth of the last block; the rate rises linearly from 0 in the first one."""
    patch_dropout: float = 0.0
    """Fraction of the patch tokens that are dropped in training."""

    # -- fewer tokens
    token_merging: int = 0
    """r: each block merges the r most similar pairs of patch tokens (ToMe), in training too."""
    token_merging_schedule: str = "constant"
    """"constant": r in each block; "decreasing": from 2 r in the first block to 0 in the last."""

    # -- preprocessing: from an image to the pixels that the model was trained on
    resize_method: str = "bilinear"
    """"nearest", "bilinear", "bicubic" or "lanczos", with antialiasing."""
    crop_fraction: float | None = None
    """None squashes the image to `image_size`; r resizes it to cover `image_size` / r, then crops
    the center."""
    pixel_mean: Any = 0.5
    """Subtracted from pixels in [0, 1]; one value, or one per channel."""
    pixel_std: Any = 0.5
    """Divides the difference; one value, or one per channel."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size"):
            object.__setattr__(self, name, as_pair(name, getattr(self, name)))
        if self.rope_grid is not None:
            object.__setattr__(self, "rope_grid", as_pair("rope_grid", self.rope_grid))
        object.__setattr__(self, "labels", as_labels(self.labels))
        for name in ("stem_depths", "pixel_mean", "pixel_std"):  # JSON has no tuples
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_types()
        check_stem(self)
        self._check_encoder()
        self._check_tokens()
        self._check_output()
        self._check_pixels()
        check_merging(self)

    # -- derived values

    @property
    def key_dim(self) -> int:
        """d, the size of one attention head."""
        return self.head_dim or self.width // self.num_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def stem_stages(self) -> tuple[int, ...]:
        """Bottlenecks or convolutions of each stage of the stem, even where `stem_depths` is ()."""
        if self.stem != "conv" or self.stem_depths:
            return self.stem_depths
        side = math.gcd(*self.patch_size)
        return (1,) * ((side & -side).bit_length() - 1)  # the power of 2 in it

    @property
    def stem_stride(self) -> int:
        """Pixels of the image, each way, that a cell of the stem's feature map stands for."""
        stages = len(self.stem_stages)
        return 2 ** max(stages + 1, 2) if self.stem == "resnet" else 2**stages

    @property
    def patch_kernel(self) -> tuple[int, int]:
        """Height and width of the patch projection's kernel: pixels, or cells of the stem's map."""
        return self.patch_size[0] // self.stem_stride, self.patch_size[1] // self.stem_stride

    @property
    def patch_copies(self) -> int:
        """How often each pixel's channels are in a patch: 5 times with `patch_shift`, else once."""
        return 5 if self.patch_shift else 1

    @property
    def patch_shifts(self) -> tuple[int, int]:
        """Rows and columns by which `patch_shift` moves the copies of an image: half a patch."""
        return self.patch_size[0] // 2, self.patch_size[1] // 2

    @property
    def num_patches(self) -> int:
        """N, the number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: class and distillation token, and registers."""
        return int(self.class_token) + int(self.distillation_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """T, the length of the sequence."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def merged_tokens(self) -> tuple[int, ...]:
        """How many tokens each block merges, which is at most half of its patch tokens."""
        return merged_tokens(self)

    @property
    def position_table(self) -> str | None:
        """The table in `position_embedding`: "learned", "learned_2d", "sincos_2d" or None."""
        word = self.position_embedding.split("+")[0]
        return word if word in POSITION_TABLES else None

    @property
    def attention_positions(self) -> str | None:
        """What `position_embedding` does in attention: a name in `ATTENTION_POSITIONS`, or None."""
        word = self.position_embedding.split("+")[-1]
        return word if word in ATTENTION_POSITIONS else None

    @property
    def class_row(self) -> bool:
        """Whether the position table has a row for the class token."""
        learned = self.position_table in ("learned", "learned_2d")
        return self.class_token and self.position_class_row and learned

    @property
    def num_prefix_rows(self) -> int:
        """Rows of the position table before those of the patches."""
        return int(self.class_row) * (1 + int(self.distillation_token))

    @property
    def attention_pooling(self) -> bool:
        """Whether tokens are pooled by attention."""
        return self.pooling in ("map", "map_all")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        return (*self.image_size, self.in_channels)

    def replace(self, **changes: Any) -> "ViTConfig":
        """The same config with some fields changed, validated again."""
        return ViTConfig.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict that JSON can hold."""
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ViTConfig":
        """The reverse of `to_dict`; `labels` alone set `num_classes`. Unknown fields are errors."""
        check_names(fields, [f.name for f in dataclasses.fields(cls)])
        labels = as_labels(fields.get("labels"))
        if "num_classes" not in fields and isinstance(labels, tuple):
            fields = {**fields, "num_classes": len(labels)}
        return cls(**fields)

    # -- the rules

    def _check(self, name: str, rule: str, holds: Callable[[Any], bool]) -> None:
        require(holds(value := getattr(self, name)), name, rule, value)

    def _check_types(self) -> None:
        sizes = ("width", "depth", "num_heads", "mlp_dim", "relative_mlp_dim")
        for name in ("in_channels", "stem_width", *sizes):
            self._check(name, "be a positive int", lambda v: is_int(v) and v > 0)
        for name in ("num_classes", "num_registers"):
            self._check(name, "be an int >= 0", lambda v: is_int(v) and v >= 0)
        for name in ("head_dim", "representation_size", "pooling_heads", "pooling_mlp_dim"):
            rule = "be None or a positive int"
            self._check(name, rule, lambda v: v is None or (is_int(v) and v > 0))
        for name, most in LIMITS.items():
            self._check(name, f"be at most {most}", lambda v, most=most: (v or 0) <= most)
        for name in FLAGS:
            self._check(name, "be True or False", lambda v: isinstance(v, bool))
        rule = "be True, False, 'before' or 'after'"
        one = ("before", "after")
        self._check("patch_norm", rule, lambda v: isinstance(v, bool) or v in one)
        for name in ("dropout", "attention_dropout", "drop_path", "patch_dropout"):
            self._check(name, "be a rate in [0, 1)", lambda v: is_number(v) and 0 <= v < 1)
        for name, known in CHOICES.items():
            rule = "be one of " + ", ".join(map(repr, known))
            rule += pooling_hint(self.pooling) * (name == "pooling")
            self._check(name, rule, lambda v, known=known: isinstance(v, str | None) and v in known)

    def _check_encoder(self) -> None:
        rule = f"divide width={self.width} unless head_dim is given"
        self._check("num_heads", rule, lambda v: self.head_dim is not None or self.width % v == 0)
        self._check("norm_epsilon", "be a positive number", lambda v: is_number(v) and v > 0)
        rule = "be None or a positive number"
        self._check("layer_scale", rule, lambda v: v is None or (is_number(v) and v > 0))
        rule = "be None for block_norm='res_post', whose LayerNorms scale the branches"
        self._check("layer_scale", rule, lambda v: v is None or self.block_norm != "res_post")

    def _check_tokens(self) -> None:
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        count, kind, where = self.num_patches, self.position_table, self.attention_positions
        rotary = where in ("rope", "rope_mixed")
        fixed = count * self.width if kind == "sincos_2d" else 0
        angles = count * self.key_dim if rotary else 0
        pairs = self.num_tokens**2 if where and not rotary else 0
        for holds, rule in (
            (
                self.ignore_remainder or (height % patch_height == 0 and width % patch_width == 0),
                f"be a multiple of patch_size={self.patch_size} in height and width, unless "
                "ignore_remainder=True",
            ),
            (count > 0, f"hold at least one patch of patch_size={self.patch_size}"),
            (
                count <= MAX_PATCHES,
                f"have at most {MAX_PATCHES} patches of patch_size={self.patch_size}",
            ),
            (
                fixed <= MAX_FIXED_TABLE,
                f"have at most {MAX_FIXED_TABLE} / width={self.width} patches for "
                f"position_embedding={kind!r}",
            ),
            (
                angles <= MAX_FIXED_TABLE,
                f"have at most {MAX_FIXED_TABLE} / head_dim={self.key_dim} patches for "
                f"position_embedding={self.position_embedding!r}",
            ),
            (
                pairs <= MAX_TOKEN_PAIRS,
                f"have at most {MAX_TOKEN_PAIRS} pairs of tokens for "
                f"position_embedding={self.position_embedding!r}",
            ),
        ):
            require(holds, "image_size", rule, self.image_size)
        if not self.score_diagonal:
            rule = "be True for a single token, which can attend to itself alone"
            self._check("score_diagonal", rule, lambda v: self.num_tokens > 1)
        if self.patch_shift:
            rule = "be at least 2 in height and width for patch_shift=True"
            self._check("patch_size", rule, lambda v: min(v) > 1)
            self._check("patch_shift", "be False with a stem", lambda v: not self.stem)
        divisor = {"learned_2d": 2, "sincos_2d": 4}.get(kind or "", 1)
        rule = f"be a multiple of {divisor} for position_embedding={kind!r}"
        self._check("width", rule, lambda v: v % divisor == 0)
        if where:
            rule = f"be 0 for position_embedding={self.position_embedding!r}"
            why = "which must know each patch's place"
            self._check("patch_dropout", f"{rule}, {why}", lambda v: v == 0)
        if where == "relative_bias":
            why = "whose table has no entries for registers"
            self._check("num_registers", f"{rule}, {why}", lambda v: v == 0)
        self._check_rotary(rotary)

    def _check_rotary(self, rotary: bool) -> None:
        if rotary:
            rule = f"be a multiple of 4 for position_embedding={self.position_embedding!r}"
            require(self.key_dim % 4 == 0, "head_dim", rule, self.key_dim)
        self._check("rope_base", "be a number of at least 1", lambda v: is_number(v) and v >= 1)
        rule = f"be a number in [-{MAX_SIZE}, {MAX_SIZE}]"
        self._check("rope_offset", rule, lambda v: is_number(v) and abs(v) <= MAX_SIZE)
        rule = "be None for rope_coordinates='centered', which do not depend on a grid"
        centered = rotary and self.rope_coordinates == "centered"
        self._check("rope_grid", rule, lambda v: v is None or not centered)
        rule = "be None or a number of at least 1"
        self._check("rope_rescale", rule, lambda v: v is None or (is_number(v) and v >= 1))

    def _check_output(self) -> None:
        tokens = ("token", "token_pair", "token_mean")
        rule = "be 'mean', 'mean_all', 'map', 'map_all' or None where class_token=False"
        self._check("pooling", rule, lambda v: v not in tokens or self.class_token)
        rule = "be False where class_token=False"
        self._check("distillation_token", rule, lambda v: not v or self.class_token)
        rule = "be another than 'token_pair' where distillation_token=False"
        self._check("pooling", rule, lambda v: v != "token_pair" or self.distillation_token)
        if self.pooling in ("token_pair", "token_mean"):
            rule = f"be 'before_pooling' or 'none' for pooling={self.pooling!r}"
            self._check("final_norm", rule, lambda v: v != "after_pooling")
        if self.pooling == "token_pair":
            rule = "be None for pooling='token_pair', which has two heads"
            self._check("representation_size", rule, lambda v: v is None)
        if self.attention_pooling:
            name = "num_heads" if self.pooling_heads is None else "pooling_heads"
            rule = f"divide width={self.width} for pooling={self.pooling!r}"
            self._check(name, rule, lambda v: self.width % v == 0)
        v = self.labels
        is_strings = isinstance(v, tuple) and all(isinstance(label, str) for label in v)
        require(
            v is None or (is_strings and len(v) == self.num_classes),
            "labels",
            f"be None or a sequence of num_classes={self.num_classes} strings",
            v if not isinstance(v, tuple) or len(v) < 9 else f"{len(v)} items",
        )
        rule = f"be 'layer' for pooling={self.pooling!r}"
        self._check("norm", rule, lambda v: v == "layer" or not self.attention_pooling)
        rule = "be a number, or None for no bias"
        self._check("head_bias", rule, lambda v: v is None or is_number(v))
        rule = "be None or the name of a Keras activation"
        self._check("classifier_activation", rule, lambda v: isinstance(v, str | None))
        rule = "be 'sigmoid' or None for num_classes=1, where a softmax is the same for every image"
        softmax = ("softmax", "log_softmax") if self.num_classes == 1 else ()
        self._check("classifier_activation", rule, lambda v: v not in softmax)

    def _check_pixels(self) -> None:
        rule = "be None or a number in (0, 1]"
        self._check("crop_fraction", rule, lambda v: v is None or (is_number(v) and 0 < v <= 1))
        for name in ("pixel_mean", "pixel_std"):
            v = getattr(self, name)
            count = f"in_channels={self.in_channels}"
            fits = not isinstance(v, tuple) or len(v) == self.in_channels
            fits = fits and all(map(is_number, v if isinstance(v, tuple) else (v,)))
            require(fits, name, f"be a number, or one per channel ({count})", v)
        rule = "be greater than 0"
        self._check("pixel_std", rule, lambda v: min(v if isinstance(v, tuple) else (v,)) > 0)

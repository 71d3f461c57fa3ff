"""What a Vision Transformer is, as data: one flat, frozen, self-validating dataclass."""

import dataclasses
import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from keras_vit.resample import PRESETS

POSITION_EMBEDDINGS = ("learned", "learned_2d", "sincos_2d", "none")
POOLINGS = ("token", "mean", "mean_all", None)
FINAL_NORMS = ("before_pooling", "after_pooling", "none")
BLOCK_NORMS = ("pre", "post")
GELUS = ("exact", "tanh")
HEAD_INITS = ("zeros", "truncated_normal")
RESIZE_METHODS = ("nearest", "bilinear", "bicubic", "lanczos")

# Ceilings far above every published model. A config often comes from a file that somebody else
# made, and a number beyond them could only fill the memory.
MAX_SIZE = 1 << 20
"""Of widths, heads, registers, channels, and of an image's or a patch's height and width."""
MAX_DEPTH = 1 << 12
"""Encoder blocks."""
MAX_CLASSES = 1 << 24
"""Classes; face recognition has some ten million."""
MAX_PATCHES = 1 << 20
"""Patches of an image: 16,384 x 16,384 pixels in patches of 16."""
MAX_FIXED_TABLE = 1 << 28
"""Numbers in the table of "sincos_2d", which is computed: no array of a file bounds it."""


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Everything that decides the shape, the numerics and the pixels of a `ViT`.

    The defaults are ViT-B/16 as in the paper (arXiv 2010.11929, Table 1). A field that does not fit
    raises `ValueError` when the config is made, naming the field, the rule and the value.

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
    in_channels: int = 3
    """Channels of the images."""

    # -- the encoder
    width: int = 768
    """D, the size of a token."""
    depth: int = 12
    """L, the number of encoder blocks."""
    num_heads: int = 12
    """h, the number of attention heads."""
    head_dim: int | None = None
    """d, the size of a head; None means width / num_heads. Read it as `config.key_dim`."""
    mlp_dim: int = 3072
    """Hidden size of the MLP."""
    block_norm: str = "pre"
    """"pre": z + f(LN(z)), as in the paper; "post": LN(z + f(z))."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether each head's queries and keys pass a LayerNorm."""
    gelu: str = "exact"
    """"exact" (erf) or "tanh" (its approximation)."""
    norm_epsilon: float = 1e-6
    """Epsilon of every LayerNorm."""
    layer_scale: float | None = None
    """Initial value of LayerScale on both branches of a block; None means no LayerScale."""

    # -- the tokens
    class_token: bool = True
    """Whether a learned class token stands in front of the patches."""
    num_registers: int = 0
    """Learned register tokens between the class token and the patches."""
    patch_norm: bool = False
    """Whether a LayerNorm stands before and after the patch projection (vit-pytorch)."""
    position_embedding: str = "learned"
    """"learned" (one row a position), "learned_2d" (rows + columns), "sincos_2d" or "none"."""
    position_class_row: bool = True
    """Whether a learned table has a row for the class token; without a class token it has none."""
    interpolation: str = "google"
    """How `resized` takes the table to another grid: a name in `keras_vit.resample.PRESETS`."""

    # -- the output
    pooling: str | None = "token"
    """"token", "mean" (of the patch tokens), "mean_all" (of all tokens) or None (no pooling)."""
    final_norm: str = "before_pooling"
    """Where the last LayerNorm stands: "before_pooling", "after_pooling" or "none"."""
    representation_size: int | None = None
    """Size of the paper's Dense + tanh before the head; None means none."""
    num_classes: int = 1000
    """Classes of the head; 0 means no head: the model returns its features."""
    labels: Any = None
    """Names of the classes, `num_classes` of them, or None."""
    head_init: str = "zeros"
    """"zeros" (the paper's, for fine-tuning) or "truncated_normal" (0.02)."""
    head_bias: float = 0.0
    """Constant the head's bias starts from, such as -6.9 for a sigmoid loss over 1,000 classes."""
    classifier_activation: str | None = None
    """Activation on the logits, "softmax" for one; None returns logits."""

    # -- regularization, all rates in [0, 1)
    dropout: float = 0.0
    """Dropout after the positions, after attention and after each Dense of an MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth of the last block; rises linearly from 0 in the first one."""
    patch_dropout: float = 0.0
    """Share of the patch tokens that are left out in training."""

    # -- the pixel contract: from a picture to what the model was trained on
    resize_method: str = "bilinear"
    """"nearest", "bilinear", "bicubic" or "lanczos", with antialiasing."""
    crop_fraction: float | None = None
    """None squashes the picture to `image_size`; r resizes it to cover `image_size` / r, then
    cuts out the center."""
    pixel_mean: Any = 0.5
    """Subtracted from pixels in [0, 1]; one value, or one a channel."""
    pixel_std: Any = 0.5
    """Divides after the mean; one value, or one a channel."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size"):
            object.__setattr__(self, name, _pair(name, getattr(self, name)))
        for name in ("pixel_mean", "pixel_std", "labels"):  # a .keras file brings tuples as lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_types()
        self._check_encoder()
        self._check_tokens()
        self._check_output()
        self._check_pixels()

    # -- what follows from the fields

    @property
    def key_dim(self) -> int:
        """d, the size of one attention head."""
        return self.head_dim or self.width // self.num_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return (
            self.image_size[0] // self.patch_size[0],
            self.image_size[1] // self.patch_size[1],
        )

    @property
    def num_patches(self) -> int:
        """N, the number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token and registers."""
        return int(self.class_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """T, the length of the sequence."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def class_row(self) -> bool:
        """Whether the position table really has a row for the class token."""
        learned = self.position_embedding in ("learned", "learned_2d")
        return self.class_token and self.position_class_row and learned

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
        """The reverse of `to_dict`. An unknown field is an error that names the nearest ones."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known) or known
                raise ValueError(
                    f"A ViTConfig field must be one of its own: did you mean {', '.join(near)}? "
                    f"Received: {name[:200]}={_short(fields[name])}"
                )
        return cls(**fields)

    # -- the rules

    def _check_types(self) -> None:
        for name in ("in_channels", "width", "depth", "num_heads", "mlp_dim"):
            _require(_is_int(v := getattr(self, name)) and v > 0, name, "be a positive int", v)
            _at_most(MAX_DEPTH if name == "depth" else MAX_SIZE, name, v)
        for name in ("num_classes", "num_registers"):
            _require(_is_int(v := getattr(self, name)) and v >= 0, name, "be an int >= 0", v)
            _at_most(MAX_CLASSES if name == "num_classes" else MAX_SIZE, name, v)
        for name in ("head_dim", "representation_size"):
            v = getattr(self, name)
            _require(v is None or (_is_int(v) and v > 0), name, "be None or a positive int", v)
            _at_most(MAX_SIZE, name, v or 0)
        for name in ("qkv_bias", "qk_norm", "class_token", "patch_norm", "position_class_row"):
            v = getattr(self, name)
            _require(isinstance(v, bool), name, "be True or False", v)
        for name in ("dropout", "attention_dropout", "drop_path", "patch_dropout"):
            v = getattr(self, name)
            _require(_is_number(v) and 0 <= v < 1, name, "be a rate in [0, 1)", v)
        for name, allowed in (
            ("block_norm", BLOCK_NORMS),
            ("gelu", GELUS),
            ("position_embedding", POSITION_EMBEDDINGS),
            ("interpolation", tuple(PRESETS)),
            ("pooling", POOLINGS),
            ("final_norm", FINAL_NORMS),
            ("head_init", HEAD_INITS),
            ("resize_method", RESIZE_METHODS),
        ):
            v = getattr(self, name)
            _require(
                any(v is a or (isinstance(v, str) and v == a) for a in allowed),
                name,
                "be one of " + ", ".join(map(repr, allowed)),
                v,
            )

    def _check_encoder(self) -> None:
        _require(
            self.head_dim is not None or self.width % self.num_heads == 0,
            "num_heads",
            f"divide width={self.width} unless head_dim is given",
            self.num_heads,
        )
        v = self.norm_epsilon
        _require(_is_number(v) and v > 0, "norm_epsilon", "be a positive number", v)
        v = self.layer_scale
        _require(
            v is None or (_is_number(v) and v > 0),
            "layer_scale",
            "be None or a positive number",
            v,
        )

    def _check_tokens(self) -> None:
        _require(
            all(s % p == 0 for s, p in zip(self.image_size, self.patch_size, strict=True)),
            "image_size",
            f"be a multiple of patch_size={self.patch_size} in height and width",
            self.image_size,
        )
        patches = self.num_patches
        _require(
            patches <= MAX_PATCHES,
            "image_size",
            f"have at most {MAX_PATCHES} patches of patch_size={self.patch_size}",
            self.image_size,
        )
        _require(
            self.position_embedding != "sincos_2d" or patches * self.width <= MAX_FIXED_TABLE,
            "image_size",
            f"have at most {MAX_FIXED_TABLE} / width={self.width} patches for "
            "position_embedding='sincos_2d'",
            self.image_size,
        )
        for kind, divisor in (("learned_2d", 2), ("sincos_2d", 4)):
            _require(
                self.position_embedding != kind or self.width % divisor == 0,
                "width",
                f"be a multiple of {divisor} for position_embedding={kind!r}",
                self.width,
            )

    def _check_output(self) -> None:
        _require(
            self.pooling != "token" or self.class_token,
            "pooling",
            "be 'mean', 'mean_all' or None where class_token=False",
            self.pooling,
        )
        v = self.labels
        _require(
            v is None
            or (
                isinstance(v, tuple)
                and len(v) == self.num_classes
                and all(isinstance(x, str) for x in v)
            ),
            "labels",
            f"be None or a sequence of num_classes={self.num_classes} strings",
            v if v is None or not isinstance(v, tuple) or len(v) < 9 else f"{len(v)} items",
        )
        _require(_is_number(self.head_bias), "head_bias", "be a number", self.head_bias)
        v = self.classifier_activation
        _require(
            v is None or isinstance(v, str),
            "classifier_activation",
            "be None or the name of a Keras activation",
            v,
        )

    def _check_pixels(self) -> None:
        v = self.crop_fraction
        _require(
            v is None or (_is_number(v) and 0 < v <= 1),
            "crop_fraction",
            "be None or a number in (0, 1]",
            v,
        )
        for name in ("pixel_mean", "pixel_std"):
            v = getattr(self, name)
            values = v if isinstance(v, tuple) else (v,)
            _require(
                all(map(_is_number, values))
                and (not isinstance(v, tuple) or len(v) == self.in_channels),
                name,
                f"be a number, or one a channel (in_channels={self.in_channels})",
                v,
            )
            _require(
                name == "pixel_mean" or all(x > 0 for x in values), name, "be greater than 0", v
            )


def _require(condition: bool, name: str, rule: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{name} must {rule}. Received: {name}={_short(value)}")


def _at_most(ceiling: int, name: str, value: int) -> None:
    _require(value <= ceiling, name, f"be at most {ceiling}", value)


def _short(value: Any) -> str:
    """A value for an error; cut, because a file may state one of any length and depth."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 12
    return short.repr(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _pair(name: str, value: Any) -> tuple[int, int]:
    pair = (value, value) if _is_int(value) else value
    _require(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(_is_int(v) and v > 0 for v in pair),
        name,
        "be a positive int or a (height, width) pair of them",
        value,
    )
    _at_most(MAX_SIZE, name, max(pair))
    return (pair[0], pair[1])

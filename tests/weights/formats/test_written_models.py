"""Whatever `save_pretrained` writes, we and its own library compute the same from it.

Every kind of model, and every field of a `ViTConfig` changed by itself, is written in every format.
A format refuses the model, or the file is the model.
"""

import dataclasses

import numpy as np
import pytest
import weights_sources as sources
import written_models
from conformance import CONFIGS, TINY, images, randomize, run

import keras_vit
from keras_vit import ViT, ViTConfig
from keras_vit.config_rules import CHOICES
from keras_vit.weights.files.arrays import open_arrays
from keras_vit.weights.formats import FORMATS, WRITABLE
from keras_vit.weights.load import inspect

pytestmark = pytest.mark.backend_free

PLAIN = TINY.replace(depth=1)
MEAN = {"class_token": False, "pooling": "mean"}
MAP = {"class_token": False, "pooling": "map"}
PAIR = {"distillation_token": True, "pooling": "token_pair"}
FLAX = {"gelu": "tanh"}
LUCID = {"qkv_bias": False, "norm_epsilon": 1e-5, "patch_norm": True}
SIGLIP = {"image_size": 24, "gelu": "tanh"}
TIMM_STEM = {"stem": "resnet", "stem_epsilon": 1e-5, "stem_standardization": "variance"}
CLIP = {"embedding_norm": True, "patch_bias": False, "norm_epsilon": 1e-5, "gelu": "quick"}
BASES = {
    "timm": {},
    "timm mean": {**MEAN, "final_norm": "after_pooling"},
    "timm clip": CLIP,
    "timm gated": {"mlp": "swiglu", "layer_scale": 0.3},
    "timm res_post": {"block_norm": "res_post", "qkv_bias": False},
    "timm distilled": PAIR,
    "timm registers": {"num_registers": 2, "position_class_row": False},
    "timm map": MAP,
    "timm stem": TIMM_STEM,
    "beit": {"position_embedding": "relative_bias", "key_bias": False, "layer_scale": 0.3},
    "huggingface": {},
    "huggingface distilled": PAIR,
    "huggingface pooler": {"num_classes": 0, "representation_size": 20},
    "huggingface_clip": {**MEAN, **SIGLIP},
    "huggingface_clip map": {**MAP, **SIGLIP, "num_classes": 0},
    "huggingface_dinov3": {"position_embedding": "rope", "num_classes": 0, "layer_scale": 0.3},
    "google": FLAX,
    "google stem": {**FLAX, "stem": "resnet", "stem_depths": (1, 1), "stem_width": 32},
    "big_vision": {**FLAX, "position_class_row": False},
    "big_vision map": {**FLAX, **MAP},
    "torchvision": {"image_size": 24},
    "vit_pytorch": LUCID,
    "vit_pytorch mean": {**LUCID, **MEAN},
}
"""Models that a format can express: its name first, and fields of `PLAIN`."""
QUICK = ("timm", "huggingface", "google", "torchvision")
FEW_AND_SLOW = [
    pytest.param(base, marks=[] if base in QUICK else [pytest.mark.slow]) for base in BASES
]

ROPE = {
    "rope_base": 7.0,
    "rope_coordinates": "index",
    "rope_order": "columns_first",
    "rope_pairs": "neighbors",
    "rope_offset": 0.5,
    "rope_grid": (2, 4),
}
STEM = {"stem_width": 96, "stem_epsilon": 1e-2, "stem_standardization": "variance"}
POOLING = {"pooling_heads": 4, "pooling_mlp_dim": 24}
PIXELS = {
    "pixel_mean": 0.25,
    "pixel_std": (0.1, 0.2, 0.3),
    "resize_method": "lanczos",
    "crop_fraction": 0.5,
    "labels": ("a", "b", "c"),
}
TRAINING = {
    "interpolation": "timm",
    "head_init": "truncated_normal",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "drop_path": 0.1,
    "patch_dropout": 0.1,
    "rope_rescale": 2.0,
    "token_merging_schedule": "decreasing",  # merges nothing by itself
}
CHANGES = {
    "image_size": [(40, 16), (24, 48), (16, 64)],
    "patch_size": [(8, 4)],
    "ignore_remainder": [{"ignore_remainder": True, "image_size": (27, 21)}],
    "in_channels": [1],
    "stem": ["resnet", "conv"],
    "stem_depths": [(2, 1)],
    **{name: [value] for name, value in (STEM | ROPE | POOLING).items()},
    "width": [40],
    "depth": [2],
    "num_heads": [2],
    "head_dim": [8],
    "mlp_dim": [33],
    "mlp": ["swiglu", "mlp"],
    "mlp_inner_norm": [True],
    "block_norm": ["post", "res_post", "pre"],
    "norm": ["rms"],
    "qkv_bias": [True, False],
    "key_bias": [True, False],
    "dense_bias": [False],
    "qk_norm": [True],
    "score_scale": ["learned"],
    "score_diagonal": [False],
    "attention_inner_norm": [True],
    "gelu": ["exact", "tanh", "quick"],
    "norm_epsilon": [1e-6, 1e-5, 1e-12, 1e-2],
    "layer_scale": [0.2, None],
    "class_token": [False, MEAN],
    "distillation_token": [True, PAIR],
    "num_registers": [2],
    "patch_bias": [False],
    "patch_shift": [True],
    "patch_norm": [True, "before", "after", False],
    "position_embedding": list(CHOICES["position_embedding"]),
    "position_class_row": [True, False],
    "embedding_norm": [True],
    "relative_mlp_dim": [{"relative_mlp_dim": 7, "position_embedding": "relative_mlp"}],
    "pooling": list(CHOICES["pooling"]),
    "final_norm": list(CHOICES["final_norm"]),
    "representation_size": [11, None],
    "num_classes": [0, 2],
    "head_bias": [None],
    "classifier_activation": ["softmax"],
    "token_merging": [1],
    **{name: [] for name in PIXELS | TRAINING},  # changed together, below
}
"""Other values of each field, or a value and what it needs beside it."""

BEFORE_THE_BLOCKS = ("patches", "class_token", "distillation", "registers", "position_embedding")


def meaning(config, whole=True):
    """The config without the fields that say nothing about this model once it is trained.

    With `whole`, pixels and labels are compared too.
    """
    plain, same = ViTConfig(), set(TRAINING) | (set() if whole else set(PIXELS))
    if not config.stem:
        same |= set(STEM)
    if "rope" not in config.position_embedding:
        same |= set(ROPE)
    if not config.attention_pooling:
        same |= set(POOLING)
    if config.attention_positions != "relative_mlp":
        same |= {"relative_mlp_dim"}
    if config.position_table != "learned" or not config.class_token:
        same |= {"position_class_row"}
    if config.num_classes == 0 or config.head_bias is not None:
        same |= {"head_bias"}
    if config.mlp == "swiglu":
        same |= {"gelu"}
    if not config.qkv_bias:
        same |= {"key_bias"}
    fields = config.to_dict() | {name: getattr(plain, name) for name in same}
    fields["ignore_remainder"] = config.ignore_remainder and config.image_size != tuple(
        n * p for n, p in zip(config.grid, config.patch_size, strict=True)
    )
    fields["head_dim"] = config.key_dim
    if config.attention_pooling:
        fields["pooling_heads"] = config.pooling_heads or config.num_heads
        fields["pooling_mlp_dim"] = config.pooling_mlp_dim or config.mlp_dim
    if config.layer_scale is not None:
        fields["layer_scale"] = 1.0  # its initial value
    if config.pooling and not config.num_prefix_tokens:  # all tokens are patches
        fields["pooling"] = config.pooling.removesuffix("_all")
    return fields


def differences(found, expected, whole=True):
    """The fields whose meaning differs."""
    found, expected = meaning(found, whole), meaning(expected, whole)
    return {name: value for name, value in found.items() if value != expected[name]}


def random_model(config):
    """A random model in which epsilon matters: what enters the first block is small."""
    model = randomize(ViT(config))
    for weight in model.weights:
        if weight.path.startswith(BEFORE_THE_BLOCKS):
            weight.assign(weight.value * 0.01)
    return model


def is_written(format, config, folder):
    """Whether a format can express a config; if so, checks the file that is written."""
    if list(FORMATS[format].unsupported(config)):
        return False
    model = random_model(config)
    try:
        path = keras_vit.save_pretrained(model, folder / "model", format=format)
    except ValueError as error:
        assert str(error).startswith("format must be one that has arrays for all weights"), error
        return False
    batch = images(config, 2)
    expected = run(model, batch)
    close = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    given = {"image_size": config.image_size} if path.suffix == ".npz" else {}
    again = keras_vit.from_pretrained(path, **given)
    assert differences(again.config, config, whole=path.suffix != ".npz") == {}
    np.testing.assert_allclose(run(again, batch), expected, **close)
    theirs = written_models.logits(format, path, config)(batch)
    np.testing.assert_allclose(theirs, expected, **close)
    check_alone(path, config, folder)
    return True


def check_alone(path, config, folder):
    """Without what we state in the file or beside it, whatever is not shown is assumed visibly."""
    if path.suffix == ".npz":
        return
    with open_arrays(path) as file:
        alone = sources.bare(folder, dict(file), "alone.safetensors")
    given = {"num_heads": config.num_heads, "image_size": config.image_size}
    given |= {"patch_size": config.patch_size} if "to_patch_embedding.2.weight" in file else {}
    try:
        found = inspect(alone, **given)
    except ValueError:
        return  # refused
    if found.missing or found.extra or found.misshaped:
        return
    silent = differences(found.config, config, whole=False).keys() - found.assumed.keys()
    if config.pooling is None:  # the shape of the output shows it
        silent -= {"pooling"}
    if config.grid[0] != config.grid[1]:  # by a rule of ours, a square is preferred
        silent -= {"position_class_row"}
    assert silent == set(), (silent, found.config)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_is_refused_or_written_whole(tmp_path, kind):
    config = CONFIGS[kind]
    written = [f for f in WRITABLE if is_written(f, config, tmp_path / f)]
    if kind == "paper":
        assert written == ["huggingface", "timm"]


@pytest.mark.parametrize("base", FEW_AND_SLOW)
def test_every_field_is_refused_or_written_whole(tmp_path, base):
    format, config = base.split()[0], PLAIN.replace(**BASES[base])
    assert is_written(format, config, tmp_path / "base")
    seen, wrong = [config], []
    for field, values in CHANGES.items():
        for number, value in enumerate(values):
            try:
                changed = config.replace(**(value if isinstance(value, dict) else {field: value}))
            except ValueError:  # no such model
                continue
            if changed in seen or not differences(changed, config):
                continue
            seen.append(changed)
            try:
                is_written(format, changed, tmp_path / f"{field}_{number}")
            except Exception as error:
                wrong.append(f"{field}={value!r}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("base", BASES)
def test_fields_without_a_meaning_do_no_harm(tmp_path, base):
    """Fields of parts that a model does not have, of training, and of pixels, all at once."""
    format, config = base.split()[0], PLAIN.replace(**BASES[base])
    idle = {name: value for name, value in (PIXELS | TRAINING).items() if name != "patch_dropout"}
    idle |= {} if config.stem else STEM
    idle |= {} if "rope" in config.position_embedding else {**ROPE, "relative_mlp_dim": 7}
    idle |= {} if config.attention_pooling else POOLING
    if config.num_classes == 0:
        idle["labels"] = None
    assert is_written(format, config.replace(**idle), tmp_path)


def test_every_field_has_other_values():
    """A new field of `ViTConfig` belongs into `CHANGES`."""
    assert set(CHANGES) == {field.name for field in dataclasses.fields(ViTConfig)}


@pytest.mark.parametrize(
    ("format", "fields"),
    [
        ("timm", {"norm_epsilon": 1e-12}),
        ("timm", {"norm": "rms"}),
        ("timm", {"patch_norm": "after"}),
        ("timm", {"score_diagonal": False}),
        ("huggingface", {"block_norm": "res_post"}),
        ("google", {"gelu": "quick"}),
        ("torchvision", {"image_size": 24, "norm_epsilon": 1e-5}),
    ],
)
def test_a_missing_limit_is_noticed(tmp_path, monkeypatch, format, fields):
    """Negative control: what a format would write if it did not refuse these fields."""
    writable = {k: v for k, v in FORMATS[format].writable.items() if k not in fields}
    careless = dataclasses.replace(FORMATS[format], writable=writable)
    monkeypatch.setitem(FORMATS, format, careless)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        is_written(format, PLAIN.replace(**fields), tmp_path)

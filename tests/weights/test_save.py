"""save_pretrained: unsupported models are refused, and nothing is left behind."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from weights_sources import TINY, random_vit

import keras_vit
from keras_vit.weights.formats import WRITABLE
from keras_vit.weights.json_rules import METADATA

STEM = {"stem": "resnet"}
TIMM_STEM = {"stem_epsilon": 1e-5, "stem_standardization": "variance"}
CANNOT = [
    ("torchvision", {"num_registers": 2}, "num_registers must be 0, it is 2"),
    ("torchvision", {"image_size": (24, 16)}, "image_size must be a square"),
    ("torchvision", {"gelu": "tanh"}, "gelu must be 'exact'"),
    ("torchvision", {"in_channels": 1}, "in_channels must be 3"),
    ("google", {}, "gelu must be 'tanh', it is 'exact'"),
    ("google", {"gelu": "tanh", "layer_scale": 0.1}, "layer_scale must be None"),
    ("google", {"gelu": "tanh", "image_size": (16, 64)}, "would be read as a square"),
    ("google", {"gelu": "tanh", "position_class_row": False}, "position_class_row must be True"),
    ("big_vision", {"gelu": "tanh"}, "position_class_row must be False"),
    ("huggingface", {"layer_scale": 0.1}, "layer_scale must be None"),
    ("huggingface", {"representation_size": 6}, "representation_size must be None"),
    ("huggingface", {"mlp": "swiglu"}, "mlp must be 'mlp', it is 'swiglu'"),
    ("torchvision", {"mlp": "swiglu"}, "mlp must be 'mlp', it is 'swiglu'"),
    ("vit_pytorch", {"mlp_inner_norm": True}, "mlp_inner_norm must be False"),
    ("google", {"mlp_inner_norm": True}, "mlp_inner_norm must be False"),
    ("huggingface", {"embedding_norm": True}, "embedding_norm must be False"),
    ("torchvision", {"patch_bias": False}, "patch_bias must be True"),
    ("google", {"gelu": "quick"}, "gelu must be 'tanh'"),
    ("timm", {"embedding_norm": True}, "patch_bias must be the opposite of embedding_norm=True"),
    ("timm", {"mlp": "swiglu", "norm_epsilon": 1e-5}, "norm_epsilon must be 1e-06 for mlp="),
    ("huggingface", {"attention_inner_norm": True}, "attention_inner_norm must be False"),
    ("huggingface", {"block_norm": "res_post"}, "block_norm must be 'pre'"),
    ("timm", {"mlp": "swiglu", "block_norm": "res_post"}, "block_norm must be 'pre' for mlp="),
    ("timm", {"norm": "rms"}, "norm must be 'layer', it is 'rms'"),
    ("google", {"norm": "rms"}, "norm must be 'layer', it is 'rms'"),
    ("torchvision", {"dense_bias": False}, "dense_bias must be True"),
    ("vit_pytorch", {"patch_norm": "after"}, "patch_norm must be True, it is 'after'"),
    ("timm", {"patch_norm": "after"}, "patch_norm must be False, it is 'after'"),
    ("vit_pytorch", {"patch_norm": "before"}, "patch_norm must be True, it is 'before'"),
    *(
        (format, {field: value}, f"{field} must be {plain!r}, it is {value!r}")
        for format in ("big_vision", "google", "huggingface", "timm", "torchvision", "vit_pytorch")
        for field, plain, value in (
            ("patch_shift", False, True),
            ("score_scale", "fixed", "learned"),
            ("score_diagonal", True, False),
        )
    ),
    ("timm", {"norm_epsilon": 1e-12}, "norm_epsilon must be 1e-06"),
    ("timm", {"representation_size": 6}, "representation_size must be None"),
    ("timm", {"num_registers": 2}, "position_class_row must be False if there are registers"),
    ("timm", {"head_dim": 3}, "head_dim must be width / num_heads"),
    ("timm", {"block_norm": "post"}, "block_norm must be 'pre'"),
    ("timm", {"position_embedding": "learned_2d"}, "position_embedding must be"),
    ("google", STEM | {"gelu": "tanh", "stem_epsilon": 1e-5}, "stem_standardization must be 'dev"),
    ("timm", STEM, "stem_standardization must be 'variance' and stem_epsilon 1e-05"),
    ("timm", STEM | TIMM_STEM | {"stem_width": 32}, "stem_width must be 64 and stem_depths one"),
    ("timm", STEM | TIMM_STEM | {"stem_depths": (1,)}, r"stem_depths one of \(\), \(2, 2, 2, 2\)"),
    ("big_vision", STEM | {"gelu": "tanh"}, "stem must be None, it is 'resnet'"),
    ("huggingface", STEM, "stem must be None"),
    ("torchvision", STEM, "stem must be None"),
    ("vit_pytorch", STEM, "stem must be None"),
    ("vit_pytorch", {}, "qkv_bias must be False"),
    (
        "timm",
        {"mlp": "swiglu", "class_token": False, "pooling": "map"},
        "mlp must be 'mlp' for pooling='map'",
    ),
    (
        "timm",
        {"distillation_token": True, "pooling": "token_pair", "num_classes": 0},
        "num_classes must be greater than 0 with a distillation token",
    ),
    (
        "big_vision",
        {"gelu": "tanh", "position_class_row": False, "image_size": (40, 16)},
        "read as a square and a class token",
    ),
    (
        "huggingface_clip",
        {"class_token": False, "pooling": "mean", "head_bias": None},
        "head_bias must be a number",
    ),
]


@pytest.mark.backend_free
@pytest.mark.parametrize(("format", "fields", "message"), CANNOT)
def test_save_says_what_a_format_cannot_express(tmp_path, format, fields, message):
    with pytest.raises(ValueError, match=message):
        keras_vit.save_pretrained(random_vit(**fields), tmp_path / "out", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
def test_save_rejects_unknown_formats_and_models(tmp_path):
    with pytest.raises(ValueError, match="format must be one of 'google'.*Received: format='flax'"):
        keras_vit.save_pretrained(random_vit(), tmp_path / "out", format="flax")
    with pytest.raises(ValueError, match="model must be a ViT"):
        keras_vit.save_pretrained(object(), tmp_path / "out")
    with pytest.raises(ValueError, match="path must end in '.safetensors'"):
        keras_vit.save_pretrained(random_vit(), tmp_path / "out.npz", format="torchvision")
    assert "timm" in WRITABLE and "dinov2" not in WRITABLE


@pytest.mark.backend_free
def test_save_as_one_file_states_the_config_that_a_folder_has_beside_it(tmp_path):
    model = random_vit()
    file = keras_vit.save_pretrained(model, tmp_path / "one.safetensors")
    folder = keras_vit.save_pretrained(model, tmp_path / "folder")
    assert (file, folder) == (tmp_path / "one.safetensors", tmp_path / "folder")
    alone, beside = (safe_open(path, "np") for path in (file, folder / "model.safetensors"))
    assert beside.metadata() == {"format": "pt"} and alone.metadata()["format"] == "pt"
    stated = json.loads(alone.metadata()[METADATA])
    assert stated == json.loads(json.dumps(model.config.to_dict()))
    assert set(alone.keys()) == set(beside.keys()) and len(alone.keys()) > 10
    assert keras_vit.from_pretrained(file).config == model.config


def test_save_refuses_lora(tmp_path):
    model = random_vit()
    model.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA"):
        keras_vit.save_pretrained(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
@pytest.mark.parametrize("format", ["timm", "torchvision"])
def test_save_leaves_the_old_whole_when_it_fails(tmp_path, format, monkeypatch):
    from keras_vit.weights import save

    first = keras_vit.save_pretrained(random_vit(), tmp_path / "out", format=format)
    file = first / "model.safetensors" if format == "timm" else first
    before = file.read_bytes()
    calls = []

    def fail(self, path):
        calls.append(path)
        if len(calls) > 20:
            raise OSError("disk full")
        return np.zeros(self._weights[path].shape, "float32")

    monkeypatch.setattr(save._Table, "_value", fail)
    with pytest.raises(OSError, match="disk full"):
        keras_vit.save_pretrained(random_vit(), tmp_path / "out", format=format)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [first]


def test_save_low_precision_models_as_float32(tmp_path):
    from safetensors.numpy import load_file

    config = keras_vit.ViTConfig.from_dict(TINY)
    model = keras_vit.ViT(config, dtype="bfloat16")
    folder = keras_vit.save_pretrained(model, tmp_path / "out")
    assert {a.dtype.name for a in load_file(folder / "model.safetensors").values()} == {"float32"}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("format", "fields"),
    [
        ("timm", {}),
        ("huggingface", {}),
        ("torchvision", {}),
        ("google", {"gelu": "tanh"}),
        ("big_vision", {"gelu": "tanh", "position_class_row": False}),
    ],
)
def test_save_refuses_a_head_without_bias(tmp_path, format, fields):
    """No format here has one, and none may lose or invent an array."""
    model = random_vit(**fields, head_bias=None)
    with pytest.raises(ValueError, match="arrays for all weights.*differs in head/bias"):
        keras_vit.save_pretrained(model, tmp_path / "out", format=format)
    assert not list(tmp_path.iterdir())

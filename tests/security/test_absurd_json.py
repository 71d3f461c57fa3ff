"""Absurd values in the JSON of timm and transformers: the error names the file and the field."""

import json
import shutil

import numpy as np
import pytest
from conformance import KINDS, TINY
from safetensors.numpy import save_file

import keras_vit
from keras_vit import ViT

NAN, INF = float("nan"), float("inf")
TIMM = [
    ({"model_args": {"num_heads": "5"}}, "model_args.num_heads"),
    ({"model_args": {"num_heads": 2**40}}, "model_args.num_heads"),
    ({"model_args": {"num_heads": 0}}, "model_args.num_heads"),
    ({"model_args": {"img_size": {"a": 1}}}, "model_args.img_size"),
    ({"model_args": {"img_size": [10**9, 8]}}, "model_args.img_size"),
    ({"model_args": {"init_values": INF}}, "model_args.init_values"),
    ({"model_args": {"use_rot_pos_emb": "no"}}, "model_args.use_rot_pos_emb"),
    ({"model_args": {"rope_grid_offset": NAN}}, "model_args.rope_grid_offset"),
    ({"model_args": {"ref_feat_shape": [10**9, 8]}}, "model_args.ref_feat_shape"),
    ({"model_args": [1]}, "model_args"),
    ({"architecture": ["vit"]}, "architecture"),
    ({"pretrained_cfg": "x"}, "pretrained_cfg"),
    ({"pretrained_cfg": {"input_size": {"a": 1}}}, "pretrained_cfg.input_size"),
    ({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}, "pretrained_cfg.input_size"),
    ({"pretrained_cfg": {"mean": 0.5}}, "pretrained_cfg.mean"),
    ({"pretrained_cfg": {"std": [NAN, 1, 1]}}, "pretrained_cfg.std"),
    ({"pretrained_cfg": {"crop_pct": "1"}}, "pretrained_cfg.crop_pct"),
    ({"crop_pct": 10**400}, "crop_pct"),
    ({"pretrained_cfg": {"interpolation": ["bicubic"]}}, "pretrained_cfg.interpolation"),
    ({"model_args": {"pos_embed": {}}}, "model_args.pos_embed"),
    ({"architecture": None}, "architecture"),
]
HUGGINGFACE = [
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": 2**31}, "num_attention_heads"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"image_size": ["24", "16"]}, "image_size"),
    ({"image_size": 10**9}, "image_size"),
    ({"image_size": {"height": 24}}, "image_size"),
    ({"layer_norm_eps": None}, "layer_norm_eps"),
    ({"layer_norm_eps": NAN}, "layer_norm_eps"),
    ({"layer_norm_eps": [1]}, "layer_norm_eps"),
    ({"layerscale_value": INF}, "layerscale_value"),
    ({"hidden_act": ["gelu"]}, "hidden_act"),
    ({"model_type": ["vit"]}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"id2label": {"0": ["a"], "1": "b", "2": "c"}}, "id2label"),
    ({"id2label": ["a", "b", "c"]}, "id2label"),
]
PIXELS = [
    ({"image_mean": 0.5}, "image_mean"),
    ({"image_mean": ["a", 0, 0]}, "image_mean"),
    ({"image_std": [1e300, 1, 1]}, "image_std"),
    ({"resample": [3]}, "resample"),
    ({"size": {"height": "24"}}, "size"),
    ({"do_normalize": "no"}, "do_normalize"),
]
NESTED = [
    *(({"image_processor": change}, f"image_processor.{field}") for change, field in PIXELS),
    ({"image_processor": "CLIPImageProcessor"}, "image_processor"),
]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    timm = TINY.replace(interpolation="timm")
    keras_vit.save_pretrained(ViT(timm), folder / "timm", format="timm")
    keras_vit.save_pretrained(ViT(TINY), folder / "huggingface", format="huggingface")
    return folder


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("library", "file", "changes", "field"),
    [
        *(("timm", "config.json", *case) for case in TIMM),
        *(("huggingface", "config.json", *case) for case in HUGGINGFACE),
        *(("huggingface", "preprocessor_config.json", *case) for case in PIXELS),
        *(("huggingface", "processor_config.json", *case) for case in NESTED),
    ],
)
def test_json_of_other_libraries_is_checked(
    foreign, tmp_path, refused, library, file, changes, field
):
    folder = shutil.copytree(foreign / library, tmp_path / library)
    assert keras_vit.from_pretrained(folder).config.width == 20
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    for name, value in changes.items():
        inside = isinstance(value, dict) and isinstance(content.get(name), dict)
        content[name] = {**content[name], **value} if inside else value
    (folder / file).write_text(json.dumps(content))
    refused(f"^path must state {field} as .*{file}', {field}=", keras_vit.from_pretrained, folder)


@pytest.mark.backend_free
def test_unknown_arrays_are_refused_before_their_json_is_read(foreign, tmp_path, refused):
    """`recognize` reads the architecture of any config.json."""
    folder = shutil.copytree(foreign / "timm", tmp_path / "timm")
    save_file({"x": np.zeros(3, "float32")}, folder / "model.safetensors")
    for content in ({"architecture": [1], "model_args": [1]}, {"model_type": {}}, {}):
        (folder / "config.json").write_text(json.dumps(content))
        refused(r"must (have the names|be one of timm's).*timm", keras_vit.from_pretrained, folder)


@pytest.mark.backend_free
def test_image_size_that_nothing_states_is_refused(tmp_path, refused):
    """DINOv3 has no table of positions that shows it."""
    fields = {"num_classes": 0, "width": 24, "num_heads": 3, "head_dim": None, "key_bias": False}
    config = KINDS["rope"].replace(**fields, image_size=16)
    keras_vit.save_pretrained(ViT(config), tmp_path / "dinov3", "huggingface_dinov3")
    assert keras_vit.from_pretrained(tmp_path / "dinov3").config.image_size == (16, 16)
    content = json.loads((tmp_path / "dinov3" / "config.json").read_text())
    (tmp_path / "dinov3" / "config.json").write_text(json.dumps({**content, "image_size": None}))
    refused("image_size must be stated", keras_vit.from_pretrained, tmp_path / "dinov3")

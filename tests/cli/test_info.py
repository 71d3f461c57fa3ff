"""`keras-vit info` of a checkpoint. tests/train/run/test_run_status.py tests it on run folders."""

import json
import shutil

import numpy as np
import pytest
from conformance import tiny_model
from safetensors.numpy import load_file, save_file

import keras_vit
from keras_vit_cli import info

pytestmark = pytest.mark.backend_free


def test_info_describes_a_checkpoint(call, checkpoint):
    code, out, _ = call("info", checkpoint)
    assert code == 0
    said = {line[:12].strip(): line[12:].strip() for line in out.splitlines() if line[:1] != " "}
    assert said["format"] == "timm"
    assert said["read"] == "32 of 32 arrays"
    assert said["model"].startswith("24 x 16 x 3, patch 8, width 20")
    assert said["pixels"] == "bilinear to 24 x 16; (pixel / 255 - 0.5) / 0.5"


def test_info_refuses_absurd_numbers(call, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["model_args"]["num_heads"] = 2**40
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    code, out, err = call("info", tmp_path)
    assert (code, out) == (1, "") and "model_args.num_heads=1099511627776" in err


def test_info_lists_assumptions(call, tmp_path):
    model = tiny_model(image_size=24, width=64, num_heads=1)
    ours = keras_vit.save_pretrained(model, tmp_path / "a.safetensors", format="timm")
    code, out, _ = call("info", ours)
    assert code == 0 and "assumed" not in out  # a file of ours states its config
    save_file(load_file(ours), tmp_path / "b.safetensors")
    code, out, _ = call("info", tmp_path / "b.safetensors", "--json")
    assert code == 0 and json.loads(out)["assumed"]["gelu"] == "exact"


def test_info_json_has_the_config(call, model, checkpoint):
    code, out, _ = call("info", checkpoint, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["loadable"] and facts["known"] is None
    assert facts["parameters"] == model.count_params()
    assert keras_vit.ViTConfig.from_dict(facts["config"]) == model.config.replace(
        interpolation="timm"
    )


def test_info_of_an_incomplete_file_lists_what_is_missing(call, checkpoint, tmp_path):
    arrays = load_file(checkpoint / "model.safetensors")
    del arrays["norm.bias"]
    arrays["stray"] = np.ones(3, "float32")
    shutil.copy(checkpoint / "config.json", tmp_path)
    save_file(arrays, tmp_path / "model.safetensors")
    code, out, _ = call("info", tmp_path, "--json")
    facts = json.loads(out)
    assert code == 0 and not facts["loadable"]
    assert facts["missing"] == ["norm.bias"] and facts["extra"] == ["stray"]


def test_info_of_a_keras_file(call, model, tmp_path):
    model.save(tmp_path / "a.keras")
    code, out, _ = call("info", tmp_path / "a.keras", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["format"] == "keras"
    assert keras_vit.ViTConfig.from_dict(facts["config"]) == model.config


@pytest.mark.parametrize(
    ("kind", "positions", "numerics"),
    [
        ("paper", "learned, resampled as google does", "LayerNorm epsilon 1e-06, exact GELU"),
        ("rope", "rope, computed for any resolution", "LayerNorm epsilon 1e-05, exact GELU"),
        ("learned_rope", "learned+rope, resampled as google does", None),
        ("relative_bias", "relative_bias, resampled as google does", None),
        ("relative_mlp", "relative_mlp, computed for any resolution", None),
        ("no_positions", "none", None),
        ("swiglu", None, "LayerNorm epsilon 1e-06, SiLU"),
        ("rms", None, "RMSNorm epsilon 1e-06, SiLU"),
    ],
)
def test_info_says_what_positions_and_numerics_are(call, tmp_path, kind, positions, numerics):
    path = tmp_path / "a.keras"
    tiny_model(kind).save(path)
    code, out, _ = call("info", path)
    said = {line[:12].strip(): line[12:].strip() for line in out.splitlines()}
    assert code == 0
    assert positions in (None, said["positions"])
    assert numerics in (None, said["numerics"])


def test_info_describes_resizing_and_cropping():
    config = keras_vit.ViTConfig(image_size=224, crop_fraction=0.875, resize_method="bicubic")
    said = info.pixels(config)
    assert said.startswith("bicubic to cover 256 x 256, the center of 224 x 224; ")

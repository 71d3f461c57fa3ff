"""`keras-vit convert`: round trips, and what it refuses."""

import keras
import numpy as np
import pytest
from conformance import images, run

import keras_vit
from keras_vit.weights.formats import WRITABLE
from keras_vit_cli import convert

pytestmark = pytest.mark.backend_free


def logits(model):
    return run(model, images(model.config))


@pytest.mark.parametrize("to", ["timm", "huggingface", "keras"])
def test_convert_round_trip(call, model, checkpoint, tmp_path, to):
    target = tmp_path / ("a.keras" if to == "keras" else "a")
    code, out, err = call("convert", checkpoint, target, "--format", to)
    assert (code, err) == (0, "")
    code, back, _ = call("convert", out.strip(), tmp_path / "b.keras", "--format", "keras")
    assert code == 0
    loaded = keras.saving.load_model(back.strip())
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-5)
    assert np.abs(logits(loaded) - logits(model)[::-1]).max() > 0.1


def test_convert_with_another_size_and_head(call, checkpoint, tmp_path):
    arguments = ("--num-classes", 7, "--image-size", "32x24")
    code, out, err = call(
        "convert", checkpoint, tmp_path / "a", "--format", "timm", *arguments, "-v"
    )
    assert code == 0
    assert "new" in err and "resampled" in err  # the log
    config = keras_vit.from_pretrained(out.strip()).config
    assert (config.num_classes, config.image_size) == (7, (32, 24))


def test_convert_does_not_overwrite(call, checkpoint, tmp_path):
    for name, to in (("a", "timm"), ("b", "torchvision")):  # a checkpoint, and b.safetensors
        arguments = ("convert", checkpoint, tmp_path / name, "--format", to, "--image-size", 24)
        assert call(*arguments)[0] == 0
        code, _, err = call(*arguments)
        assert code == 1 and "target must not exist, or --overwrite" in err
        assert call(*arguments, "--overwrite")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.safetensors"]


def test_convert_writes_nothing_if_it_fails(call, checkpoint, tmp_path):
    code, _, err = call("convert", checkpoint, tmp_path / "a", "--format", "google")
    assert code == 1 and "gelu must be 'tanh'" in err
    assert call("convert", checkpoint, tmp_path / "a.h5", "--format", "keras")[0] == 1
    assert call("convert", tmp_path / "none", tmp_path / "a", "--format", "timm")[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_convert_names_a_file_in_the_path_of_its_target(call, checkpoint, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = call("convert", checkpoint, tmp_path / "file" / "x", "--format", "timm")
    assert code == 1 and f"target must be in a folder, and {tmp_path / 'file'} is a file" in err


@pytest.mark.parametrize("name", ["a", "a.keras"])
def test_convert_writes_no_url(call, checkpoint, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    to = "keras" if name.endswith(".keras") else "timm"
    code, _, err = call("convert", checkpoint, f"gs://bucket/{name}", "--format", to)
    assert code == 1 and "target must be a path on this machine" in err
    assert list(tmp_path.iterdir()) == []


def test_convert_knows_every_format():
    assert {t.value for t in convert.Format} == {*WRITABLE, "keras"}

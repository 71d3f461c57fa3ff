"""KerasHub's presets, compared with KerasHub itself on random weights."""

import json
import shutil

import keras
import numpy as np
import pytest
from conformance import to_numpy

import keras_vit
from keras_vit.weights.files.rules import Refused

keras_hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.backend_free
models = keras_hub.models

VIT = {"image_shape": (24, 16, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2}
VIT |= {"hidden_dim": 12, "mlp_dim": 20, "layer_norm_epsilon": 1e-3}
DEIT = {k: v for k, v in VIT.items() if k != "mlp_dim"} | {"intermediate_dim": 20}
DINO = {"image_shape": (24, 24, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2}
DINO |= {"hidden_dim": 12, "intermediate_dim": 20, "position_embedding_shape": (32, 32, 3)}
GATED = {"use_swiglu_ffn": True, "use_mask_token": False, "num_register_tokens": 2}


def vit(**changes):
    return models.ViTBackbone(**{**VIT, **changes})


def classifier(backbone=None, **changes):
    return models.ViTImageClassifier(backbone or vit(), 5, **changes)


KINDS = {
    "backbone": vit,
    "backbone without a class token": lambda: vit(use_class_token=False, use_patch_bias=False),
    "classifier": classifier,
    "pre-logits": lambda: classifier(intermediate_dim=7),
    "mean and softmax": lambda: classifier(pooling="gap", activation="softmax"),
    "mean without a class token": lambda: classifier(vit(use_class_token=False), pooling="gap"),
    "DeiT": lambda: models.DeiTImageClassifier(models.DeiTBackbone(**DEIT), 5),
    "DINOv2": lambda: models.DINOV2Backbone(**DINO),
    "DINOv2, registers, SwiGLU": lambda: models.DINOV2Backbone(**DINO, **GATED),
}


def saved(kind, folder):
    """A preset with random weights, and its model."""
    model, rng = KINDS[kind](), np.random.default_rng(0)
    for v in model.weights:
        v.assign(("gamma" in v.path) + 0.5 * rng.standard_normal(v.shape))
    if kind.startswith("DINOv2"):  # the table that it reads comes from the other
        embeddings = model.embeddings
        table = embeddings._interpolate_position_embeddings(
            embeddings.position_embeddings, 8, (32, 32), (24, 24)
        )
        embeddings.interpolated_position_embeddings.assign(table)
    model.save_to_preset(str(folder))
    return model


def answer(model, x):
    """What KerasHub returns, eagerly; of DINOv2 it takes a dictionary."""
    inputs = {"images": x} if isinstance(model, models.DINOV2Backbone) else x
    return keras.ops.convert_to_numpy(model(inputs, training=False))


def images(config):
    return np.random.default_rng(1).standard_normal((3, *config.input_shape)).astype("float32")


@pytest.mark.parametrize("kind", KINDS)
def test_preset_gives_what_keras_hub_gives(kind, tmp_path):
    theirs = saved(kind, tmp_path / "preset")
    ours = keras_vit.from_pretrained(tmp_path / "preset")
    x = images(ours.config)
    wanted = answer(theirs, x)
    part = ours if ours.config.num_classes else ours.features("tokens")
    found = keras.ops.convert_to_numpy(part(x))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-6 * np.ptp(wanted)
    assert np.abs(found[::-1] - wanted).max() > 1e-2 * np.ptp(wanted)


def test_weights_of_a_preset_are_the_preset(tmp_path):
    saved("classifier", tmp_path)
    by_folder, by_file = (
        keras_vit.from_pretrained(path) for path in (tmp_path, tmp_path / "model.weights.h5")
    )
    for one, other in zip(by_folder.weights, by_file.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    info = keras_vit.weights.load.inspect(tmp_path)
    assert (info.format, info.config.num_classes, info.config.norm_epsilon) == (
        "keras_hub",
        5,
        1e-3,
    )
    assert info.config == by_file.config
    assert info.assumed == {"pixel_mean": 0.5, "pixel_std": 0.5}  # it has no image_converter.json


def test_dinov2_at_its_size_of_training_takes_that_table(tmp_path):
    saved("DINOv2", tmp_path)
    theirs = models.DINOV2Backbone.from_preset(str(tmp_path), image_shape=(32, 32, 3))
    ours = keras_vit.from_pretrained(tmp_path, image_size=32)
    x = images(ours.config)
    wanted = answer(theirs, x)
    found = keras.ops.convert_to_numpy(ours.features("tokens")(x))
    assert np.abs(found - wanted).max() < 2e-6 * np.ptp(wanted)
    dropped = keras_vit.weights.load.inspect(tmp_path, image_size=32).dropped
    assert set(dropped.values()) == {
        "the mask token of pretraining",
        "the position table of another size",
    }


@pytest.mark.parametrize(
    ("scale", "offset"), [(1 / 127.5, -1.0), ([0.01, 0.02, 0.03], [-2.0, 0.0, 1.0]), (None, None)]
)
def test_pixels_are_those_of_the_image_converter(scale, offset, tmp_path):
    converter = keras_hub.layers.ViTImageConverter(
        image_size=(24, 16), scale=scale, offset=offset, interpolation="bicubic"
    )
    preprocessor = models.ViTImageClassifierPreprocessor(converter)
    classifier(preprocessor=preprocessor).save_to_preset(str(tmp_path))
    config = keras_vit.from_pretrained(tmp_path).config
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 16, 3), "uint8")
    wanted = keras.ops.convert_to_numpy(converter(pixels.astype("float32")))
    found = keras_vit.preprocessing.normalize(pixels, config)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    assert (config.resize_method, config.crop_fraction) == ("bicubic", 1.0)


def test_other_models_are_refused(tmp_path):
    vit(use_mha_bias=False).save_to_preset(str(tmp_path / "bias"))
    with pytest.raises(ValueError, match="use_mha_bias.*mha/query_dense"):
        keras_vit.from_pretrained(tmp_path / "bias")
    classifier(vit(use_class_token=False)).save_to_preset(str(tmp_path / "token"))
    with pytest.raises(ValueError, match="pooling in task.json must be .*'token'"):
        keras_vit.from_pretrained(tmp_path / "token")
    vgg = models.VGGBackbone(stackwise_num_repeats=[1], stackwise_num_filters=[8])
    vgg.save_to_preset(str(tmp_path / "vgg"))
    with pytest.raises(ValueError, match="one of ViTBackbone, .*class_name='VGGBackbone'"):
        keras_vit.from_pretrained(tmp_path / "vgg")


@pytest.mark.parametrize(
    ("file", "field", "value", "message"),
    [
        ("config.json", "image_shape", "large", r"config\.json.*image_shape"),
        ("task.json", "num_classes", "five", r"task\.json.*num_classes"),
        ("image_converter.json", "scale", ["a"], r"image_converter\.json.*scale"),
        ("image_converter.json", "scale", [1.0, 2.0], "3 numbers"),
    ],
)
def test_wrong_json_is_refused_by_file_and_field(file, field, value, message, tmp_path):
    saved("classifier", tmp_path)
    path = tmp_path / file
    content = json.loads(path.read_text()) if path.exists() else {"class_name": "C", "config": {}}
    content["config"][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(tmp_path)


def test_links_in_the_weights_of_a_task_are_refused(tmp_path):
    import h5py

    saved("classifier", tmp_path)
    with h5py.File(tmp_path / "task.weights.h5", "a") as file:
        file["layers/link"] = h5py.SoftLink("/layers/dense")
    with pytest.raises(Refused, match="no soft, external or other links.*SoftLink"):
        keras_vit.from_pretrained(tmp_path)


def test_our_own_weights_are_no_preset(tmp_path):
    sizes = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 8}
    model = keras_vit.ViT(keras_vit.ViTConfig(**sizes))
    model.save_weights(tmp_path / "model.weights.h5")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    assert keras_vit.weights.load.inspect(tmp_path).format == "keras"
    shutil.copy(tmp_path / "model.weights.h5", tmp_path / "task.weights.h5")
    assert keras_vit.weights.load.inspect(tmp_path / "task.weights.h5").format == "keras"

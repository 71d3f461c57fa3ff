"""KerasHub's CLIP, SigLIP and DINOv3, compared with KerasHub itself on random weights."""

import json

import keras
import numpy as np
import pytest

import keras_vit

keras_hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.backend_free
models = keras_hub.models

TOWER = {"image_shape": (24, 24, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2}
TOWER |= {"hidden_dim": 16, "intermediate_dim": 20}
TEXT = {"vocabulary_size": 9, "embedding_dim": 16, "hidden_dim": 16, "num_layers": 1}
TEXT |= {"num_heads": 2, "intermediate_dim": 12, "max_sequence_length": 4}
DINO = {**TOWER, "image_shape": (24, 16, 3)}
GATED = {"use_gated_mlp": True, "hidden_activation": "silu", "use_key_bias": False}


def clip(**changes):
    return models.CLIPVisionEncoder(**{**TOWER, **changes})


def whole_clip():
    return models.CLIPBackbone(clip(name="vision"), models.CLIPTextEncoder(**TEXT), 16)


def siglip(**changes):
    return models.SigLIPVisionEncoder(**{**TOWER, **changes})


def whole_siglip():
    text = models.SigLIPTextEncoder(**TEXT, projection_dim=16)
    return models.SigLIPBackbone(siglip(name="vision"), text)


def dinov3(**changes):
    return models.DINOV3Backbone(**{**DINO, **changes})


def embeddings(model, x):
    return model.get_vision_embeddings(x)


def tower(model, x):
    (name,) = model.input
    return model({name: x}, training=False)


KINDS = {  # the preset, what KerasHub computes, the same of ours
    "CLIP's tower": (clip, tower, "tokens"),
    "CLIP's tower, exact GELU": (lambda: clip(intermediate_activation="gelu"), tower, "tokens"),
    "CLIP": (whole_clip, embeddings, None),
    "SigLIP's tower": (siglip, tower, None),
    "SigLIP": (whole_siglip, embeddings, None),
    "DINOv3": (dinov3, tower, "tokens"),
    "DINOv3, gated": (lambda: dinov3(**GATED, rope_theta=50.0), tower, "tokens"),
    "DINOv3 without tokens of training": (
        lambda: dinov3(use_mask_token=False, num_register_tokens=0, layer_norm_eps=1e-3),
        tower,
        "tokens",
    ),
}


def saved(kind, folder, scale=0.5):
    """A preset with random weights, and its model."""
    model, rng = KINDS[kind][0](), np.random.default_rng(0)
    for v in model.weights:
        if "position_ids" in v.path:  # a new CLIP has zeros, published ones have these
            v.assign(np.arange(v.shape[1])[None])
        else:
            v.assign(("gamma" in v.path) + scale * rng.standard_normal(v.shape))
    model.save_to_preset(str(folder))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_preset_gives_what_keras_hub_gives(kind, tmp_path):
    theirs = saved(kind, tmp_path)
    ours = keras_vit.from_pretrained(tmp_path)
    _, call, part = KINDS[kind]
    x = np.random.default_rng(1).standard_normal((3, *ours.config.input_shape)).astype("float32")
    wanted = keras.ops.convert_to_numpy(call(theirs, x))
    model = ours.features(part) if part else ours
    found = keras.ops.convert_to_numpy(model(x))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 3e-6 * np.ptp(wanted)
    assert np.abs(found[::-1] - wanted).max() > 1e-2 * np.ptp(wanted)
    assert not keras_vit.weights.load.inspect(tmp_path).assumed


def test_pixels_are_those_of_the_preset(tmp_path):
    saved("CLIP", tmp_path)
    mean = keras_vit.weights.load.inspect(tmp_path).config.pixel_mean
    assert mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    converter = keras_hub.layers.CLIPImageConverter(
        image_size=(24, 24), scale=[0.01, 0.02, 0.03], offset=[-2.0, 0.0, 1.0]
    )
    converter.save_to_preset(str(tmp_path))
    config = keras_vit.weights.load.inspect(tmp_path).config
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), "uint8")
    wanted = keras.ops.convert_to_numpy(converter(pixels.astype("float32")))
    found = keras_vit.preprocessing.normalize(pixels, config)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_what_is_left_out_is_named(tmp_path):
    saved("CLIP", tmp_path)
    dropped = keras_vit.weights.load.inspect(tmp_path).dropped
    assert set(dropped.values()) == {
        "the text tower",
        "the projection of texts",
        "the scale of similarities of images and texts",
    }


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("CLIP's tower", "intermediate_activation", "relu", "one of gelu, quick_gelu.*'relu'"),
        ("CLIP", "intermediate_activation", "gelu_approximate", "one of gelu, quick_gelu"),
        ("SigLIP's tower", "intermediate_activation", "quick_gelu", "one of gelu, gelu_approx"),
        ("SigLIP", "layer_norm_epsilon", 1e-5, "layer_norm_epsilon .* must be 1e-06"),
        ("DINOv3", "hidden_activation", "relu", "hidden_activation .* must be 'gelu'"),
        ("DINOv3, gated", "hidden_activation", "gelu", "must be 'silu' for a gated MLP"),
        ("DINOv3", "image_shape", [3, 24, 16], r"image_shape .* must be \(height, width, 3\)"),
        ("DINOv3", "use_mask_token", False, "class_token, registers.*3 arrays"),
        ("DINOv3", "num_register_tokens", "four", "num_register_tokens"),
        ("SigLIP", "image_shape", "large", r"config\.json.*vision_encoder.*image_shape"),
    ],
)
def test_what_a_preset_states_is_checked(kind, field, value, message, tmp_path):
    saved(kind, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["config"].get("vision_encoder", content)["config"][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(tmp_path)


def test_tokens_that_share_a_position_are_refused(tmp_path):
    clip().save_to_preset(str(tmp_path))
    with pytest.raises(ValueError, match=r"position_ids must be 0 to 9: .*Received: \[0"):
        keras_vit.from_pretrained(tmp_path)


@pytest.mark.parametrize("option", ["use_query_bias", "use_proj_bias", "use_mlp_bias"])
def test_products_without_bias_are_refused(option, tmp_path):
    dinov3(**{option: False}).save_to_preset(str(tmp_path))
    with pytest.raises(ValueError, match=f"biases in .*{option}"):
        keras_vit.from_pretrained(tmp_path)


def test_model_without_query_and_value_bias_loads(tmp_path):
    none = {f"use_{name}_bias": False for name in ("query", "key", "value")}
    dinov3(**none).save_to_preset(str(tmp_path))
    assert keras_vit.from_pretrained(tmp_path).config.qkv_bias is False


B32 = {"patch_size": 32, "hidden_dim": 768, "num_layers": 12, "num_heads": 12}
B32 |= {"intermediate_dim": 3072, "image_shape": (224, 224, 3)}
S16 = {"patch_size": 16, "hidden_dim": 384, "num_layers": 12, "num_heads": 6}
S16 |= {"intermediate_dim": 1536, "image_shape": (224, 224, 3), "use_key_bias": False}
PUBLISHED = {  # the tower, what it computes
    "clip_vit_base_patch32": (lambda: clip(**B32), "tokens"),
    "siglip_base_patch16_224": (lambda: siglip(**{**B32, "patch_size": 16}), None),
    "dinov3_vit_small_lvd1689m": (lambda: dinov3(**S16), "tokens"),
    "dinov3_vit_small_plus_lvd1689m": (lambda: dinov3(**{**S16, **GATED}), "tokens"),
}


@pytest.mark.slow
@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_size_gives_what_keras_hub_gives(name, tmp_path, monkeypatch):
    """The sizes and options of KerasHub's own presets, with random weights."""
    make, part = PUBLISHED[name]
    monkeypatch.setitem(KINDS, name, (make, tower, part))
    theirs = saved(name, tmp_path, scale=0.03)
    ours = keras_vit.from_pretrained(tmp_path)
    other = ("position_ids", "mask_token")
    wanted = [v.shape for v in theirs.weights if not v.path.endswith(other)]
    assert ours.count_params() == sum(map(np.prod, wanted))
    x = np.random.default_rng(1).standard_normal((2, 224, 224, 3)).astype("float32")
    wanted = keras.ops.convert_to_numpy(tower(theirs, x))
    model = ours.features(part) if part else ours
    found = keras.ops.convert_to_numpy(model(x))
    assert np.abs(found - wanted).max() < 2e-5 * np.ptp(wanted)
    assert np.abs(found[::-1] - wanted).max() > 1e-2 * np.ptp(wanted)

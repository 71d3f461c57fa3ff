"""transformers' AIMv2 against transformers."""

import json

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, images, torch_output

import keras_vit
from keras_vit.weights.load import inspect

TRUNK = {"hidden_act": "silu", "use_head": False}
BIASES = {"qkv_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2, "num_channels": 1}


def saved(tmp_path, kind="Aimv2VisionModel", **fields):
    """A random model of transformers and the folder that it writes."""
    source = sources.huggingface_vit(kind, **{**TRUNK, **fields})
    source.save_pretrained(tmp_path / "source")
    return source, tmp_path / "source"


def mean(source):
    """From images to the mean of transformers' tokens."""
    tower = getattr(source, "vision_model", source)

    def run(batch):
        return torch_output(tower, batch).last_hidden_state.mean(1).numpy()

    return run


@pytest.mark.parametrize("fields", [{}, BIASES, {"image_size": 40}], ids=str)
def test_aimv2_equals_source(tmp_path, fields):
    source, folder = saved(tmp_path, **fields)
    model = assert_same_logits(folder, mean(source), wrong={"norm_epsilon": 0.1})
    config = model.config
    assert (config.norm, config.patch_norm, config.mlp) == ("rms", "after", "swiglu")
    assert config.num_classes == 0
    assert config.dense_bias == config.qkv_bias == ("qkv_bias" in fields)
    tokens = sources.logits(model.features("tokens"), batch := images(*config.input_shape))
    expected = torch_output(source, batch).last_hidden_state.numpy()
    np.testing.assert_allclose(tokens, expected, atol=1e-5)


@pytest.mark.parametrize("size", [None, 40, (16, 56)])
def test_aimv2_native_computes_its_positions_for_each_size(tmp_path, size):
    source, folder = saved(tmp_path, is_native=True)
    given = {} if size is None else {"image_size": size}
    model = assert_same_logits(folder, mean(source), **given)
    assert model.config.position_embedding == "learned"
    if size is not None:  # and does not resample them
        resized = keras_vit.from_pretrained(folder).resized(size)
        batch = images(*resized.config.input_shape)
        assert np.abs(sources.logits(resized, batch) - mean(source)(batch)).max() > 1e-3


def test_aimv2_head_is_left_out_on_request_only(tmp_path):
    source, folder = saved(tmp_path, "Aimv2Model", use_head=True)
    for given in ({}, {"pooling": "map"}, {"num_classes": 3}):
        with pytest.raises(ValueError, match="pooling must be 'mean', 'mean_all' or None"):
            keras_vit.from_pretrained(folder, **given)
    assert_same_logits(folder, mean(source), pooling="mean", wrong={"norm_epsilon": 0.1})
    dropped = inspect(folder, pooling="mean").dropped
    assert dropped["vision_model.head.cls_token"].startswith("attention pooling")
    assert dropped["visual_projection.weight"].startswith("the projection")
    assert dropped["text_projection.weight"].startswith("the text tower")
    assert dropped["logit_scale"] == "the loss of an image-text model"
    assert keras_vit.from_pretrained(folder, pooling=None).output_shape == (None, 9, 20)


@pytest.mark.backend_free
def test_aimv2_defaults_are_those_of_transformers(tmp_path):
    import transformers

    from keras_vit.weights.formats.huggingface_aimv2 import DEFAULTS, TOWER

    config = transformers.AutoConfig.for_model(TOWER)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    source, folder = saved(tmp_path, hidden_size=24, num_attention_heads=8)
    arrays, expected = sources.state(source), inspect(folder).config
    for config in ({"model_type": "aimv2_vision_model"}, {"model_type": "aimv2"}):
        found = inspect(sources.save(tmp_path / "old", arrays, config))
        assert found.config == expected and not found.assumed
    found = inspect(sources.bare(tmp_path, arrays), num_heads=8)
    assert found.config == expected
    assert found.assumed == {"norm_epsilon": 1e-5}
    assert found.format == "huggingface_aimv2"


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, {"model_type": "aimv2_text_model"}, "model_type='aimv2_text_model'"),
        ({}, {"model_type": ["aimv2"]}, "model_type"),
        ({}, {"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu'"),
        ({}, {"is_native": True}, "is_native in config.json must be False"),
        ({"is_native": True}, {"is_native": False}, "is_native in config.json must be True"),
        ({"qkv_bias": True}, {}, "qkv_bias and mlp_bias must be equal"),
    ],
)
def test_aimv2_what_vit_cannot_be_is_refused(tmp_path, fields, change, message):
    source, folder = saved(tmp_path, **fields)
    config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(sources.save(tmp_path / "wrong", sources.state(source), config))


@pytest.mark.backend_free
def test_aimv2_native_table_is_bounded(tmp_path):
    _, folder = saved(tmp_path, is_native=True, hidden_size=260)
    with pytest.raises(ValueError, match="image_size must have at most"):
        keras_vit.from_pretrained(folder, image_size=8 * 2**10)

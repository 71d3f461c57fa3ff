"""torchvision's state dicts against torchvision."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import images, logits, one_backend, torch_logits

import keras_vit
from keras_vit.weights.load import inspect


def bare(tmp_path, arrays):
    return sources.save(tmp_path / "vit.safetensors", arrays)


@pytest.mark.parametrize("fields", [{}, {"representation_size": 6}], ids=["head", "pre_logits"])
@pytest.mark.parametrize("names", ["new", "old"])
def test_torchvision_logits_equal_source(tmp_path, fields, names):
    source = sources.torchvision_vit(**fields)
    arrays = sources.state(source)
    if names == "old":
        for new, old in (("mlp.0.", "mlp.linear_1."), ("mlp.3.", "mlp.linear_2.")):
            arrays = {name.replace(new, old): array for name, array in arrays.items()}
    path = bare(tmp_path, arrays)
    model = keras_vit.from_pretrained(path, num_heads=5)
    expected = torch_logits(source, images())
    np.testing.assert_allclose(logits(model, images()), expected, atol=1e-5)
    other = keras_vit.from_pretrained(path, num_heads=4)
    assert np.abs(logits(other, images()) - expected).max() > 1e-3


@one_backend
@pytest.mark.parametrize("size", [40, 16, 64])
def test_torchvision_resolution_equals_source(tmp_path, size):
    from torchvision.models.vision_transformer import interpolate_embeddings

    source = sources.torchvision_vit()
    path = bare(tmp_path, sources.state(source))
    model = keras_vit.from_pretrained(path, num_heads=5, image_size=size)
    larger = sources.torchvision_vit(image_size=size)
    larger.load_state_dict(interpolate_embeddings(size, 8, source.state_dict()))
    expected = torch_logits(larger, images(size))
    np.testing.assert_allclose(logits(model, images(size)), expected, atol=1e-5)
    other = keras_vit.from_pretrained(path, num_heads=5, image_size=size, interpolation="timm")
    assert np.abs(logits(other, images(size)) - expected).max() > 1e-3


@one_backend
@pytest.mark.parametrize("fields", [{}, {"representation_size": 6}], ids=["head", "pre_logits"])
def test_torchvision_round_trip_is_bitwise_and_loads_strictly(tmp_path, fields):
    import torch
    from safetensors.torch import load_file

    source = sources.torchvision_vit(**fields)
    model = keras_vit.from_pretrained(bare(tmp_path, sources.state(source)), num_heads=5)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="torchvision")
    assert back == tmp_path / "back.safetensors"
    sources.assert_same_file(back, sources.state(source))
    again = sources.torchvision_vit(seed=3, **fields)
    before = torch_logits(again, images())
    again.load_state_dict(load_file(back), strict=True)
    assert torch.equal(again.encoder.pos_embedding, source.encoder.pos_embedding)
    np.testing.assert_array_equal(torch_logits(again, images()), torch_logits(source, images()))
    assert np.abs(before - torch_logits(source, images())).max() > 1e-2


def test_torchvision_file_of_ours_states_its_config(tmp_path):
    source = sources.torchvision_vit()
    fields = {"num_heads": 5, "labels": ("a", "b", "c"), "pixel_mean": 0.25, "drop_path": 0.1}
    model = keras_vit.from_pretrained(bare(tmp_path, sources.state(source)), **fields)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="torchvision")
    assert inspect(back).config == model.config
    assert inspect(back, num_classes=2, image_size=32).config.image_size == (32, 32)


def test_torchvision_convolutional_stem_is_named(tmp_path):
    from torchvision.models.vision_transformer import ConvStemConfig

    source = sources.torchvision_vit(conv_stem_configs=[ConvStemConfig(4, 8, 8)])
    with pytest.raises(ValueError, match="stem of several convolutions"):
        keras_vit.from_pretrained(bare(tmp_path, sources.state(source)), num_heads=5)

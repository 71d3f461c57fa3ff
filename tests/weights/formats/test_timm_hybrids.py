"""timm's hybrids, whose ResNet has names of its own, against timm's own code."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, images, logits, torch_logits

import keras_vit
from keras_vit.weights.formats import timm_config

HYBRIDS = {
    "root": {"depths": (), "patch_size": 2},
    "two stages": {"depths": (2, 1), "in_chans": 1},
    "three stages": {"depths": (1, 1, 1), "img_size": (32, 48), "global_pool": "avg"},
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_timm_hybrid_logits_equal_source(tmp_path, kind):
    source = sources.timm_hybrid(**HYBRIDS[kind])
    fields = {"num_heads": 5}
    if "img_size" in HYBRIDS[kind]:
        fields["image_size"] = HYBRIDS[kind]["img_size"]
    path = bare(tmp_path, sources.state(source))
    model = assert_same_logits(path, source, wrong={"stem_epsilon": 30.0}, **fields)
    assert model.config.stem_depths == HYBRIDS[kind]["depths"]
    assert model.config.stem_standardization == "variance"


@pytest.mark.backend_free
def test_timm_hybrid_standardizes_small_kernels_as_timm_does(tmp_path):
    """What is added to the variance shows where filters are small, each in its own measure."""
    import torch

    source = sources.timm_hybrid(depths=(), patch_size=2)
    with torch.no_grad():
        source.patch_embed.backbone.conv.weight *= torch.logspace(-5, -3, 64)[:, None, None, None]
    path = bare(tmp_path, sources.state(source))
    wrong = {"stem_standardization": "deviation"}
    assert_same_logits(path, source, wrong, num_heads=5)


@pytest.mark.backend_free
def test_timm_hybrid_resolution_equals_source(tmp_path):
    source = sources.timm_hybrid()
    path = bare(tmp_path, sources.state(source))
    source.set_input_size(img_size=(40, 16))
    wrong = {"interpolation": "torchvision"}
    assert_same_logits(path, source, wrong, num_heads=5, image_size=(40, 16))


@pytest.mark.backend_free
@pytest.mark.parametrize("depths", timm_config.HYBRIDS)
def test_timm_hybrid_round_trip_is_bitwise_and_timm_loads_it(tmp_path, depths):
    import timm

    fields = {"img_size": 64, "embed_dim": 20, "depth": 2, "num_heads": 5, "num_classes": 3}
    source = timm.create_model(timm_config.HYBRIDS[depths], **fields)
    arrays = sources.state(sources.randomize(source))
    model = keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    batch = images(*model.config.input_shape)
    expected = torch_logits(source, batch)
    np.testing.assert_allclose(torch_logits(again, batch), expected, atol=1e-6)
    np.testing.assert_allclose(logits(model, batch), expected, atol=1e-4 * np.abs(expected).max())
    assert keras_vit.from_pretrained(folder).config == model.config


@pytest.mark.backend_free
@pytest.mark.parametrize("architecture", ["vit_base_mci_224", "vit_small_resnet26d_224"])
def test_timm_other_stems_are_refused(tmp_path, architecture):
    import timm

    arrays = sources.state(timm.create_model(architecture, depth=1, embed_dim=768))
    with pytest.raises(ValueError, match="convolutions that is not ViT's ResNet|names of one of"):
        keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=8)

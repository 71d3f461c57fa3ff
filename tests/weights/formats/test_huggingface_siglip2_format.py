"""transformers' SigLIP 2 for images of any size (NaFlex), at one image size."""

import json

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, flat_output, images, logits

import keras_vit
from keras_vit.weights.load import inspect

KINDS = {
    "Siglip2VisionModel": {},
    "Siglip2VisionModel, exact": {"hidden_act": "gelu", "layer_norm_eps": 1e-2, "num_channels": 1},
    "Siglip2ForImageClassification": {},
    "Siglip2Model": {},
}


def saved(tmp_path, kind, **fields):
    """A random model with a table of 3 x 3 patches of 8 pixels, and the folder that it writes."""
    source = sources.huggingface_vit(kind.split(",")[0], **fields)
    source.save_pretrained(tmp_path / "source")
    return source, tmp_path / "source"


@pytest.mark.parametrize(
    ("size", "wrong"),
    [
        (None, {"norm_epsilon": 0.1}),
        (40, {"interpolation": "huggingface"}),
        ((16, 56), {"interpolation": "timm_npz"}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_siglip2_equals_source_at_any_size(tmp_path, kind, size, wrong):
    source, folder = saved(tmp_path, kind, **KINDS[kind])
    given = {} if size is None else {"image_size": size}
    config = assert_same_logits(folder, flat_output(source), wrong, **given).config
    assert config.gelu == ("exact" if "exact" in kind else "tanh")
    assert config.interpolation == "flexivit" and config.patch_size == (8, 8)
    assert config.image_size == {None: (24, 24), 40: (40, 40)}.get(size, size)
    classifier = kind == "Siglip2ForImageClassification"
    assert (config.pooling, config.num_classes) == (("mean", 3) if classifier else ("map", 0))


@pytest.mark.backend_free
def test_siglip2_patches_are_rows_of_pixels(tmp_path):
    source, folder = saved(tmp_path, "Siglip2VisionModel")
    kernel = sources.state(source)["embeddings.patch_embedding.weight"].reshape(20, 8, 8, 3)
    weights = {w.path: w for w in keras_vit.from_pretrained(folder).weights}
    ours = weights["patches/projection/kernel"].numpy()
    np.testing.assert_array_equal(ours, kernel.transpose(1, 2, 3, 0))


@pytest.mark.backend_free
def test_siglip2_text_tower_is_named_and_defaults_may_be_omitted(tmp_path):
    source, folder = saved(tmp_path, "Siglip2Model")
    info = inspect(folder)
    assert info.format == "huggingface_clip" and not info.assumed
    dropped = info.dropped
    assert dropped["text_model.embeddings.token_embedding.weight"].startswith("the text tower")
    assert not [name for name in dropped if name.startswith("vision_model.")]
    fields = {"hidden_size": 24, "num_attention_heads": 12, "patch_size": 16, "image_size": 48}
    source, folder = saved(tmp_path / "tower", "Siglip2VisionModel", **fields)
    expected = inspect(folder).config
    arrays = sources.state(source)
    for config in (
        {"model_type": "siglip2_vision_model"},
        {"model_type": "siglip2"},
        {"model_type": "siglip2", "vision_config": {"image_size": [16, 144]}},  # it has none
    ):
        assert inspect(sources.save(tmp_path / "old", arrays, config)).config == expected
    found = inspect(sources.bare(tmp_path, arrays), num_heads=12)
    assert found.config == expected and set(found.assumed) == {"gelu", "norm_epsilon"}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Siglip2VisionModel", {"patch_size": 4}, "patch_size and num_channels .* patch_size=4"),
        ("Siglip2VisionModel", {"num_channels": 5}, "which projects 192 pixels"),
        ("Siglip2VisionModel", {"num_channels": 0}, "num_channels=0"),
        ("Siglip2VisionModel", {"num_channels": "3"}, "num_channels='3'"),
        ("Siglip2VisionModel", {"model_type": "siglip_vision_model"}, "with 4 axes"),
        ("SiglipVisionModel", {"model_type": "siglip2_vision_model"}, "with 2 axes"),
    ],
)
def test_siglip2_config_that_contradicts_the_arrays_is_refused(tmp_path, kind, change, message):
    source, folder = saved(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text()) | change
    wrong = sources.save(tmp_path / "wrong", sources.state(source), config)
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(wrong)


@pytest.mark.backend_free
def test_siglip2_is_written_as_a_siglip_of_its_size(tmp_path):
    import transformers

    _, folder = saved(tmp_path, "Siglip2VisionModel")
    model = keras_vit.from_pretrained(folder, image_size=40)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="huggingface_clip")
    again = transformers.SiglipVisionModel.from_pretrained(back).eval()
    expected = sources.torch_logits(again, images(40))
    np.testing.assert_allclose(logits(model, images(40)), expected, atol=1e-5)

"""timm's NaFlexVit at one image size."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare

import keras_vit
from keras_vit.weights.load import inspect

pytestmark = [pytest.mark.backend_free, pytest.mark.filterwarnings("ignore:Mapping deprec")]

ARGUMENTS = {"patch_size": 8, "embed_dim": 20, "num_heads": 5, "depth": 2}
ARCHITECTURES = {  # and a rule that is not theirs
    "naflexvit_base_patch16_gap": "timm_npz",
    "naflexvit_base_patch16_par_gap": "timm_npz",
    "naflexvit_base_patch16_parfac_gap": "timm",
    "naflexvit_base_patch16_radio_v3": "timm_npz",
    "naflexvit_large_patch16_radio_v3": "google",
}


def saved(folder, architecture, **arguments):
    """A random model of the architecture with a table of 4 x 4 patches, and its folder."""
    import timm

    arguments = {**ARGUMENTS, **arguments}
    grid = {"pos_embed_grid_size": (4, 4)}
    source = sources.randomize(timm.create_model(architecture, num_classes=3, **arguments, **grid))
    config = {"architecture": architecture, "model_args": arguments}
    return source, sources.save(folder / "folder", sources.state(source), config)


@pytest.mark.parametrize("size", [32, 48, 16, (40, 24)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_naflex_equals_source_at_any_size(tmp_path, architecture, size):
    source, folder = saved(tmp_path, architecture)
    wrong = {"interpolation": ARCHITECTURES[architecture]}
    model = assert_same_logits(folder, source, wrong if size != 32 else None, image_size=size)
    assert model.config.num_registers == source.num_prefix_tokens - model.config.class_token


def test_naflex_patches_are_read_channel_by_channel(tmp_path):
    source, folder = saved(tmp_path, "naflexvit_base_patch16_gap")
    model = keras_vit.from_pretrained(folder, image_size=32)
    kernel = sources.state(source)["embeds.proj.weight"].reshape(20, 8, 8, 3)
    ours = next(w for w in model.weights if w.path == "patches/projection/kernel")
    np.testing.assert_array_equal(ours.numpy(), kernel.transpose(1, 2, 3, 0))


def test_naflex_without_config_says_what_it_assumes(tmp_path):
    source, _ = saved(tmp_path, "naflexvit_base_patch16_gap")
    path = bare(tmp_path, sources.state(source))
    found = inspect(path, num_heads=5)
    assert found.format == "timm_naflex" and found.config.image_size == (32, 32)
    assert {"interpolation", "position_embedding"} <= set(found.assumed)
    assert "interpolation" not in inspect(path, num_heads=5, interpolation="timm").assumed
    assert_same_logits(path, source, num_heads=5, pooling="mean")


def test_naflex_at_the_size_that_its_config_states(tmp_path):
    source, folder = saved(tmp_path, "naflexvit_base_patch16_gap", img_size=48)
    assert assert_same_logits(folder, source).config.image_size == (48, 48)

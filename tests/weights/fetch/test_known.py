"""The table of known checkpoints: what it says is what its sources say, and it can be searched."""

import json
import re

import derive_known
import numpy as np
import pytest

from keras_vit.variants import SIZES
from keras_vit.weights import load
from keras_vit.weights.fetch import known

pytestmark = pytest.mark.backend_free


@pytest.fixture(scope="module")
def timm(torchvision):
    pytest.importorskip("transformers")
    return pytest.importorskip("timm")


def test_known_table_is_what_its_sources_say(timm):
    """Where timm has moved on: python tests/weights/fetch/derive_known.py > <the table>."""
    derived = derive_known.derive()
    assert list(known.KNOWN.values()) == derived
    assert (
        len({row.name for row in derived}) == len({row.source for row in derived}) == len(derived)
    )


def test_known_rows_as_timm_states_them(timm):
    row = known.KNOWN["vit_b16.augreg_in21k"]
    config = timm.get_pretrained_cfg("vit_base_patch16_224.augreg_in21k")
    assert row.source == "hf://timm/vit_base_patch16_224.augreg_in21k"
    assert (row.image_size, row.num_classes) == (config.input_size[1], config.num_classes)
    assert (row.image_size, row.num_classes) == (224, 21843)
    assert known.KNOWN["vit_b16.google_augreg_in21k"].source == config.url
    assert known.KNOWN["vit_l14.reg4_dinov2_lvd142m_518"].variant == "vit_l14"
    assert known.KNOWN["vit_r_ti16.google_augreg_in21k_ft_in1k_384"].source.endswith("res_384.npz")
    assert known.find("vit_base_r50_s16_384.orig_in21k_ft_in1k").variant == "vit_r50_b16"
    assert known.KNOWN["vit_b16.mae"].license == "cc-by-nc-4.0"


@pytest.mark.parametrize(
    "name",
    [
        "vit_pwee_patch16_reg1_gap_256.sbb_in1k",  # parallel branches
        "vit_base_patch16_sapiens2.fb",  # LayerScale on attention alone
        "vit_base_mci_224.apple_mclip2_dfndr2b",  # another stem
        "vit_large_patch14_224.untrained",
    ],
)
def test_known_leaves_out_what_a_config_cannot_say(name, timm):
    assert timm.get_pretrained_cfg(name) is not None
    assert known.find(name) is None


def test_known_names_have_one_form():
    for row in known.KNOWN.values():
        variant, tag = row.name.split(".")
        assert variant == row.variant
        assert re.fullmatch(r"[a-z0-9_]+", tag)
        if row.source == f"hf://timm/{row.name}":  # of a size that has no factory here
            continue
        assert tag.endswith(f"_{row.image_size}") == (row.image_size != 224)
        assert row.source.startswith(("hf://", "https://"))
        assert tag.startswith(f"{row.format}_") == (row.format != "timm")
        assert row.reference.split("/")[0] in ("timm", "torchvision", "transformers")


def test_known_search_wants_every_word():
    names = [row.name for row in known.search("B16 augreg 384")]
    assert "vit_b16.augreg_in1k_384" in names and "vit_b16.google_augreg_in1k_384" in names
    assert all("b16" in name and "augreg" in name and "384" in name for name in names)
    assert known.search("imagenet-21k cc-by-nc") == []
    for family in ("siglip2", "dinov3", "clip openai", "eva02", "beitv2", "r50_b16", "flexivit"):
        assert known.search(family), family
    assert all("SigLIP 2" in row.pretraining for row in known.search("siglip2"))
    assert len(known.search()) == len(known.KNOWN)


def test_known_find_takes_both_names():
    row = known.KNOWN["vit_s16.dino"]
    assert known.find("vit_s16.dino") is known.find("vit_small_patch16_224.dino") is row
    assert known.find("vit_s16.nodino") is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit_b16.augreg_in21", "vit_b16.augreg_in21k"),
        ("VIT_B16.DINO2", "vit_b16.dino"),
        ("vit_b14.dinov2", "vit_b14.dinov2_lvd142m_518"),
        # As transformers, timm and KerasHub name them.
        ("google/vit-base-patch16-224", "vit_b16.huggingface_in21k_ft_in1k"),
        ("google/vit-large-patch16-224", "vit_l16.augreg_in21k_ft_in1k"),
        ("vit_base_patch16_224", "vit_b16.augreg_in21k_ft_in1k"),
        ("timm/vit_base_patch16_224", "vit_b16.augreg_in21k_ft_in1k"),
        ("vit_base_patch16_224.augreg_in21", "vit_b16.augreg_in21k"),
        ("vit_base_patch16_224_imagenet", "vit_b16.augreg_in21k_ft_in1k"),
        ("vit_base_patch14_dinov2", "vit_b14.dinov2_lvd142m_518"),
        ("vit_s32", "vit_s32.augreg_in21k"),
    ],
)
def test_known_nearest(name, near):
    assert near in known.nearest(name)


def test_known_nearest_of_an_architecture_is_of_its_size():
    """By their letters, other families are nearer."""
    found = known.nearest("vit_base_patch16_224")
    assert len(found) == 5 and all(name.startswith("vit_b16.") for name in found)


@pytest.mark.parametrize("name", ["pizza", "runs/vit_b16.dino", "facebook/dino-vitb16"])
def test_known_nearest_guesses_nothing_far(name):
    assert known.nearest(name) == []


def test_known_tags_of_a_variant_begin_with_classifiers():
    tags = known.of_variant("vit_b16")
    assert [known.KNOWN[f"vit_b16.{tag}"].num_classes for tag in tags] == [1000] * 5
    assert known.of_variant("vit_g14") == []


QUICK = (
    "vit_ti16.deit_fb_in1k",
    "vit_s14.reg4_dinov2_lvd142m_518",
    "vit_wee16.reg1_gap_sbb_in1k_256",
)


@pytest.mark.parametrize("name", QUICK)
def test_known_row_is_the_model_that_timm_makes(name, timm, tmp_path):
    _check_row(timm, known.KNOWN[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, row in known.KNOWN.items() if row.format == "timm" and n not in QUICK]
)
def test_known_row_is_the_model_that_timm_makes_all(name, timm, tmp_path):
    _check_row(timm, known.KNOWN[name], tmp_path)


def _check_row(timm, row, folder):
    """timm's model of a row, as an empty file with its names and shapes: what we say that it is."""
    import torch
    from timm.models._hub import save_config_for_hf

    with torch.device("meta"):
        model = timm.create_model(row.source.removeprefix("hf://timm/"), pretrained=False)
    write_empty(folder / "model.safetensors", {k: v.shape for k, v in model.state_dict().items()})
    save_config_for_hf(model, folder / "config.json")
    checkpoint = load.inspect(folder)
    config = checkpoint.config
    assert not (checkpoint.missing or checkpoint.extra or checkpoint.misshaped)
    assert config.image_size == (row.image_size, row.image_size)
    assert config.num_classes == row.num_classes
    assert config.num_heads == model.blocks[0].attn.num_heads
    if row.variant in SIZES:
        size = SIZES[row.variant]._asdict()
        del size["source"]
        assert config == config.replace(**size)
    stated = model.pretrained_cfg
    for ours, theirs in ((config.pixel_mean, stated["mean"]), (config.pixel_std, stated["std"])):
        np.testing.assert_allclose(np.broadcast_to(ours, 3), theirs)


def write_empty(path, shapes):
    """A safetensors file of zeros that takes no room on the disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)

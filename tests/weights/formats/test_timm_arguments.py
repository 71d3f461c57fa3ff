"""The arguments of timm's models that config.json records, against timm."""

import collections
import json
import warnings

import derive_architectures
import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, images, logits, torch_logits

import keras_vit
from keras_vit.weights.formats import timm_arguments, timm_config

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
EVA, DINOV3 = "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"
MIXED = "vit_small_patch16_rope_mixed_ape_224"
READ = [
    (EVA, {"use_rot_pos_emb": False}, {"position_embedding": "learned+rope"}),
    (EVA, {"rope_rotate_half": True}, {"rope_pairs": "neighbors"}),
    (EVA, {"rope_grid_offset": 1.0}, {"rope_offset": 0.0}),
    (EVA, {"ref_feat_shape": (8, 4)}, {"rope_grid": (16, 16)}),
    (EVA, {"scale_mlp": False, "features_only": False}, {"rope_grid": (2, 2)}),
    (DINOV3, {"use_rot_pos_emb": False}, {"position_embedding": "rope"}),
    (DINOV3, {"rope_rotate_half": False}, {"rope_pairs": "halves"}),
    (DINOV3, {"rope_grid_offset": 0.0, "num_reg_tokens": 0}, {"rope_base": 3.0}),
    (MIXED, {"rope_rotate_half": False}, {"norm_epsilon": 0.1}),
]
REFUSED = [
    (EVA, {"rope_temperature": 0.0}),
    (DINOV3, {"rope_grid_offset": 1.0}),
    (MIXED, {"rope_grid_indexing": ""}),
    ("eva02_enormous_patch14_clip_224", {"use_post_norm": False}),
    ("vit_pe_core_base_patch16_224", {"attn_pool_num_heads": None}),
    ("naflexvit_base_patch16_par_gap", {"pos_embed_ar_preserving": False}),
    ("vit_tiny_patch16_224", {"a_new_argument": False}),
]


def saved(tmp_path, name, **arguments):
    """A random model of timm, and the folder that timm writes."""
    import timm
    from timm.models._hub import save_for_hf

    module = sources.randomize(timm.create_model(name, **TINY | arguments), scale=0.3)
    save_for_hf(module, tmp_path / "folder", safe_serialization=True)
    return module, tmp_path / "folder"


@pytest.mark.backend_free
@pytest.mark.parametrize(("name", "arguments", "wrong"), READ)
def test_timm_arguments_are_read_as_by_timm(tmp_path, name, arguments, wrong):
    size = 28 if "patch14" in name else 32
    module, folder = saved(tmp_path, name, img_size=size, **arguments)
    written = json.loads((folder / "config.json").read_text())["model_args"]
    assert set(arguments) <= set(written)
    assert_same_logits(folder, module, wrong=wrong)


@pytest.mark.backend_free
@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_timm_arguments_that_may_remove_a_part_are_refused(name, arguments):
    with pytest.raises(ValueError, match=f"model_args.*{next(iter(arguments))}="):
        timm_config.stated_fields({"architecture": name, "model_args": arguments})
    idle = {"drop_rate": 0.0, "features_only": False, "num_classes": 5, "weight_init": "jax"}
    stated = timm_config.stated_fields({"architecture": name, "model_args": idle})
    assert stated == timm_config.stated_fields({"architecture": name})


@pytest.mark.backend_free
def test_timm_false_arguments_are_those_of_the_architectures(monkeypatch):
    """What may be false without a word is nowhere true; the table knows who has the other parts."""
    import timm

    seen = collections.defaultdict(set)

    def build(model, name, pretrained, **arguments):
        for argument, value in arguments.items():
            if value:
                seen[argument].add(name)
        raise StopIteration

    for module in derive_architectures.MODULES:
        monkeypatch.setattr(f"timm.models.{module}.build_model_with_cfg", build)
    known = {n: row for n, row in timm_config.architectures().items() if "unlike" not in row}
    for name in known:
        function = timm.models.model_entrypoint(name)
        with pytest.raises(StopIteration), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of timm's own renamed architectures
            function(pretrained=False)
    shown = ("num_reg_tokens", "qkv_fused", "scale_", "swiglu_", "use_pre_", "attn_pool_mlp_ratio")
    hidden = [name for name in timm_arguments.OFF if not name.startswith(shown)]
    assert len(hidden) > 5 and not {name: seen[name] for name in hidden if seen[name]}
    for argument in ("use_post_norm", "attn_pool_num_heads", "rope_temperature", "rope_type"):
        has = {name for name, row in known.items() if timm_arguments.PARTS[argument] in row}
        assert seen[argument] and seen[argument] <= has


@pytest.mark.backend_free
def test_timm_padding_is_idle_where_patches_divide_the_image(tmp_path):
    padding = {"dynamic_img_size": True, "dynamic_img_pad": True, "patch_size": 8}
    module, folder = saved(tmp_path, "vit_tiny_patch16_224", img_size=24, **padding)
    model = keras_vit.from_pretrained(folder)
    expected = torch_logits(module, images(24))
    np.testing.assert_allclose(logits(model, images(24)), expected, atol=1e-5)
    _, folder = saved(tmp_path, "vit_tiny_patch16_224", img_size=27, **padding)
    message = r"img_size must be a multiple of patch_size for dynamic_img_pad=True.*\(27, 27\)"
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["model_args"]["dynamic_img_pad"] = False
    (folder / "config.json").write_text(json.dumps(content))
    assert keras_vit.from_pretrained(folder).config.grid == (3, 3)

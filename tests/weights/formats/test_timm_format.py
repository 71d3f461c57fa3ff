"""timm's state dicts, against timm's own code."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import (
    assert_same_logits,
    bare,
    images,
    logits,
    torch_logits,
    torch_output,
)

import keras_vit
from keras_vit.weights.load import inspect

KINDS = {
    "plain": {},
    "not square": {"img_size": (24, 16), "patch_size": (8, 4)},
    "registers": {"reg_tokens": 2, "no_embed_class": True},
    "registers with rows": {"reg_tokens": 2},
    "layer scale": {"init_values": 0.1},
    "no class row": {"no_embed_class": True},
    "q and k norm": {"qk_norm": True, "qkv_bias": False},
    "gap": {"class_token": False, "global_pool": "avg"},
    "gap with class token": {"global_pool": "avg"},
    "gap of registers": {"class_token": False, "global_pool": "avg", "reg_tokens": 1},
    "no positions": {"pos_embed": "none"},
    "no last norm": {"final_norm": False},
    "no head": {"num_classes": 0},
    "one channel": {"in_chans": 1},
    "norm before the blocks": {"pre_norm": True, "reg_tokens": 2, "no_embed_class": True},
    "inner norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "attention pooling of registers": {"global_pool": "map", "reg_tokens": 1, "num_classes": 0}
    | {"no_embed_class": True},
}
SWIGLU = {  # timm's own arguments, none of which JSON can hold
    "swiglu": {"mlp_ratio": 2.8, "init_values": 0.1},
    "swiglu with inner norm": {"mlp_ratio": 2.8, "scale_mlp_norm": True},
}
# What a state dict alone does not state.
UNSTATED = {
    "norm before the blocks": {"norm_epsilon": 1e-6},  # CLIP's is 1e-5
    "not square": {"image_size": (24, 16)},
    "no positions": {"image_size": 24, "position_embedding": "none"},
}
STATED = {
    "gap before norm": {"global_pool": "avg", "fc_norm": False},
    "all tokens": {"global_pool": "avg", "pool_include_prefix": True},
    "attention pooling of all tokens": {"global_pool": "map", "pool_include_prefix": True},
    "norm after attention pooling": {"global_pool": "map", "fc_norm": True},
    "tanh": {"act_layer": "gelu_tanh"},
    "quick": {"act_layer": "quick_gelu", "pre_norm": True},
    "not square": {"img_size": [16, 144]},  # of 36 patches, which a bare file would call 6 x 6
}
# Where registers have rows of the table, the rows become part of the registers.
WRITTEN = [kind for kind in KINDS if kind not in ("registers with rows", "gap of registers")]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_timm_logits_equal_source(tmp_path, kind):
    source = sources.timm_vit(**KINDS[kind])
    fields = {"num_heads": 5, **UNSTATED.get(kind, {})}
    path = bare(tmp_path, sources.state(source))
    assert_same_logits(path, source, wrong={"norm_epsilon": 0.1}, **fields)


def swiglu_vit(**fields):
    import torch
    from timm.layers import SwiGLUPacked

    return sources.timm_vit(mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU, **fields)


@pytest.mark.parametrize("kind", SWIGLU)
def test_timm_swiglu_equals_source_and_is_written_back(tmp_path, kind):
    import timm

    source = swiglu_vit(**SWIGLU[kind])
    arrays = sources.state(source)
    path = bare(tmp_path, arrays)
    assert inspect(path, num_heads=5).assumed["mlp"] == "swiglu"  # only its shapes tell
    model = assert_same_logits(path, source, num_heads=5)
    assert (model.config.mlp, model.config.mlp_dim) == ("swiglu", 28)
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch_logits(again, images()).tobytes() == torch_logits(source, images()).tobytes()
    assert inspect(folder).assumed == {} and inspect(folder).config.mlp == "swiglu"
    # Negative control: what is gated taken for the gate.
    fc1 = arrays["blocks.0.mlp.fc1.weight"]
    swapped = {**arrays, "blocks.0.mlp.fc1.weight": np.concatenate([fc1[28:], fc1[:28]])}
    wrong = keras_vit.from_pretrained(bare(tmp_path, swapped, "wrong.safetensors"), num_heads=5)
    assert np.abs(logits(wrong, images()) - torch_logits(source, images())).max() > 1e-3


@pytest.mark.parametrize(
    "names", [("mlp.w12", "mlp.w3"), ("mlp.fc1_g", "mlp.fc1_x", "mlp.fc2")], ids=["raw", "apart"]
)
def test_timm_swiglu_under_other_names(tmp_path, names):
    """Raw DINOv2's, and those of timm's models with the gate in a Linear of its own."""
    source = swiglu_vit(mlp_ratio=2.8, num_classes=0)
    arrays = {"mask_token": np.zeros((1, 20), "float32")} if "mlp.w3" in names else {}
    for name, array in sources.state(source).items():
        name = name.replace("mlp.fc2", names[-1])
        parts = np.split(array, len(names) - 1) if "mlp.fc1" in name else [array]
        for part, new in zip(parts, names, strict=False):
            arrays[name.replace("mlp.fc1", new)] = part
    path = bare(tmp_path, arrays)
    assert_same_logits(path, source, num_heads=5)
    assert not {"gelu", "mlp"} & set(inspect(path, num_heads=5).assumed)


@pytest.mark.backend_free
def test_timm_mlp_of_which_half_is_not_read_is_refused(tmp_path):
    arrays = sources.state(swiglu_vit(mlp_ratio=2.8))
    for i in range(2):
        arrays[f"blocks.{i}.mlp.fc2.weight"] = arrays[f"blocks.{i}.mlp.fc2.weight"][:, :20]
    with pytest.raises(ValueError, match="source must have an MLP whose hidden values are all"):
        inspect(bare(tmp_path, arrays), num_heads=5)


@pytest.mark.parametrize("kind", STATED)
def test_timm_config_json_says_what_arrays_do_not(tmp_path, kind):
    arguments = STATED[kind]
    source = sources.timm_vit(**arguments)
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 5, **arguments}}
    assert_same_logits(sources.save(tmp_path / "folder", sources.state(source), config), source)


@pytest.mark.backend_free
def test_timm_config_json_brings_pixels_and_labels(tmp_path):
    cfg = {
        "mean": [0.1, 0.2, 0.3],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "input_size": [3, 24, 24],
    }
    names = ["a", "b", "c", "d"]  # not as many as there are channels
    config = {"pretrained_cfg": cfg, "label_names": names, "global_pool": "token"}
    arrays = sources.state(sources.timm_vit(num_classes=4))
    folder = sources.save(tmp_path / "folder", arrays, config)
    found = inspect(folder, num_heads=5).config
    assert found.pixel_mean == (0.1, 0.2, 0.3) and found.pixel_std == 0.5
    assert (found.resize_method, found.crop_fraction) == ("bicubic", 0.9)
    assert found.labels == ("a", "b", "c", "d")
    assert inspect(folder, num_heads=5, num_classes=2).config.labels is None


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, 40), ({}, (16, 56)), ({"no_embed_class": True, "reg_tokens": 2}, 32)],
)
def test_timm_resolution_equals_source(tmp_path, fields, size):
    source = sources.timm_vit(**fields)
    path = bare(tmp_path, sources.state(source))
    source.set_input_size(img_size=size)
    wrong = {"interpolation": "torchvision"}
    assert_same_logits(path, source, wrong, num_heads=5, image_size=size)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("architecture", "patch", "size"),
    [("vit_tiny_patch16_224", 12, 48), ("flexivit_small", (4, 6), 24), ("flexivit_small", 5, 20)],
)
def test_timm_patch_size_equals_source(tmp_path, architecture, patch, size):
    import timm

    arguments = {"img_size": 24, "patch_size": 8, "embed_dim": 20, "depth": 2, "num_heads": 5}
    source = sources.randomize(timm.create_model(architecture, num_classes=3, **arguments))
    config = {"architecture": architecture, "model_args": arguments}
    folder = sources.save(tmp_path / "folder", sources.state(source), config)
    # Its loader resamples a checkpoint's kernel and table by the rule of the architecture.
    arguments |= {"img_size": size, "patch_size": patch, "num_classes": 3}
    overlay = {"file": str(folder / "model.safetensors"), "num_classes": 3}
    resampled = timm.create_model(
        architecture, pretrained=True, pretrained_cfg_overlay=overlay, **arguments
    ).eval()
    other = "timm" if architecture == "flexivit_small" else "timm_npz"
    wrong = {"interpolation": other}
    model = assert_same_logits(folder, resampled, wrong, image_size=size, patch_size=patch)
    again = keras_vit.from_pretrained(folder).resized(size, patch_size=patch)
    batch = sources.images(*model.config.input_shape)
    np.testing.assert_array_equal(sources.logits(again, batch), sources.logits(model, batch))


@pytest.mark.backend_free
@pytest.mark.parametrize("fields", [{}, {"pos_embed": "none"}])
def test_timm_image_size_that_patches_do_not_divide_equals_source(tmp_path, fields):
    """As of `vit_so400m_patch14_siglip_384`: the convolution ignores the last rows and columns."""
    arguments = {"img_size": 27, "num_heads": 5, **fields}
    source = sources.timm_vit(**arguments)
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    folder = sources.save(tmp_path / "folder", sources.state(source), config)
    model = assert_same_logits(folder, source)
    assert model.config.image_size == (27, 27) and model.config.grid == (3, 3)
    with pytest.raises(ValueError, match="image_size must be a multiple of patch_size"):
        keras_vit.from_pretrained(
            bare(tmp_path, sources.state(sources.timm_vit())), num_heads=5, image_size=27
        )


@pytest.mark.backend_free
@pytest.mark.parametrize("channels", [1, 4, 10])
def test_timm_channels_equal_adapt_input_conv(tmp_path, channels, caplog):
    import torch
    from timm.models._manipulate import adapt_input_conv

    source = sources.timm_vit()
    path = bare(tmp_path, sources.state(source))
    kernel = adapt_input_conv(channels, source.patch_embed.proj.weight.detach())
    source.patch_embed.proj = torch.nn.Conv2d(channels, 20, 8, 8)
    source.patch_embed.proj.weight.data = kernel
    bias = sources.state(sources.timm_vit())["patch_embed.proj.bias"]
    source.patch_embed.proj.bias.data = torch.from_numpy(bias)
    assert_same_logits(path, source, num_heads=5, in_channels=channels)
    assert "patch kernel" in caplog.text


def test_timm_heads_are_read_from_q_norm(tmp_path):
    path = bare(tmp_path, sources.state(sources.timm_vit(qk_norm=True)))
    assert inspect(path).config.num_heads == 5
    path = bare(tmp_path, sources.state(sources.timm_vit()), "plain.safetensors")
    with pytest.raises(ValueError, match="num_heads must be given"):
        inspect(path)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_base_patch16_xp_224", "blocks of another kind"),
        ("vit_base_patch16_sapiens2.pretrain", "LayerScale on attention alone"),
        ("vit_large_patch16_sapiens2.pretrain", "fewer keys"),
        ("vit_base_patch16_of_tomorrow", "architecture in config.json must be one of timm's"),
    ],
)
def test_timm_architectures_unlike_ours_are_refused_by_name(tmp_path, architecture, message):
    """Their arrays have the names and shapes of a plain ViT."""
    arrays = sources.state(sources.timm_vit())
    config = {"architecture": architecture, "model_args": {"num_heads": 5}}
    with pytest.raises(ValueError, match=f"(?s){message}.*architecture='{architecture}'"):
        keras_vit.from_pretrained(sources.save(tmp_path / "folder", arrays, config))
    config["architecture"] = "vit_base_patch16_224.augreg_in21k"
    keras_vit.from_pretrained(sources.save(tmp_path / "plain", arrays, config))


@pytest.mark.backend_free
def test_timm_model_args_that_are_not_understood_are_refused(tmp_path):
    arrays = sources.state(sources.timm_vit())
    config = {"model_args": {"num_heads": 5, "rope_type": "mixed"}}
    with pytest.raises(ValueError, match="model_args.*rope_type='mixed'"):
        inspect(sources.save(tmp_path / "folder", arrays, config))


@pytest.mark.backend_free
def test_timm_without_a_table_must_say_that_it_has_no_positions(tmp_path):
    path = bare(tmp_path, sources.state(sources.timm_vit(pos_embed="none")))
    with pytest.raises(ValueError, match="position_embedding='none' must be passed"):
        keras_vit.from_pretrained(path, num_heads=5, image_size=24)
    fields = {"num_heads": 5, "image_size": 24, "position_embedding": "none"}
    assert keras_vit.from_pretrained(path, **fields).config.position_embedding == "none"


@pytest.mark.backend_free
def test_timm_res_post_norm_is_not_taken_for_a_plain_block(tmp_path):
    from timm.models.vision_transformer import ResPostBlock

    fields = {"class_token": False, "global_pool": "avg", "qkv_bias": False}
    path = bare(tmp_path, sources.state(sources.timm_vit(**fields, block_fn=ResPostBlock)))
    with pytest.raises(ValueError, match="block_norm='res_post' for these"):
        keras_vit.from_pretrained(path, num_heads=5)
    source = sources.timm_vit(**fields)
    path = bare(tmp_path, sources.state(source), "plain.safetensors")
    assert_same_logits(path, source, num_heads=5, block_norm="pre")


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "scale_mlp_norm": True}])
def test_timm_res_post_norm_equals_source_and_is_written_back(tmp_path, fields):
    import timm
    from timm.models.vision_transformer import ResPostBlock

    source = sources.timm_vit(block_fn=ResPostBlock, qkv_bias=False, **fields)
    arrays = sources.state(source)
    path = bare(tmp_path, arrays)
    wrong = {"block_norm": "pre"}
    model = assert_same_logits(path, source, wrong, num_heads=5, block_norm="res_post")
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch_logits(again, images()).tobytes() == torch_logits(source, images()).tobytes()
    assert inspect(folder).config == model.config


def aimv2_vit(**fields):
    from functools import partial

    from timm.layers import RmsNorm, SwiGLU

    rms = partial(RmsNorm, eps=1e-5)
    return sources.timm_vit(
        class_token=False,
        fc_norm=False,
        global_pool="avg",
        qkv_bias=False,
        proj_bias=False,
        act_layer="silu",
        norm_layer=rms,
        embed_norm_layer=rms,
        mlp_layer=SwiGLU,
        **fields,
    )


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}, {"num_classes": 0, "in_chans": 1}])
def test_timm_aimv2_equals_source(tmp_path, fields):
    source = aimv2_vit(**fields)
    path = bare(tmp_path, sources.state(source))
    known = {"num_heads": 5, "block_norm": "pre", "norm_epsilon": 1e-5}
    assert_same_logits(path, source, wrong={"norm_epsilon": 0.1}, **known)
    found = inspect(path, **known)
    assert found.assumed["norm"] == "rms" and "gelu" not in found.assumed
    assert (found.config.patch_norm, found.config.dense_bias) == ("after", False)
    source.set_input_size(img_size=(40, 16))
    assert_same_logits(path, source, {"interpolation": "google"}, image_size=(40, 16), **known)


@pytest.mark.backend_free
def test_timm_blocks_without_biases_are_written_back(tmp_path):
    import timm

    source = sources.timm_vit(qkv_bias=False, proj_bias=False, qk_norm=True)
    arrays = sources.state(source)
    model = assert_same_logits(bare(tmp_path, arrays), source, num_heads=5)
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch_logits(again, images()).tobytes() == torch_logits(source, images()).tobytes()


EVA = {
    "giant": {"global_pool": "avg"},
    "enormous": {"global_pool": "token", "use_post_norm": True},
    "swiglu": {"global_pool": "token", "swiglu_mlp": True, "init_values": 0.1},
    "swiglu with norms": {"swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True},
}


def eva_vit(**fields):
    from timm.models.eva import Eva

    words = "img_size patch_size embed_dim num_heads mlp_ratio depth num_classes"
    arguments = sources.tiny_arguments(words, {"mlp_ratio": 1.4} | fields)
    return sources.randomize(Eva(**arguments))


@pytest.mark.parametrize("kind", EVA)
def test_timm_eva_without_rotary_positions_equals_source(tmp_path, kind):
    source = eva_vit(**EVA[kind])
    path = bare(tmp_path, sources.state(source))
    post = "use_post_norm" in EVA[kind]
    fields = {"num_heads": 5, "position_embedding": "learned"}
    if "gamma_1" not in dict(source.blocks[0].named_parameters()):
        with pytest.raises(ValueError, match="block_norm='res_post' for these"):
            keras_vit.from_pretrained(path, **fields)  # giant's arrays are enormous' too
    fields["block_norm"] = "res_post" if post else "pre"
    model = assert_same_logits(path, source, wrong={"norm_epsilon": 0.1}, **fields)
    assert model.config.qkv_bias and not model.config.key_bias
    with pytest.raises(ValueError, match="key_bias must be True"):
        keras_vit.save_pretrained(model, tmp_path / "back", format="timm")


@pytest.mark.backend_free
def test_timm_assumptions_are_reported(tmp_path, caplog):
    path = bare(tmp_path, sources.state(sources.timm_vit(embed_dim=64, num_heads=1)))
    assumed = {"gelu": "exact", "norm_epsilon": 1e-6, "num_heads": 1, "pooling": "token"}
    assumed |= {"block_norm": "pre"}  # a ResPostBlock has the same arrays
    pixels = {"pixel_mean": 0.5, "pixel_std": 0.5}
    assumed |= {"interpolation": "timm", **pixels}  # DINO's and MAE's backbones have timm's names
    assert inspect(path, position_embedding="learned").assumed == assumed
    assert inspect(path).assumed == assumed | {"position_embedding": "learned"}
    keras_vit.from_pretrained(path)
    assert "Assumed: block_norm='pre', gelu='exact', interpolation='timm', norm" in caplog.text
    stated = {"gelu": "tanh", "norm_epsilon": 1e-5, "num_heads": 2, "pooling": "mean"}
    stated |= {"position_embedding": "learned", "block_norm": "pre", "interpolation": "dinov2"}
    assert inspect(path, **stated).assumed == pixels
    assert inspect(path, **stated, **pixels).assumed == {}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 5}}
    folder = sources.save(tmp_path / "folder", sources.state(sources.timm_vit()), config)
    assert inspect(folder).assumed == pixels
    config["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.5] * 3}
    folder = sources.save(tmp_path / "folder", sources.state(sources.timm_vit()), config)
    assert inspect(folder).assumed == {}


@pytest.mark.backend_free
def test_timm_res_post_norm_with_biases_is_an_assumption(tmp_path):
    """Its arrays are those of a plain ViT."""
    from timm.models.vision_transformer import ResPostBlock

    source = sources.timm_vit(block_fn=ResPostBlock)
    path = bare(tmp_path, sources.state(source))
    assert inspect(path, num_heads=5).assumed["block_norm"] == "pre"
    wrong = {"block_norm": "pre"}
    assert_same_logits(path, source, wrong, num_heads=5, block_norm="res_post")
    scaled = bare(tmp_path, sources.state(sources.timm_vit(init_values=0.1)), "scaled.safetensors")
    assert "block_norm" not in inspect(scaled, num_heads=5).assumed


def test_timm_attention_pooling_leaves_its_trunk(tmp_path):
    source = sources.timm_vit(global_pool="map", class_token=False, num_classes=0)
    path = bare(tmp_path, sources.state(source))
    model = keras_vit.from_pretrained(path, num_heads=5, num_classes=0, pooling="mean")
    tokens = torch_output(source.forward_features, images())
    np.testing.assert_allclose(logits(model, images()), tokens.mean(1).numpy(), atol=1e-5)
    reasons = set(inspect(path, num_heads=5, pooling="mean").dropped.values())
    assert reasons == {"not used: pooling='mean'"}


@pytest.mark.backend_free
def test_timm_attention_pooling_of_prefix_tokens_is_an_assumption(tmp_path):
    """No array shows whether it reads the class token too."""
    fields = {"num_heads": 5, "gelu": "exact", "norm_epsilon": 1e-6, "block_norm": "pre"}
    fields |= {"position_embedding": "learned", "interpolation": "timm"}
    fields |= {"pixel_mean": 0.5, "pixel_std": 0.5}
    arrays = sources.state(sources.timm_vit(global_pool="map"))
    path = bare(tmp_path, arrays)
    assert inspect(path, **fields).assumed == {"pooling": "map"}
    source = sources.timm_vit(global_pool="map", pool_include_prefix=True)
    assert_same_logits(path, source, **fields, pooling="map_all", wrong={"pooling": "map"})
    path = bare(tmp_path, sources.state(sources.timm_vit(global_pool="map", class_token=False)))
    assert inspect(path, **fields).assumed == {}


@pytest.mark.backend_free
def test_timm_attention_pooling_of_another_size_is_not_written(tmp_path):
    for fields in ({"pooling_heads": 4}, {"pooling_mlp_dim": 24}):
        model = sources.random_vit(class_token=False, pooling="map", **fields)
        with pytest.raises(ValueError, match="pooling_heads and pooling_mlp_dim must be None"):
            keras_vit.save_pretrained(model, tmp_path / "timm", format="timm")


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", WRITTEN)
def test_timm_round_trip_is_bitwise_and_timm_loads_it(tmp_path, kind):
    import timm

    source = sources.timm_vit(**KINDS[kind])
    arrays = sources.state(source)
    path = bare(tmp_path, arrays)
    model = keras_vit.from_pretrained(path, num_heads=5, **UNSTATED.get(kind, {}))
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    batch = images(*model.config.input_shape)
    np.testing.assert_allclose(torch_logits(again, batch), torch_logits(source, batch), atol=1e-6)
    ours = keras_vit.from_pretrained(folder)
    assert ours.config == model.config.replace(layer_scale=ours.config.layer_scale)

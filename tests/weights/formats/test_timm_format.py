"""timm's state dicts, and the raw DeiT-III, DINOv2 and MAE ones, against timm's own code."""

import keras
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
    "attention pooling": {"global_pool": "map", "class_token": False},
    "attention pooling of registers": {"global_pool": "map", "reg_tokens": 1, "num_classes": 0}
    | {"no_embed_class": True},
}
# What a state dict alone does not state.
UNSTATED = {
    "not square": {"image_size": (24, 16)},
    "no positions": {"image_size": 24, "position_embedding": "none"},
}
STATED = {
    "gap before norm": {"global_pool": "avg", "fc_norm": False},
    "all tokens": {"global_pool": "avg", "pool_include_prefix": True},
    "attention pooling of all tokens": {"global_pool": "map", "pool_include_prefix": True},
    "norm after attention pooling": {"global_pool": "map", "fc_norm": True},
    "tanh": {"act_layer": "gelu_tanh"},
    "not square": {"img_size": [16, 144]},  # of 36 patches, which a bare file would call 6 x 6
}
# Where registers have rows of the table, the rows become part of the registers.
WRITTEN = [kind for kind in KINDS if kind not in ("registers with rows", "gap of registers")]


@pytest.mark.parametrize("kind", KINDS)
def test_timm_logits_equal_source(tmp_path, kind):
    source = sources.timm_vit(**KINDS[kind])
    fields = {"num_heads": 5, **UNSTATED.get(kind, {})}
    path = bare(tmp_path, sources.state(source))
    assert_same_logits(path, source, wrong={"norm_epsilon": 0.1}, **fields)


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


def raw(names, **fields):
    """A timm model, and its state dict under other names."""
    source = sources.timm_vit(**fields)
    arrays = {}
    for name, array in sources.state(source).items():
        for theirs, rawly in names.items():
            name = name.replace(theirs, rawly)
        arrays[name] = array
    return source, arrays


def test_deit3_raw_logits_equal_source(tmp_path):
    names = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    source, arrays = raw(names, init_values=0.1, no_embed_class=True)
    model = assert_same_logits(bare(tmp_path, arrays), source, num_heads=5)
    assert inspect(tmp_path / "vit.safetensors", num_heads=5).format == "deit3"
    assert model.config.interpolation == "deit" and not model.config.position_class_row


@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2_raw_logits_equal_source(tmp_path, registers):
    fields = {"init_values": 0.1, "num_classes": 0}
    if registers:
        fields |= {"reg_tokens": registers, "no_embed_class": True}
    source, arrays = raw({"reg_token": "register_tokens"}, **fields)
    expected = torch_logits(source, images())
    if registers:
        # DINOv2 keeps the class token's row in the table, where timm adds it to the token.
        row = np.full((1, 1, 20), 0.25, "float32")
        arrays["cls_token"] = arrays["cls_token"] - row
        arrays["pos_embed"] = np.concatenate([row, arrays["pos_embed"]], axis=1)
    arrays["mask_token"] = np.zeros((1, 20), "float32")
    path = bare(tmp_path, arrays)
    model = keras_vit.from_pretrained(path, num_heads=5)
    np.testing.assert_allclose(logits(model, images()), expected, atol=1e-5)
    found = inspect(path, num_heads=5)
    assert found.format == "dinov2" and list(found.dropped) == ["mask_token"]
    presets = {0: "dinov2", 2: "huggingface_dinov2_registers"}
    assert found.config.interpolation == presets[registers]


def test_mae_raw_decoder_is_dropped(tmp_path):
    source = sources.timm_vit(num_classes=0)
    decoder = {"decoder_embed.weight": np.ones((4, 20), "float32"), "mask_token": np.ones(4)}
    path = bare(tmp_path, sources.state(source) | decoder)
    assert_same_logits(path, source, num_heads=5)
    assert set(inspect(path, num_heads=5).dropped) == set(decoder)


def test_timm_heads_are_read_from_q_norm(tmp_path):
    path = bare(tmp_path, sources.state(sources.timm_vit(qk_norm=True)))
    assert inspect(path).config.num_heads == 5
    path = bare(tmp_path, sources.state(sources.timm_vit()), "plain.safetensors")
    with pytest.raises(ValueError, match="num_heads must be given"):
        inspect(path)


def distilled_vit():
    from timm.models.deit import VisionTransformerDistilled

    fields = {"img_size": 24, "patch_size": 8, "embed_dim": 20, "depth": 2, "num_heads": 5}
    return sources.randomize(VisionTransformerDistilled(**fields, mlp_ratio=1.4, num_classes=3))


def test_timm_distilled_logits_equal_source(tmp_path):
    source = distilled_vit()
    path = bare(tmp_path, sources.state(source))
    model = assert_same_logits(path, source, num_heads=5, wrong={"norm_epsilon": 0.1})
    assert model.config.pooling == "token_pair" and model.config.num_prefix_rows == 2

    # Both heads, as they are trained with a teacher; each is another function.
    features = model.features()
    both = keras.Model(features.input, model.get_layer("head")(features.output, separate=True))
    source.set_distilled_training()
    expected = torch_output(source.train(), images())  # without dropout
    np.testing.assert_allclose(logits(both, images()), np.stack(expected, axis=1), atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2

    tokens = torch_output(source.forward_features, images()).numpy()
    trunk = keras_vit.from_pretrained(path, num_heads=5, num_classes=0)
    pair = np.concatenate([tokens[:, 0], tokens[:, 1]], axis=1)
    np.testing.assert_allclose(logits(trunk, images()), pair, atol=1e-5)
    token = keras_vit.from_pretrained(path, num_heads=5, num_classes=0, pooling="token")
    np.testing.assert_allclose(logits(token, images()), tokens[:, 0], atol=1e-5)


def test_timm_distilled_at_another_resolution_equals_source(tmp_path):
    source = distilled_vit()
    path = bare(tmp_path, sources.state(source))
    model = keras_vit.from_pretrained(path, num_heads=5, image_size=(40, 32))
    source.set_input_size((40, 32))
    expected = torch_logits(source, images(40, 32))
    np.testing.assert_allclose(logits(model, images(40, 32)), expected, atol=1e-5)
    again = keras_vit.from_pretrained(path, num_heads=5).resized((40, 32))
    np.testing.assert_allclose(logits(again, images(40, 32)), expected, atol=1e-5)


@pytest.mark.backend_free
def test_timm_distilled_new_heads(tmp_path):
    path = bare(tmp_path, sources.state(distilled_vit()))
    new = inspect(path, num_heads=5, num_classes=7)
    assert set(new.dropped) == {
        f"{n}.{k}" for n in ("head", "head_dist") for k in ("weight", "bias")
    }
    assert set(new.dropped.values()) == {"replaced by a new head of 7 classes"}
    model = keras_vit.from_pretrained(path, num_heads=5, num_classes=7)
    assert [w.shape for w in model.get_layer("head").weights] == [(20, 7), (7,)] * 2
    with pytest.raises(ValueError, match=r"missing: '\(for head/kernel\)'.*"):
        keras_vit.from_pretrained(path, num_heads=5, pooling="token")


@pytest.mark.backend_free
def test_timm_distilled_round_trip_is_bitwise_and_timm_loads_it(tmp_path):
    import timm

    source = distilled_vit()
    arrays = sources.state(source)
    model = keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    np.testing.assert_allclose(
        torch_logits(again, images()), torch_logits(source, images()), atol=1e-6
    )
    assert keras_vit.from_pretrained(folder).config == model.config
    changed = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=5)
    assert changed.head_dist.weight.shape == (5, 20)


def test_dinov2_raw_linear_classifier_reads_token_and_mean(tmp_path):
    """The layout of torch.hub's dinov2_*_lc with one layer."""
    source = sources.timm_vit(num_classes=0, init_values=0.1)
    rng = np.random.default_rng(5)
    weight, bias = rng.normal(size=(3, 40)).astype("f"), rng.normal(size=3).astype("f")
    arrays = {f"backbone.{k}": v for k, v in sources.state(source).items()}
    arrays |= {"backbone.mask_token": np.zeros((1, 20), "f")}
    arrays |= {"linear_head.weight": weight, "linear_head.bias": bias}
    tokens = torch_output(source.forward_features, images()).numpy()
    read = np.concatenate([tokens[:, 0], tokens[:, 1:].mean(1)], axis=1)
    model = assert_same_logits(
        bare(tmp_path, arrays), lambda batch: read @ weight.T + bias, num_heads=5
    )
    assert model.config.pooling == "token_mean" and model.output_shape == (None, 3)
    arrays["linear_head.weight"] = np.ones((3, 100), "f")  # of four layers
    with pytest.raises(ValueError, match=r"wrong shape: 'linear_head.weight' \(3, 100\)"):
        keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)
    assert (
        keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5, num_classes=0).config.pooling
        == "token"
    )


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre_norm": True}, "CLIP"),
    ],
)
def test_timm_other_architectures_are_named(tmp_path, fields, message):
    path = bare(tmp_path, sources.state(sources.timm_vit(**fields)))
    with pytest.raises(ValueError, match=message):
        keras_vit.from_pretrained(path, num_heads=5)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_base_patch16_rope_ape_224", "rotary positions"),
        ("vit_base_patch16_dinov3.lvd1689m", "rotary positions"),
        ("vit_base_patch16_rpn_224", "LayerNorm after each branch"),
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
    with pytest.raises(ValueError, match="pass block_norm='pre'"):
        keras_vit.from_pretrained(path, num_heads=5)
    source = sources.timm_vit(**fields)
    path = bare(tmp_path, sources.state(source), "plain.safetensors")
    assert_same_logits(path, source, num_heads=5, block_norm="pre")


@pytest.mark.backend_free
def test_timm_assumptions_are_reported(tmp_path, caplog):
    path = bare(tmp_path, sources.state(sources.timm_vit(embed_dim=64, num_heads=1)))
    assumed = {"gelu": "exact", "norm_epsilon": 1e-6, "num_heads": 1, "pooling": "token"}
    assert inspect(path, position_embedding="learned").assumed == assumed
    assert inspect(path).assumed == assumed | {"position_embedding": "learned"}
    keras_vit.from_pretrained(path)
    assert "Assumed: gelu='exact', norm_epsilon=1e-06, num_heads=1, pooling='token'" in caplog.text
    stated = {"gelu": "tanh", "norm_epsilon": 1e-5, "num_heads": 2, "pooling": "mean"}
    stated["position_embedding"] = "learned"
    assert inspect(path, **stated).assumed == {}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 5}}
    folder = sources.save(tmp_path / "folder", sources.state(sources.timm_vit()), config)
    assert inspect(folder).assumed == {}


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
    fields = {"num_heads": 5, "gelu": "exact", "norm_epsilon": 1e-6}
    fields["position_embedding"] = "learned"
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

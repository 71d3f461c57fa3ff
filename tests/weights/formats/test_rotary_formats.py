"""Models with rotary positions: timm's Eva, and DINOv3 of transformers and in raw files."""

import json

import numpy as np
import pytest
import weights_sources as sources
from conformance import arrays
from weights_sources import assert_same_logits, bare, images, logits, torch_logits

import keras_vit
from keras_vit.weights.load import inspect

TINY = {
    "img_size": 24,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 3,
}
# An architecture of each kind; timm's functions take the sizes as arguments.
KINDS = {
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_dinov3_qkvb": {},
    "vit_small_plus_patch16_dinov3": {},
    "vit_small_patch16_lingbot": {},
    "eva02_tiny_patch14_224": {},
    "eva02_base_patch14_448": {},
    "eva_giant_patch14_224": {},
    "vit_medium_patch16_rope_reg1_gap_256": {},
    "vit_betwixt_patch16_rope_reg4_gap_256": {},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_ape_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_rope_mixed_ape_224": {},
}
WRONG = {
    "rope": {"rope_base": 3.0},
    "rope_mixed": {"rope_order": "rows_first"},
    "": {"norm_epsilon": 0.1},
}


def timm_eva(name):
    """A tiny random model of one of timm's functions, and the config.json that states it."""
    import timm

    source = sources.randomize(timm.create_model(name, **TINY))
    arguments = {key: value for key, value in TINY.items() if key != "num_classes"}
    return source, {"architecture": name, "num_classes": 3, "model_args": arguments}


def wrong(config):
    return WRONG[config.attention_positions or ""]


@pytest.mark.parametrize("name", KINDS)
def test_timm_rotary_logits_equal_source(tmp_path, name):
    source, config = timm_eva(name)
    folder = sources.save(tmp_path / "folder", sources.state(source), config)
    info = inspect(folder)
    assert info.format == "timm" and set(info.assumed) == {"pixel_mean", "pixel_std"}
    assert_same_logits(folder, source, wrong(info.config))


@pytest.mark.backend_free
@pytest.mark.parametrize("name", KINDS)
def test_timm_rotary_resolution_equals_source(tmp_path, name):
    source, config = timm_eva(name)
    folder = sources.save(tmp_path / "folder", sources.state(source), config)
    info = inspect(folder)
    source.set_input_size(img_size=(40, 16))
    changed = wrong(info.config) if info.config.attention_positions else None
    model = assert_same_logits(folder, source, changed, image_size=(40, 16))
    # `resized` has the same rules.
    again = keras_vit.from_pretrained(folder).resized((40, 16))
    batch = images(40, 16)
    np.testing.assert_allclose(logits(again, batch), logits(model, batch), atol=1e-6)


@pytest.mark.backend_free
@pytest.mark.parametrize("name", KINDS)
def test_timm_rotary_bare_file_needs_a_word_on_its_positions(tmp_path, name):
    source, config = timm_eva(name)
    folder = sources.save(tmp_path / "folder", sources.state(source), config)
    stated = inspect(folder).config
    path = bare(tmp_path, sources.state(source))
    fields = ("num_heads", "norm_epsilon", "pooling", "position_embedding", "rope_base")
    fields += ("rope_coordinates", "rope_order", "rope_pairs", "rope_grid")
    given = {field: getattr(stated, field) for field in fields} | {"image_size": 24}
    given["block_norm"] = "pre"  # the names of eva02_enormous are the same
    assert_same_logits(path, source, wrong(stated), **given)
    del given["position_embedding"]
    if "_ape_" in name and "mixed" not in name or "giant" in name:
        assert "position_embedding" in inspect(path, **given).assumed  # DeiT-III has these names
    elif "mixed" in name:  # whose frequencies are an array
        assert_same_logits(path, source, **given)
    else:
        with pytest.raises(ValueError, match="position_embedding.* must be passed"):
            inspect(path, **given)


@pytest.mark.backend_free
def test_timm_rotary_fields_that_nobody_states_are_assumed(tmp_path):
    source, _ = timm_eva("vit_small_patch16_dinov3")
    path = bare(tmp_path, sources.state(source))
    info = inspect(path, num_heads=4, position_embedding="rope", rope_base=100.0, image_size=24)
    assert {"rope_order", "rope_pairs", "rope_coordinates", "rope_grid"} <= set(info.assumed)
    assert not {"rope_base", "position_embedding"} & set(info.assumed)


@pytest.mark.backend_free
def test_raw_eva02_tables_are_refused(tmp_path):
    source, _ = timm_eva("eva02_base_patch14_448")
    arrays = sources.state(source) | {"rope.freqs_cos": np.ones((9, 8), "float32")}
    with pytest.raises(ValueError, match="tables of rotary positions"):
        inspect(bare(tmp_path, arrays))


# -- transformers


def huggingface_dinov3(tmp_path, **fields):
    """A random model of transformers and the folder that it writes."""
    import transformers

    sizes = {
        "image_size": 24,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 28,
        "num_register_tokens": 2,
    }
    config = transformers.DINOv3ViTConfig(**sizes | fields)
    source = sources.randomize(transformers.DINOv3ViTModel(config))
    source.save_pretrained(tmp_path / "source")
    return source, tmp_path / "source"


HUGGINGFACE = {
    "plain": {},
    "gated": {"use_gated_mlp": True, "hidden_act": "silu"},
    "key bias": {"key_bias": True},
    "no biases": {"query_bias": False, "value_bias": False},
    "base": {"rope_theta": 30.0, "layer_norm_eps": 1e-3, "num_register_tokens": 0},
    "not square": {"image_size": [16, 40], "num_channels": 1},
}


@pytest.mark.parametrize("kind", HUGGINGFACE)
def test_huggingface_dinov3_equals_source(tmp_path, kind):
    source, folder = huggingface_dinov3(tmp_path, **HUGGINGFACE[kind])
    model = assert_same_logits(folder, source, {"rope_base": 3.0})
    gray = model.config.in_channels == 1  # DINOv3's statistics are of three channels
    assert set(inspect(folder).assumed) == ({"pixel_mean", "pixel_std"} if gray else set())
    assert_same_logits(folder, source, {"rope_base": 3.0}, image_size=(32, 24))
    assert model.config.pooling == "token" and not model.config.num_classes


@pytest.mark.backend_free
def test_huggingface_dinov3_names_in_memory_are_read(tmp_path):
    source, folder = huggingface_dinov3(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    other = sources.save(tmp_path / "new", sources.state(source), config)
    assert_same_logits(other, source)
    path = bare(tmp_path, sources.state(source))
    assert set(inspect(path).assumed) == {"gelu", "norm_epsilon", "num_heads", "rope_base"}
    assert_same_logits(path, source, num_heads=4, image_size=24)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "vit"}, "model_type in config.json must be"),
        ({"hidden_act": "relu"}, "hidden_act in config.json must be"),
        ({"rope_theta": "100"}, "state rope_theta as a finite number"),
    ],
)
def test_huggingface_dinov3_refuses_other_configs(tmp_path, changes, message):
    _, folder = huggingface_dinov3(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        inspect(folder)


@pytest.mark.backend_free
def test_huggingface_dinov3_gate_must_be_silu(tmp_path):
    _, folder = huggingface_dinov3(tmp_path, use_gated_mlp=True, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act in config.json must be 'silu'"):
        inspect(folder)


# -- raw files


def raw_dinov3(name="vit_small_patch16_dinov3_qkvb"):
    """A tiny model of timm, and its arrays as DINOv3's own code stores them."""
    import timm

    source = sources.randomize(timm.create_model(name, **TINY | {"num_classes": 0}))
    source.reset_classifier(0, "token")
    names = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    names |= {"fc1_g": "w1", "fc1_x": "w2", "mlp.fc2": "mlp.w3"} if "plus" in name else {}
    arrays = {}
    for key, array in sources.state(source).items():
        for theirs, rawly in names.items():
            key = key.replace(theirs, rawly)
        arrays[key] = array
    rng = np.random.default_rng(0)
    for i in range(TINY["depth"]):
        query, value = (arrays.pop(f"blocks.{i}.attn.{part}_bias") for part in "qv")
        unused = rng.normal(size=32).astype("float32")  # what the mask multiplies by 0
        arrays[f"blocks.{i}.attn.qkv.bias"] = np.concatenate([query, unused, value])
        mask = np.repeat(np.array([1, 0, 1], "float32"), 32)
        arrays[f"blocks.{i}.attn.qkv.bias_mask"] = mask
    arrays["mask_token"] = np.ones((1, 32), "float32")
    periods = (100.0 ** (np.arange(2) / 2)).astype("float32")
    arrays["rope_embed.periods"] = _bfloat16(periods)
    return source, arrays


def _bfloat16(array):
    return (array.view("uint32") & 0xFFFF0000).view("float32")


@pytest.mark.parametrize("size", ["small", "small_plus"])
def test_raw_dinov3_equals_source(tmp_path, size):
    source, arrays = raw_dinov3(f"vit_{size}_patch16_dinov3_qkvb")
    path = bare(tmp_path, arrays)
    info = inspect(path, image_size=24)
    assert (info.format, info.config.num_heads, dict(info.assumed)) == ("dinov3", 4, {})
    assert_same_logits(path, source, {"rope_order": "columns_first"}, image_size=24)
    source.set_input_size(img_size=(40, 16))
    assert_same_logits(path, source, {"rope_order": "columns_first"}, image_size=(40, 16))


@pytest.mark.backend_free
def test_raw_dinov3_without_a_mask_has_a_key_bias(tmp_path):
    _, arrays = raw_dinov3()
    whole = {key: array for key, array in arrays.items() if not key.endswith("bias_mask")}
    model = keras_vit.from_pretrained(bare(tmp_path, whole), image_size=24)
    bias = arrays["blocks.1.attn.qkv.bias"][32:64].reshape(4, 8)
    np.testing.assert_array_equal(model.blocks[1].attention.key_dense.bias, bias)


@pytest.mark.backend_free
def test_raw_dinov3_periods_must_be_the_computed_ones(tmp_path):
    _, arrays = raw_dinov3()
    path = bare(tmp_path, arrays)
    with pytest.raises(ValueError, match="rope_base must be that of the periods"):
        keras_vit.from_pretrained(path, image_size=24, rope_base=90.0)
    arrays["rope_embed.periods"] = np.array([1.0, 8.0], "float32")
    with pytest.raises(ValueError, match="rope_base must be that of the periods"):
        keras_vit.from_pretrained(bare(tmp_path, arrays, "other.safetensors"), image_size=24)
    model = keras_vit.from_pretrained(tmp_path / "other.safetensors", image_size=24, rope_base=64.0)
    assert model.config.rope_base == 64.0


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cls_norm.weight", "a LayerNorm of its own for the class token"),
        ("blocks.0.attn.wq.weight", "fewer keys than queries"),
    ],
)
def test_raw_dinov3_refuses_other_models(tmp_path, name, message):
    _, arrays = raw_dinov3()
    path = bare(tmp_path, arrays | {name: np.ones(32, "float32")})
    with pytest.raises(ValueError, match=message):
        inspect(path, image_size=24)


WRITTEN = {
    "plain": {},
    "gated": {"mlp": "swiglu", "num_registers": 0, "qkv_bias": False, "key_bias": True},
    "other numbers": {"key_bias": True, "gelu": "tanh", "rope_base": 30.0, "norm_epsilon": 1e-3},
    "not square": {"image_size": (16, 40), "patch_size": (8, 4), "in_channels": 1},
}


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", WRITTEN)
def test_huggingface_dinov3_is_written_strictly_and_bitwise(tmp_path, kind):
    import transformers

    model = random_dinov3(**WRITTEN[kind])
    folder = keras_vit.save_pretrained(model, tmp_path / "out", format="huggingface_dinov3")
    source, loading = transformers.DINOv3ViTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    batch = images(*model.config.input_shape)
    np.testing.assert_allclose(torch_logits(source.eval(), batch), logits(model, batch), atol=1e-5)
    again = keras_vit.from_pretrained(folder)
    assert again.config.replace(pixel_mean=0.5, pixel_std=0.5) == model.config.replace(
        interpolation=again.config.interpolation
    )
    found, expected = arrays(again), arrays(model)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)


def random_dinov3(**fields):
    """A random model of the kind that transformers has."""
    config = {
        "image_size": 24,
        "patch_size": 8,
        "width": 32,
        "depth": 2,
        "num_heads": 4,
        "mlp_dim": 28,
        "num_classes": 0,
        "key_bias": False,
        "norm_epsilon": 1e-5,
        "layer_scale": 0.5,
        "num_registers": 2,
        "position_embedding": "rope",
    }
    model = keras_vit.ViT(keras_vit.ViTConfig(**{**config, **fields}))
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape) * 0.5)
    return model


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_coordinates": "index"}, "rope_coordinates must be 'centered'"),
        ({"rope_order": "columns_first"}, "rope_order must be 'rows_first'"),
        ({"rope_pairs": "neighbors"}, "rope_pairs must be 'halves'"),
        ({"rope_offset": 0.5}, "rope_offset must be 0.0"),
        ({"position_embedding": "rope_mixed"}, "position_embedding must be 'rope'"),
        ({"num_classes": 3}, "num_classes must be 0"),
        ({"layer_scale": None}, "layer_scale must be a number"),
        ({"pooling": "mean"}, "pooling must be 'token'"),
    ],
)
def test_huggingface_dinov3_says_what_it_cannot_express(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        keras_vit.save_pretrained(
            random_dinov3(**fields), tmp_path / "out", format="huggingface_dinov3"
        )


@pytest.mark.backend_free
def test_rotary_models_are_not_written_in_formats_without_them(tmp_path):
    from keras_vit.weights.formats import WRITABLE
    from keras_vit.weights.save import save_pretrained

    model = random_dinov3(num_classes=3)
    for format in WRITABLE:
        with pytest.raises(ValueError, match="position_embedding must be|num_classes must be 0"):
            save_pretrained(model, tmp_path / format, format=format)

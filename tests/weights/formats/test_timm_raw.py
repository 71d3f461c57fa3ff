"""Raw state dicts of DeiT-III, DINOv2 and MAE, against timm's code."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, images, logits, torch_logits, torch_output

import keras_vit
from keras_vit.weights.load import inspect


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

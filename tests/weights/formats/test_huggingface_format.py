"""transformers' ViT, DeiT, ViT-MAE and DINOv2 against transformers."""

import json

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import (
    assert_same_logits,
    images,
    logits,
    torch_logits,
    torch_output,
)

import keras_vit
from keras_vit.preprocessing import covering
from keras_vit.weights.formats.table import per_channel
from keras_vit.weights.load import inspect

KINDS = {
    "ViTForImageClassification": {},
    "ViTModel": {},
    "ViTForImageClassification, not square": {"image_size": [24, 16], "patch_size": [8, 4]},
    "ViTForImageClassification, tanh": {"hidden_act": "gelu_pytorch_tanh", "qkv_bias": False},
    "ViTForImageClassification, epsilon": {"layer_norm_eps": 1e-2, "num_channels": 1},
    "ViTForImageClassification, quick": {"hidden_act": "quick_gelu"},
    "IJepaForImageClassification": {},
    "DeiTForImageClassification": {},
    "DeiTForImageClassificationWithTeacher": {},
    "DeiTModel": {},
    "Dinov2Model": {},
    "Dinov2WithRegistersModel": {},
    "Dinov2Model, swiglu": {"use_swiglu_ffn": True, "mlp_ratio": 2},
    "Dinov2WithRegistersModel, swiglu": {"use_swiglu_ffn": True, "mlp_ratio": 2},
    "Dinov2ForImageClassification": {},
    "Dinov2WithRegistersForImageClassification": {},
}


def saved(tmp_path, kind, **fields):
    """A random model of transformers and the folder that it writes."""
    source = sources.huggingface_vit(kind.split(",")[0], **fields)
    source.save_pretrained(tmp_path / "source")
    return source, tmp_path / "source"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_huggingface_logits_equal_source(tmp_path, kind):
    source, folder = saved(tmp_path, kind, **KINDS[kind])
    assert_same_logits(folder, source, wrong={"norm_epsilon": 0.1})


@pytest.mark.parametrize(
    "kind", ["ViTForImageClassification", "Dinov2Model", "Dinov2Model, swiglu"]
)
@pytest.mark.parametrize("prefix", ["", "encoder_q."])
def test_huggingface_names_in_memory_are_read(tmp_path, kind, prefix):
    source, folder = saved(tmp_path, kind, **KINDS[kind])
    config = json.loads((folder / "config.json").read_text())
    arrays = {prefix + name: array for name, array in sources.state(source).items()}
    other = sources.save(tmp_path / "new", arrays, config)
    if prefix and kind == "ViTForImageClassification":
        with pytest.raises(ValueError, match="encoder_q.classifier"):
            keras_vit.from_pretrained(other)  # a prefix in front of the head is nobody's
        return
    np.testing.assert_array_equal(
        logits(keras_vit.from_pretrained(other), images()),
        logits(keras_vit.from_pretrained(folder), images()),
    )


@pytest.mark.backend_free
def test_huggingface_pooler_is_pre_logits_where_it_is_used(tmp_path):
    source, folder = saved(tmp_path, "ViTModel", pooler_output_size=6)
    model = keras_vit.from_pretrained(folder)
    assert model.config.representation_size == 6 and model.config.num_classes == 0
    new = inspect(folder, num_classes=4)
    assert new.config.representation_size is None
    assert set(new.dropped) == {"pooler.dense.weight", "pooler.dense.bias"}
    arrays = sources.state(source) | {
        "classifier.weight": np.ones((3, 20), "float32"),
        "classifier.bias": np.ones(3, "float32"),
    }
    config = json.loads((folder / "config.json").read_text())
    other = inspect(sources.save(tmp_path / "head", arrays, config))
    assert other.config.representation_size is None and other.config.num_classes == 3
    assert set(other.dropped) == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.backend_free
def test_huggingface_pooler_with_another_activation_is_refused(tmp_path):
    _, folder = saved(tmp_path, "ViTModel", pooler_act="relu")
    with pytest.raises(ValueError, match="pooler_act='relu'"):
        keras_vit.from_pretrained(folder)
    assert inspect(folder, representation_size=None).config.representation_size is None
    assert inspect(folder, num_classes=4).config.representation_size is None


@pytest.mark.backend_free
def test_huggingface_model_type_must_be_a_plain_vit(tmp_path):
    """The backbone of RF-DETR has DINOv2's arrays, and attends within windows."""
    source, folder = saved(tmp_path, "Dinov2Model")
    config = json.loads((folder / "config.json").read_text())
    other = {**config, "model_type": "rf_detr_dinov2"}
    with pytest.raises(ValueError, match="model_type='rf_detr_dinov2'"):
        keras_vit.from_pretrained(sources.save(tmp_path / "other", sources.state(source), other))
    unknown = {"model_type": "dinov3_vit"}
    arrays = {"embeddings.patch_embeddings.weight": np.ones((2, 2), "float32")}
    with pytest.raises(ValueError, match="model_type='dinov3_vit'"):
        keras_vit.from_pretrained(sources.save(tmp_path / "unknown", arrays, unknown))


@pytest.mark.backend_free
def test_huggingface_defaults_are_those_of_transformers():
    import transformers

    from keras_vit.weights.formats import huggingface_config

    for kind, (epsilon, size) in huggingface_config.MODEL_TYPES.items():
        config = transformers.AutoConfig.for_model(kind)
        stated = huggingface_config.stated_fields({"model_type": kind}, {}, 3)
        assert config.layer_norm_eps == epsilon == stated["norm_epsilon"]
        assert config.hidden_act == "gelu" and stated["gelu"] == "exact"
        assert config.num_attention_heads == stated["num_heads"] == 12
        assert config.image_size == size == stated["image_size"]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "epsilon"),
    [("ViTForImageClassification", 1e-12), ("ViTModel", 1e-12), ("Dinov2Model", 1e-6)],
)
def test_huggingface_file_without_config_has_defaults_which_are_reported(tmp_path, kind, epsilon):
    _, folder = saved(tmp_path, kind)
    # ViTs were published with several statistics, DINOv2 with ImageNet's.
    pixels = {} if "Dinov2" in kind else {"pixel_mean": 0.5, "pixel_std": 0.5}
    assert inspect(folder).assumed == pixels and inspect(folder).config.norm_epsilon == epsilon
    # Under another name no config.json is read.
    path = (folder / "model.safetensors").rename(folder / "vit.safetensors")
    assumed = {"gelu": "exact", "norm_epsilon": epsilon, **pixels}
    assert inspect(path, num_heads=5).assumed == assumed


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "mean", "method", "crop"),
    [
        ("DeiTModel", (0.485, 0.456, 0.406), "bicubic", 0.875),
        ("Dinov2Model", (0.485, 0.456, 0.406), "bicubic", 0.875),
        ("Dinov2WithRegistersModel", (0.485, 0.456, 0.406), "bicubic", 0.875),
        ("ViTMAEModel", (0.485, 0.456, 0.406), "bilinear", None),
    ],
)
def test_huggingface_pixels_without_a_processor_are_the_familys(
    tmp_path, caplog, kind, mean, method, crop
):
    _, folder = saved(tmp_path, kind)
    found = inspect(folder)
    assert (found.config.pixel_mean, found.config.pixel_std) == (mean, (0.229, 0.224, 0.225))
    assert (found.config.resize_method, found.config.crop_fraction) == (method, crop)
    assert found.assumed == {}
    # What a file states precedes them, and "no crop" is a statement.
    pixels = {"image_mean": [0.1] * 3, "do_center_crop": False, "resample": 0}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    config = inspect(folder).config
    assert (config.pixel_mean, config.pixel_std) == (0.1, (0.229, 0.224, 0.225))
    assert (config.resize_method, config.crop_fraction) == ("nearest", None)
    _, gray = saved(tmp_path / "gray", kind, num_channels=1)
    assert set(inspect(gray).assumed) == {"pixel_mean", "pixel_std"}
    keras_vit.from_pretrained(gray)
    assert "does not state pixel_mean and pixel_std. Assumed: pixel_mean=0.5" in caplog.text


@pytest.mark.backend_free
@pytest.mark.parametrize(("size", "crop"), [(224, 0.9), (384, 0.95), (192, 192 / 225), (24, 0.7)])
def test_huggingface_preprocessor_is_written_with_the_size_that_we_resize_to(tmp_path, size, crop):
    """0.9, 0.95 and 0.7 do not divide the size: 248.9, 404.2 and 34.3 become 248, 404 and 34."""
    from keras_vit.weights.formats import huggingface_config

    config = keras_vit.ViTConfig(image_size=size, patch_size=8, crop_fraction=crop)
    written = huggingface_config.preprocessor_json(config)
    edge = {0.9: 248, 0.95: 404, 0.7: 34}.get(crop, 225)
    assert written["size"] == {"shortest_edge": edge}
    stated = huggingface_config.stated_fields({}, written, 3)
    again = config.replace(crop_fraction=stated["crop_fraction"])
    for height, width in ((300, 400), (500, 333)):
        assert covering(height, width, again) == covering(height, width, config)
        assert min(covering(height, width, config)) == edge


def test_huggingface_ijepa_without_a_head_averages_its_tokens(tmp_path):
    source, folder = saved(tmp_path, "IJepaModel")
    assert_same_logits(
        folder, lambda batch: torch_output(source, batch).last_hidden_state.mean(1).numpy()
    )
    found = inspect(folder).config
    assert not found.class_token and found.pooling == "mean"


def test_huggingface_distilled_trunk_is_the_librarys(tmp_path):
    source, folder = saved(tmp_path, "DeiTForImageClassificationWithTeacher")
    tokens = torch_output(source.deit, images())[0].numpy()
    model = keras_vit.from_pretrained(folder, num_classes=0)
    pair = np.concatenate([tokens[:, 0], tokens[:, 1]], axis=1)
    np.testing.assert_allclose(logits(model, images()), pair, atol=1e-5)
    new = inspect(folder, num_classes=4)
    assert len(new.dropped) == 4 and new.config.pooling == "token_pair"
    token = keras_vit.from_pretrained(folder, num_classes=4, pooling="token")
    assert token.get_layer("head").kernel.shape == (20, 4)


def test_huggingface_mae_decoder_is_dropped(tmp_path):
    source = sources.huggingface_vit(
        "ViTMAEForPreTraining",
        decoder_hidden_size=16,
        decoder_num_attention_heads=4,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=24,
        mask_ratio=0.0,
    )
    source.save_pretrained(tmp_path / "mae")
    model = keras_vit.from_pretrained(tmp_path / "mae")
    import torch

    noise = torch.arange(9.0).repeat(2, 1)  # keeps the patches in order
    tokens = torch_output(source.vit, images(), noise=noise).last_hidden_state
    np.testing.assert_allclose(logits(model, images()), tokens[:, 0].numpy(), atol=1e-5)
    reasons = set(inspect(tmp_path / "mae").dropped.values())
    assert reasons == {"the decoder of pretraining"}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("ViTForImageClassification", (40, 40)),
        ("ViTForImageClassification", (16, 56)),
        ("DeiTForImageClassification", (32, 48)),
        ("IJepaForImageClassification", (16, 48)),
        ("DeiTForImageClassificationWithTeacher", (32, 48)),
        ("Dinov2ForImageClassification", (40, 24)),
        ("Dinov2Model", (40, 24)),
        ("Dinov2WithRegistersModel", (40, 32)),
    ],
)
def test_huggingface_resolution_equals_source(tmp_path, kind, size):
    source, folder = saved(tmp_path, kind)
    # DINOv2 always interpolates, the others only on request.
    options = {} if "Dino" in kind else {"interpolate_pos_encoding": True}
    assert_same_logits(
        folder,
        lambda batch: torch_logits(source, batch, **options),
        wrong={"interpolation": "google"},
        image_size=size,
    )


@pytest.mark.backend_free
def test_huggingface_labels_and_pixels_come_along(tmp_path):
    _, folder = saved(tmp_path, "ViTForImageClassification")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"2": "c", "0": "a", "1": "b"}
    (folder / "config.json").write_text(json.dumps(config))
    pixels = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "do_center_crop": True,
        "size": 28,
        "crop_size": 24,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    found = inspect(folder).config
    assert found.labels == ("a", "b", "c")
    assert found.pixel_mean == (0.1, 0.2, 0.3) and found.pixel_std == 0.5
    assert found.resize_method == "bicubic" and found.crop_fraction == 24 / 28
    assert inspect(folder, in_channels=1).config.pixel_mean == pytest.approx(0.2)
    assert inspect(folder, in_channels=4).config.pixel_mean == (0.1, 0.2, 0.3, 0.1)


def test_huggingface_unknown_activation_is_named(tmp_path):
    _, folder = saved(tmp_path, "ViTForImageClassification", hidden_act="relu")
    with pytest.raises(ValueError, match="hidden_act.*relu"):
        keras_vit.from_pretrained(folder)


WRITTEN = [k for k in KINDS if k.startswith(("ViT", "DeiT"))]


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", WRITTEN)
def test_huggingface_round_trip_is_bitwise_and_transformers_loads_it(tmp_path, kind):
    import transformers
    from safetensors.numpy import load_file

    source, folder = saved(tmp_path, kind, **KINDS[kind])
    model = keras_vit.from_pretrained(folder)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="huggingface")
    arrays = load_file(folder / "model.safetensors")
    sources.assert_same_file(back / "model.safetensors", arrays)
    again, info = getattr(transformers, kind.split(",")[0]).from_pretrained(
        back, output_loading_info=True
    )
    assert not any(info.values()), info
    batch = images(*model.config.input_shape)
    np.testing.assert_allclose(
        torch_logits(again.eval(), batch), torch_logits(source, batch), atol=1e-6
    )
    processor = transformers.AutoImageProcessor.from_pretrained(back)
    channels = model.config.in_channels
    assert list(processor.image_mean) == per_channel(model.config.pixel_mean, channels)
    found, config = inspect(back).config, model.config
    # Of a crop the file states whole pixels.
    assert found.replace(crop_fraction=config.crop_fraction) == config
    assert covering(50, 70, found) == covering(50, 70, config)

"""transformers' image towers of image-text models against transformers."""

import json

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, images, logits, torch_logits, torch_output

import keras_vit
from keras_vit.weights.formats import huggingface_clip
from keras_vit.weights.load import inspect

KINDS = {
    "SiglipVisionModel": {},
    "SiglipVisionModel, larger": {"image_size": 40},
    "SiglipVisionModel, exact": {"hidden_act": "gelu", "layer_norm_eps": 1e-2, "num_channels": 1},
    "SiglipForImageClassification": {},
    "SiglipModel": {},
}


def saved(tmp_path, kind, **fields):
    """A random model of transformers and the folder that it writes."""
    source = sources.huggingface_vit(kind.split(",")[0], **fields)
    source.save_pretrained(tmp_path / "source")
    return source, tmp_path / "source"


@pytest.mark.parametrize("kind", KINDS)
def test_siglip_equals_source(tmp_path, kind):
    source, folder = saved(tmp_path, kind, **KINDS[kind])
    whole = getattr(source, "vision_model", source) if kind == "SiglipModel" else source
    model = assert_same_logits(folder, whole, wrong={"norm_epsilon": 0.1})
    assert model.config.gelu == ("exact" if "exact" in kind else "tanh")
    classifier = kind == "SiglipForImageClassification"
    assert model.config.pooling == ("mean" if classifier else "map")
    assert model.config.num_classes == (3 if classifier else 0)


@pytest.mark.parametrize("kind", ["SiglipVisionModel", "SiglipForImageClassification"])
def test_siglip_equals_source_at_another_resolution(tmp_path, kind):
    source, folder = saved(tmp_path, kind)
    model = keras_vit.from_pretrained(folder, image_size=40)
    batch = images(40)
    expected = torch_logits(source, batch, interpolate_pos_encoding=True)
    np.testing.assert_allclose(logits(model, batch), expected, atol=1e-5)
    other = keras_vit.from_pretrained(folder, image_size=40, interpolation="timm")
    assert np.abs(logits(other, batch) - expected).max() > 1e-3


def test_siglip_of_a_size_that_is_no_multiple_of_its_patches(tmp_path):
    """So400m/14 at 384 pixels, whose last 6 rows and columns its convolution does not reach."""
    source, folder = saved(tmp_path, "SiglipVisionModel", image_size=28)
    model = keras_vit.from_pretrained(folder)
    assert model.config.image_size == (28, 28) and model.config.grid == (3, 3)
    batch = images(28)
    expected = torch_logits(source, batch)
    np.testing.assert_allclose(logits(model, batch), expected, atol=1e-5)
    moved = np.roll(batch, -4, axis=(1, 2))
    assert np.abs(logits(model, moved) - expected).max() > 1e-2


def test_siglip_without_its_pooling_averages_tokens(tmp_path):
    """As the library's own classifier does, with and without arrays of attention pooling."""
    source, folder = saved(tmp_path, "SiglipVisionModel")
    tokens = torch_output(source, images()).last_hidden_state.numpy()
    mean = keras_vit.from_pretrained(folder, pooling="mean")
    np.testing.assert_allclose(logits(mean, images()), tokens.mean(1), atol=1e-5)
    np.testing.assert_allclose(logits(mean.features("tokens"), images()), tokens, atol=1e-5)
    _, bare = saved(tmp_path / "bare", "SiglipVisionModel", vision_use_head=False)
    assert inspect(bare).config.pooling == "mean"


@pytest.mark.backend_free
def test_siglip_names_what_is_not_loaded(tmp_path):
    _, folder = saved(tmp_path, "SiglipModel")
    dropped = inspect(folder).dropped
    assert dropped["text_model.embeddings.token_embedding.weight"].startswith("the text tower")
    assert dropped["logit_scale"] == dropped["logit_bias"] == "the loss of an image-text model"
    assert not [name for name in dropped if name.startswith("vision_model.")]
    mean = inspect(folder, pooling="mean").dropped
    assert mean["vision_model.head.probe"] == "not used: pooling='mean'"
    _, folder = saved(tmp_path / "classifier", "SiglipForImageClassification")
    assert inspect(folder).dropped["vision_model.head.probe"].startswith("attention pooling that")
    assert inspect(folder, num_classes=5).config.pooling == "mean"


@pytest.mark.backend_free
def test_siglip_prefix_of_older_files_and_defaults_that_a_config_omits(tmp_path):
    source, folder = saved(tmp_path, "SiglipVisionModel", hidden_size=24, num_attention_heads=12)
    arrays = {f"vision_model.{k}": v for k, v in sources.state(source).items()}
    expected = inspect(folder).config
    for config in (
        {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}},
        {"model_type": "siglip_vision_model"},
        {"model_type": "siglip"},
    ):
        found = inspect(sources.save(tmp_path / "old", arrays, config))
        assert found.config == expected and not found.assumed
    found = inspect(sources.bare(tmp_path, arrays), num_heads=12)
    assert found.config == expected
    assert found.assumed == {"gelu": "tanh", "norm_epsilon": 1e-6}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "siglip2_text_model"},
        {"model_type": "siglip", "vision_config": {"model_type": "blip_2_vision_model"}},
        {"model_type": ["siglip"]},
    ],
)
def test_siglip_other_model_types_are_refused(tmp_path, config):
    source, _ = saved(tmp_path, "SiglipVisionModel")
    folder = sources.save(tmp_path / "other", sources.state(source), config)
    rules = "must state model_type as a string|model_type in config.json must be one of"
    with pytest.raises(ValueError, match=rules):
        keras_vit.from_pretrained(folder)


@pytest.mark.backend_free
def test_siglip_arrays_that_are_unknown_are_refused(tmp_path):
    source, folder = saved(tmp_path, "SiglipVisionModel")
    config = json.loads((folder / "config.json").read_text())
    arrays = sources.state(source)
    more = arrays | {"encoder.layers.0.gate": np.ones(3, "float32")}
    with pytest.raises(ValueError, match=r"extra: 'encoder\.layers\.0\.gate'"):
        keras_vit.from_pretrained(sources.save(tmp_path / "more", more, config))
    less = {k: v for k, v in arrays.items() if k != "head.mlp.fc2.bias"}
    with pytest.raises(ValueError, match=r"missing: 'head\.mlp\.fc2\.bias'"):
        keras_vit.from_pretrained(sources.save(tmp_path / "less", less, config))


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("SiglipVisionModel", {}),
        ("SiglipVisionModel", {"hidden_act": "gelu", "layer_norm_eps": 1e-2}),
        ("SiglipVisionModel", {"vision_use_head": False}),
        ("SiglipForImageClassification", {"num_channels": 1, "vision_use_head": False}),
    ],
)
def test_siglip_round_trip_is_bitwise_and_transformers_loads_it(tmp_path, kind, fields):
    import transformers

    source, folder = saved(tmp_path, kind, **fields)
    model = keras_vit.from_pretrained(folder)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="huggingface_clip")
    arrays = {
        name if name.startswith(("vision_model.", "classifier.")) else f"vision_model.{name}": value
        for name, value in sources.state(source).items()
    }
    sources.assert_same_file(back / "model.safetensors", arrays)
    again, info = getattr(transformers, kind).from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    ours, theirs = (module.eval().state_dict() for module in (again, source))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    for name in ("hidden_act", "layer_norm_eps", "image_size"):
        one, two = (getattr(m.config, "vision_config", m.config) for m in (again, source))
        assert getattr(one, name) == getattr(two, name)
    assert keras_vit.from_pretrained(back).config == model.config


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "map"}, "pooling must be 'mean' if there is a head"),
        ({"pooling": "map", "num_classes": 0, "pooling_heads": 4}, "pooling_heads and"),
        ({"pooling": "mean_all"}, "pooling must be 'map' or 'mean', it is 'mean_all'"),
        ({"pooling": "mean", "image_size": (24, 16)}, "image_size and patch_size must be squares"),
        ({"class_token": True}, "class_token must be False"),
    ],
)
def test_siglip_what_cannot_be_written_is_named(tmp_path, fields, message):
    model = sources.random_vit(**{"class_token": False, **fields})
    with pytest.raises(ValueError, match=message):
        keras_vit.save_pretrained(model, tmp_path / "out", format="huggingface_clip")
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
def test_clip_defaults_are_those_of_transformers():
    import transformers

    for kind, defaults in huggingface_clip.DEFAULTS.items():
        config = transformers.AutoConfig.for_model(kind)
        assert {name: getattr(config, name) for name in defaults} == defaults


CLIP_KINDS = {
    "CLIPVisionModel": {},
    "CLIPVisionModel, exact": {"hidden_act": "gelu", "layer_norm_eps": 1e-2, "num_channels": 1},
    "CLIPVisionModelWithProjection": {"projection_dim": 6},
    "CLIPModel": {},
    "CLIPForImageClassification": {},
    "MetaClip2Model": {},
    "MetaClip2ForImageClassification": {},
    "ChineseCLIPModel": {},
    "ChineseCLIPVisionModel": {},
    "AltCLIPVisionModel": {},
}


def clip_output(source, batch, **options):
    """What transformers returns for images: logits, a projection or the class token."""
    if hasattr(source, "get_image_features"):
        function = source.get_image_features
    else:
        function = source
    out = torch_output(function, batch, **options)
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name).numpy()
    return out.numpy()


@pytest.mark.parametrize("kind", CLIP_KINDS)
def test_clip_equals_source(tmp_path, kind):
    source, folder = saved(tmp_path, kind, **CLIP_KINDS[kind])
    wrong = {"gelu": "quick" if "exact" in kind else "exact"}
    model = assert_same_logits(folder, lambda batch: clip_output(source, batch), wrong=wrong)
    config = model.config
    assert config.embedding_norm and not config.patch_bias
    classifier = "Classification" in kind
    assert (config.pooling, config.final_norm) == (
        ("mean", "none") if classifier else ("token", "before_pooling")
    )
    tower = kind.split(",")[0].endswith("VisionModel")
    assert config.num_classes == (3 if classifier else 0 if tower else 6)
    assert (config.head_bias is None) == (not classifier and not tower)


@pytest.mark.backend_free
def test_clip_equals_source_at_another_resolution(tmp_path):
    source, folder = saved(tmp_path, "CLIPVisionModelWithProjection", projection_dim=6)

    def resized(batch):
        return clip_output(source, batch, interpolate_pos_encoding=True)

    for size in (40, (16, 56)):
        wrong = {"interpolation": "timm"}
        assert_same_logits(folder, resized, wrong=wrong, image_size=size)


@pytest.mark.backend_free
def test_clip_names_what_is_not_loaded(tmp_path):
    _, folder = saved(tmp_path, "CLIPModel")
    dropped = inspect(folder).dropped
    assert dropped["text_model.embeddings.token_embedding.weight"].startswith("the text tower")
    assert dropped["text_projection.weight"].startswith("the text tower")
    assert dropped["logit_scale"] == "the loss of an image-text model"
    assert not [name for name in dropped if name.startswith("vision")]
    removed = inspect(folder, num_classes=0)
    assert removed.dropped["visual_projection.weight"] == "no head: num_classes=0"
    new = inspect(folder, num_classes=5).config
    assert (new.num_classes, new.head_bias, new.pooling) == (5, 0.0, "token")
    _, folder = saved(tmp_path / "classifier", "CLIPForImageClassification")
    assert {
        reason for name, reason in inspect(folder).dropped.items() if "post_layernorm" in name
    } == {"a LayerNorm that the classifier does not use"}


@pytest.mark.backend_free
def test_clip_without_config_is_openais_which_is_reported(tmp_path):
    source, _ = saved(tmp_path, "CLIPVisionModel")
    arrays = {f"vision_model.{k}": v for k, v in sources.state(source).items()}
    path = sources.bare(tmp_path, arrays)
    assert inspect(path, num_heads=5).assumed == {"gelu": "quick", "norm_epsilon": 1e-5}
    assert_same_logits(path, source, num_heads=5)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("CLIPVisionModel", (0.48145466, 0.26862954, "bicubic", 1.0)),
        ("ChineseCLIPModel", (0.48145466, 0.26862954, "bicubic", 1.0)),
        ("SiglipVisionModel", (0.5, 0.5, "bilinear", None)),
    ],
)
def test_clip_pixels_without_a_processor_are_the_familys(tmp_path, kind, expected):
    _, folder = saved(tmp_path, kind)
    found = inspect(folder)
    config = found.config
    mean, std = np.ravel(config.pixel_mean)[0], np.ravel(config.pixel_std)[0]
    assert (mean, std, config.resize_method, config.crop_fraction) == expected
    assert found.assumed == {}


@pytest.mark.backend_free
def test_clip_processor_config_gives_the_pixels_of_transformers(tmp_path):
    """transformers 5 writes the settings of a processor of images and text into one file."""
    from transformers import AutoImageProcessor, CLIPImageProcessor
    from transformers.processing_utils import ProcessorMixin

    class Pictures(ProcessorMixin):
        def __init__(self, image_processor):
            super().__init__(image_processor)

    _, folder = saved(tmp_path, "CLIPVisionModelWithProjection", projection_dim=6)
    settings = {"crop_size": {"height": 24, "width": 24}, "image_mean": [0.1, 0.2, 0.3]}
    Pictures(CLIPImageProcessor(size={"shortest_edge": 32}, **settings)).save_pretrained(folder)
    assert not (folder / "preprocessor_config.json").exists()
    photo = np.random.default_rng(0).integers(0, 255, (48, 64, 3)).astype("uint8")

    def compare(mean):
        config = inspect(folder).config
        assert (config.pixel_mean, config.crop_fraction) == (mean, 24 / 32)
        theirs = AutoImageProcessor.from_pretrained(folder, backend="pil")
        expected = theirs(photo, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
        ours = keras_vit.preprocessing.preprocess(photo, config)
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        other = keras_vit.preprocessing.preprocess(photo, config.replace(crop_fraction=1.0))
        assert np.abs(other - expected).max() > 0.1

    compare((0.1, 0.2, 0.3))
    other = sources.random_vit(class_token=False, pooling="mean", gelu="tanh")
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"without a processor_config\.json that states"):
        keras_vit.save_pretrained(other, folder, format="huggingface_clip")
    assert {path.name for path in folder.iterdir()} == before
    keras_vit.save_pretrained(other, folder.parent / "other", format="huggingface_clip")
    # Of both files transformers prefers this one.
    older = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    older["image_mean"] = [0.3, 0.2, 0.1]
    (folder / "preprocessor_config.json").write_text(json.dumps(older))
    compare((0.1, 0.2, 0.3))
    # Before version 5 it held nothing of images.
    (folder / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    compare((0.3, 0.2, 0.1))

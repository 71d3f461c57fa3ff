"""CLIP's image towers under OpenAI's names, against timm's model of the same arrays."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, logits, torch_logits

import keras_vit
from keras_vit.weights.load import inspect

NAMES = {
    "patch_embed.proj": "conv1",
    "norm_pre": "ln_pre",
    "blocks.": "transformer.resblocks.",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.qkv.": "attn.in_proj_",
    "attn.proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "norm.": "ln_post.",
}


def clip(prefix="visual.", act="quick_gelu", **fields):
    """A random tower as timm's model, and its arrays under OpenAI's names."""
    from functools import partial

    from torch.nn import LayerNorm

    arguments = {"pre_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5), "act_layer": act}
    source = sources.timm_vit(**arguments, **fields)
    if source.num_classes:
        source.head.bias.data.zero_()  # a projection has none
    arrays = {}
    for name, array in sources.state(source).items():
        if name == "head.weight":
            arrays[f"{prefix}proj"] = array.T
        elif name in ("cls_token", "pos_embed"):
            new = {"cls_token": "class_embedding", "pos_embed": "positional_embedding"}[name]
            arrays[prefix + new] = array[0, 0] if name == "cls_token" else array[0]
        elif name != "head.bias":
            for theirs, new in NAMES.items():
                name = name.replace(theirs, new)
            arrays[prefix + name] = array
    return source, arrays


def text_tower(width=8):
    """Arrays of OpenAI's text tower, some of which have names of the image tower."""
    names = ("positional_embedding", "text_projection", "token_embedding.weight", "logit_scale")
    block = ("ln_1.weight", "attn.in_proj_weight", "mlp.c_fc.weight")
    names += tuple(f"transformer.resblocks.0.{name}" for name in block) + ("ln_final.weight",)
    return {name: np.ones((3, width), "float32") for name in names}


@pytest.mark.parametrize("prefix", ["", "visual."])
@pytest.mark.parametrize(("act", "gelu"), [("quick_gelu", "quick"), ("gelu", "exact")])
def test_open_clip_equals_source(tmp_path, prefix, act, gelu):
    source, arrays = clip(prefix, act)
    wrong = {"gelu": "exact" if gelu == "quick" else "quick"}
    path = bare(tmp_path, arrays)
    model = assert_same_logits(path, source, wrong=wrong, num_heads=5, gelu=gelu)
    assert model.config.head_bias is None and model.config.norm_epsilon == 1e-5
    assert inspect(path, num_heads=5).assumed == {"gelu": "exact"}
    assert inspect(path, num_heads=5, gelu=gelu).assumed == {}


def test_open_clip_image_tower_of_a_whole_checkpoint(tmp_path):
    source, arrays = clip()
    path = bare(tmp_path, text_tower() | arrays)
    assert_same_logits(path, source, num_heads=5, gelu="quick")
    dropped = inspect(path, num_heads=5).dropped
    assert set(dropped) == set(text_tower())
    assert dropped["positional_embedding"] == "the text tower of an image-text model"


@pytest.mark.backend_free
def test_openai_files_have_quick_gelu_and_may_be_float16(tmp_path):
    source, arrays = clip()
    half = {name: array.astype("float16") for name, array in (text_tower() | arrays).items()}
    sizes = {"input_resolution": np.array(24), "context_length": np.array(3)}
    path = bare(tmp_path, half | sizes | {"vocab_size": np.array(3)})
    found = inspect(path, num_heads=5)
    assert found.config.gelu == "quick" and found.assumed == {}
    assert found.dropped["input_resolution"] == "the sizes of an image-text model"
    for parameter in source.parameters():
        parameter.data = parameter.data.half().float()
    assert_same_logits(path, source, wrong={"gelu": "exact"}, num_heads=5)


@pytest.mark.backend_free
def test_open_clip_at_another_resolution_and_with_another_head(tmp_path):
    source, arrays = clip(num_classes=0)
    path = bare(tmp_path, arrays)
    source.set_input_size(img_size=(40, 56))
    fields = {"num_heads": 5, "gelu": "quick", "image_size": (40, 56)}
    assert_same_logits(path, source, {"interpolation": "google"}, **fields)
    _, arrays = clip()
    path = bare(tmp_path, arrays, "head.safetensors")
    assert keras_vit.from_pretrained(path, num_heads=5, num_classes=7).config.head_bias == 0.0
    features = keras_vit.from_pretrained(path, num_heads=5, num_classes=0, gelu="quick")
    source, _ = clip()
    source.reset_classifier(0)
    batch = sources.images()
    np.testing.assert_allclose(logits(features, batch), torch_logits(source, batch), atol=1e-5)


@pytest.mark.backend_free
def test_open_clip_preprocessing_is_openais(tmp_path):
    config = inspect(bare(tmp_path, clip()[1]), num_heads=5).config
    assert config.pixel_mean == (0.48145466, 0.4578275, 0.40821073)
    assert config.pixel_std == (0.26862954, 0.26130258, 0.27577711)
    assert (config.resize_method, config.crop_fraction) == ("bicubic", 1.0)


@pytest.mark.backend_free
def test_open_clip_attention_pooling_is_refused(tmp_path):
    arrays = clip()[1] | {"visual.attn_pool.query": np.ones((2, 20), "float32")}
    with pytest.raises(ValueError, match="attention pooling"):
        keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)

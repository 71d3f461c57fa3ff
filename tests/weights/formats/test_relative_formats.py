"""BEiT, Data2Vec and timm's relative positions against the libraries' own code."""

import json

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, images, logits, torch_logits, torch_output

import keras_vit
from keras_vit.weights.load import inspect

WORDS = "img_size patch_size embed_dim num_heads mlp_ratio depth num_classes"
BEIT = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "qkv_bias": True, "init_values": 0.1}
BEITS = {
    "fine-tuned": BEIT,
    "no LayerScale": BEIT | {"init_values": None},
    "pretrained, shared": BEIT | {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    "both": BEIT | {"use_shared_rel_pos_bias": True},
    "with a table": BEIT | {"use_abs_pos_emb": True},
    "token": BEIT | {"global_pool": "token"},
    "no biases": BEIT | {"qkv_bias": False},
}
RELPOS = {
    "mlp": {},
    "mlp, class token": {"class_token": True, "global_pool": "token", "rel_pos_dim": 9},
    "mlp, both": {"class_token": True, "fc_norm": True},
    "mlp, shared": {"shared_rel_pos": True, "qkv_bias": False, "rel_pos_dim": 9},
    "bias": {"rel_pos_type": "bias", "fc_norm": True},
    "bias, class token": {"rel_pos_type": "bias", "class_token": True},
    "bias, shared": {"rel_pos_type": "bias", "shared_rel_pos": True, "qk_norm": True},
}
TABLES = {
    "use_relative_position_bias": {"use_relative_position_bias": True},
    "shared": {"use_shared_relative_position_bias": True},
    "both": {
        "use_relative_position_bias": True,
        "use_shared_relative_position_bias": True,
        "use_absolute_position_embeddings": True,
    },
    "token": {"use_relative_position_bias": True, "use_mean_pooling": False},
    "no LayerScale": {"use_relative_position_bias": True, "layer_scale_init_value": 0.0},
    "no positions": {},
}


def beit(**fields):
    from timm.models.beit import Beit

    return sources.randomize(Beit(**sources.tiny_arguments(WORDS, {"mlp_ratio": 1.4} | fields)))


def relpos(**fields):
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    arguments = sources.tiny_arguments(WORDS, {"mlp_ratio": 1.4} | fields)
    return sources.randomize(VisionTransformerRelPos(**arguments))


def timm_folder(tmp_path, source, architecture, arguments):
    """As timm saves a model: with its architecture and the arguments that differ."""
    config = {
        "architecture": architecture,
        "global_pool": source.global_pool,
        "model_args": {"num_heads": 5, "img_size": source.patch_embed.img_size, **arguments},
    }
    return sources.save(tmp_path / "folder", sources.state(source), config)


def huggingface(family, kind="ForImageClassification", **fields):
    import transformers

    words = (
        "image_size patch_size hidden_size num_attention_heads intermediate_size num_hidden_layers"
        " num_labels"
    )
    arguments = sources.tiny_arguments(words, {"attn_implementation": "eager"} | fields)
    config = getattr(transformers, f"{family}Config")(**arguments)
    return sources.randomize(getattr(transformers, f"{family}{kind}")(config))


@pytest.mark.parametrize("kind", BEITS)
def test_beit_logits_equal_timm(tmp_path, kind):
    source = beit(**BEITS[kind])
    folder = timm_folder(tmp_path, source, "beit_base_patch16_224", BEITS[kind])
    model = assert_same_logits(folder, source, wrong={"norm_epsilon": 0.1})
    assert model.config.attention_positions == "relative_bias"
    assert (model.config.position_table == "learned") == (kind == "with a table")
    assert model.config.qkv_bias == (kind != "no biases")
    assert model.config.key_bias == (kind == "no biases")


@pytest.mark.backend_free
@pytest.mark.parametrize("size", [40, 8, (16, 56), (24, 48)])
@pytest.mark.parametrize("kind", ["fine-tuned", "with a table"])
def test_beit_resolution_equals_timm(tmp_path, kind, size):
    source = beit(**BEITS[kind])
    path = bare(tmp_path, sources.state(source))
    source.set_input_size(img_size=size)
    fields = {"num_heads": 5, "image_size": size}
    model = assert_same_logits(path, source, {"interpolation": "google"}, **fields)
    # The checkpoint's own loading, into a model of the new size, is the same rule.
    resized = keras_vit.from_pretrained(path, num_heads=5).resized(size)
    batch = images(*model.config.input_shape)
    np.testing.assert_array_equal(logits(resized, batch), logits(model, batch))


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", [k for k in BEITS if k not in ("pretrained, shared", "both")])
def test_beit_round_trip_is_bitwise_and_timm_loads_it(tmp_path, kind):
    import timm

    source = beit(**BEITS[kind] | {"img_size": (24, 40)})
    folder = timm_folder(tmp_path, source, "beit_base_patch16_224", BEITS[kind])
    model = keras_vit.from_pretrained(folder)
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="beit")
    sources.assert_same_file(back / "model.safetensors", sources.state(source))
    again = timm.create_model(f"local-dir:{back}", pretrained=True).eval()
    batch = images(24, 40)
    np.testing.assert_allclose(torch_logits(again, batch), torch_logits(source, batch), atol=1e-6)
    assert keras_vit.from_pretrained(back).config == model.config


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "key_bias must be False"),
        (
            {
                "key_bias": False,
                "position_embedding": "learned+relative_bias",
                "position_class_row": False,
            },
            "position_class_row must be True",
        ),
        ({"key_bias": False, "norm_epsilon": 1e-5}, "norm_epsilon must be 1e-06"),
        ({"key_bias": False, "block_norm": "post"}, "block_norm must be 'pre'"),
        ({"key_bias": False, "gelu": "tanh"}, "gelu must be 'exact'"),
        ({"key_bias": False, "position_embedding": "relative"}, "position_embedding must be"),
        ({"key_bias": False, "image_size": (8, 40)}, "image_size must have another grid"),
    ],
)
def test_beit_refuses_to_write_what_timm_cannot_compute(tmp_path, fields, message):
    model = sources.random_vit(**{"position_embedding": "relative_bias", **fields})
    with pytest.raises(ValueError, match=message):
        keras_vit.save_pretrained(model, tmp_path / "model", format="beit")


@pytest.mark.backend_free
def test_beit_raw_files_have_an_index_and_a_head_of_pretraining(tmp_path):
    source = beit(**BEIT)
    more = {
        "mask_token": np.ones((1, 1, 20), "float32"),
        "lm_head.weight": np.ones((9, 20), "float32"),
        "blocks.0.attn.relative_position_index": np.zeros((10, 10), "int64"),
    }
    path = bare(tmp_path, sources.state(source) | more)
    assert_same_logits(path, source, num_heads=5)
    found = inspect(path, num_heads=5)
    assert found.format == "beit" and set(found.dropped) == set(more)
    assert found.config.image_size == (24, 24) and found.assumed == {
        "gelu": "exact",
        "norm_epsilon": 1e-6,
        "pooling": "mean",
        "interpolation": "timm",
        "pixel_mean": 0.5,
        "pixel_std": 0.5,
    }


@pytest.mark.backend_free
def test_beit_that_is_not_square_must_state_its_size(tmp_path):
    source = beit(**BEIT | {"img_size": (16, 40)})
    path = bare(tmp_path, sources.state(source))
    with pytest.raises(ValueError, match="image_size must be the checkpoint's own.*Received"):
        inspect(path, num_heads=5)
    assert_same_logits(path, source, num_heads=5, image_size=(16, 40))
    folder = timm_folder(tmp_path, source, "beit_base_patch16_224", BEIT)
    assert_same_logits(folder, source)


@pytest.mark.parametrize("kind", RELPOS)
def test_relpos_logits_equal_timm(tmp_path, kind):
    source = relpos(**RELPOS[kind])
    folder = timm_folder(tmp_path, source, "vit_relpos_base_patch16_224", RELPOS[kind])
    model = assert_same_logits(folder, source, wrong={"norm_epsilon": 1.0})
    assert model.config.position_embedding == f"relative_{'bias' if 'bias' in kind else 'mlp'}"


@pytest.mark.backend_free
@pytest.mark.parametrize("size", [40, (16, 56)])
@pytest.mark.parametrize("kind", ["mlp", "mlp, class token", "bias", "bias, shared"])
def test_relpos_resolution_equals_timm(tmp_path, kind, size):
    source = relpos(**RELPOS[kind])
    folder = timm_folder(tmp_path, source, "vit_relpos_base_patch16_224", RELPOS[kind])
    source.set_input_size(img_size=size)
    wrong = {"interpolation": "google"} if "bias" in kind else None
    assert_same_logits(folder, source, wrong, image_size=size)


@pytest.mark.backend_free
def test_relpos_file_alone_does_not_show_its_size(tmp_path):
    source = relpos()
    path = bare(tmp_path, sources.state(source))
    with pytest.raises(ValueError, match="image_size must be passed.*Received"):
        inspect(path, num_heads=5)
    assert_same_logits(path, source, num_heads=5, image_size=24)


@pytest.mark.backend_free
def test_relpos_with_norms_after_the_branches_is_not_taken_for_a_plain_block(tmp_path):
    from timm.models.vision_transformer_relpos import ResPostRelPosBlock

    source = relpos(block_fn=ResPostRelPosBlock)  # with query, key and value biases
    with pytest.raises(ValueError, match="block_norm='pre'"):
        keras_vit.from_pretrained(bare(tmp_path, sources.state(source)), num_heads=5, image_size=24)


@pytest.mark.backend_free
def test_relpos_of_swin_v2_is_refused(tmp_path):
    """Its MLP has no last bias, and a sigmoid follows it."""
    source = relpos(rel_pos_type="mlp_swin")
    with pytest.raises(ValueError, match=r"missing: 'blocks\.0\.attn\.rel_pos\.mlp\.fc2\.bias'"):
        path = bare(tmp_path, sources.state(source))
        keras_vit.from_pretrained(path, num_heads=5, image_size=24)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("family", ["Beit", "Data2VecVision"])
def test_huggingface_beit_logits_equal_source(tmp_path, family, kind):
    source = huggingface(family, **TABLES[kind])
    source.save_pretrained(tmp_path / "source")
    model = assert_same_logits(tmp_path / "source", source, wrong={"norm_epsilon": 0.1})
    assert model.config.qkv_bias and not model.config.key_bias
    assert model.config.pooling == ("token" if kind == "token" else "mean")


@pytest.mark.backend_free
@pytest.mark.parametrize("size", [40, (16, 56)])
@pytest.mark.parametrize("kind", ["shared", "both"])
@pytest.mark.parametrize("family", ["Beit", "Data2VecVision"])
def test_huggingface_beit_resolution_equals_source(tmp_path, family, kind, size):
    source = huggingface(family, **TABLES[kind])
    source.save_pretrained(tmp_path / "source")
    wrong = {"interpolation": "timm"}
    assert_same_logits(tmp_path / "source", source, wrong, image_size=size)


@pytest.mark.backend_free
def test_huggingface_beit_names_in_memory_are_read(tmp_path):
    source = huggingface("Beit", "Model", **TABLES["both"])
    source.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    other = sources.save(tmp_path / "new", sources.state(source), config)
    assert_same_logits(other, source)


@pytest.mark.backend_free
def test_huggingface_trunks_without_a_pooler(tmp_path):
    """Data2VecVisionModel has none, and so no last norm; BEiT's pretraining has a norm and head."""
    source = huggingface("Data2VecVision", "Model", **TABLES["shared"])
    source.save_pretrained(tmp_path / "data2vec")
    model = assert_same_logits(tmp_path / "data2vec", source)
    assert model.config.final_norm == "none"

    source = huggingface("Beit", "ForMaskedImageModeling", vocab_size=9, **TABLES["shared"])
    source.save_pretrained(tmp_path / "beit")
    model = keras_vit.from_pretrained(tmp_path / "beit")
    tokens = torch_output(source.beit, images()).last_hidden_state
    expected = source.layernorm(tokens)[:, 0].detach().numpy()
    np.testing.assert_allclose(logits(model, images()), expected, atol=1e-5)
    found = inspect(tmp_path / "beit")
    assert set(found.dropped) == {"lm_head.weight", "lm_head.bias"}

    twice = huggingface("Beit", "ForMaskedImageModeling", vocab_size=9, use_mean_pooling=False)
    twice.save_pretrained(tmp_path / "twice")  # a norm after the last one
    with pytest.raises(ValueError, match=r"extra: '(beit\.)?layernorm\.bias'"):
        keras_vit.from_pretrained(tmp_path / "twice")


@pytest.mark.backend_free
def test_huggingface_beit_that_is_not_square_is_refused(tmp_path):
    source = huggingface("Beit", image_size=[16, 40], use_relative_position_bias=True)
    source.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"square grid of patches.*image_size=\(16, 40\)"):
        keras_vit.from_pretrained(tmp_path / "source")


def test_relative_positions_are_seen_in_the_logits(tmp_path):
    """Otherwise the equalities of this file would show nothing."""
    for source in (beit(**BEIT), relpos()):
        expected = torch_logits(source, images())
        for name, parameter in source.named_parameters():
            if "rel" in name:
                parameter.data.zero_()
        assert np.abs(torch_logits(source, images()) - expected).max() > 1e-2


@pytest.mark.backend_free
@pytest.mark.parametrize("format", ["timm", "huggingface", "google", "torchvision"])
@pytest.mark.parametrize(
    "fields",
    [{"position_embedding": "learned+relative_bias"}, {"position_embedding": "relative_mlp"}],
)
def test_formats_without_relative_positions_refuse_them(tmp_path, format, fields):
    model = sources.random_vit(**fields)
    with pytest.raises(ValueError, match="position_embedding must be"):
        keras_vit.save_pretrained(model, tmp_path / "model", format=format)


@pytest.mark.parametrize("kind", ["relative", "relative_bias", "relative_mlp"])
def test_our_own_file_keeps_relative_positions(tmp_path, kind):
    model = sources.random_vit(position_embedding=f"learned+{kind}", relative_mlp_dim=6)
    model.save_weights(tmp_path / "model.weights.h5")
    fields = model.config.to_dict()
    path = tmp_path / "model.weights.h5"
    again = keras_vit.from_pretrained(path, **fields)
    np.testing.assert_array_equal(logits(again, images()), logits(model, images()))
    given = {k: v for k, v in fields.items() if k != "image_size"}
    larger = keras_vit.from_pretrained(path, **given, image_size=(24, 24)).resized((40, 16))
    expected = model.resized((40, 16))
    np.testing.assert_array_equal(logits(larger, images(40, 16)), logits(expected, images(40, 16)))

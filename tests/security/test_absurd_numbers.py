"""Absurd numbers in the JSON in or beside a file are refused before a model is built."""

import json
import shutil
import tracemalloc
import zipfile

import keras
import numpy as np
import pytest
from conformance import TINY

import keras_vit
from keras_vit import ViT, ViTConfig
from keras_vit.runtime import load_keras
from keras_vit.runtime.base import check_input, described
from keras_vit.weights.files.rules import Refused
from keras_vit.weights.json_rules import CONFIG, METADATA
from keras_vit.weights.load import inspect

BEYOND = {
    "image_size": 10**9,
    "patch_size": 2**30,
    "in_channels": 2**31,
    "stem_width": 2**31,
    "width": 2**31,
    "depth": 10**9,
    "num_heads": 2**31,
    "head_dim": 2**40,
    "mlp_dim": 2**33,
    "num_registers": 4294967295,
    "representation_size": 2**35,
    "num_classes": 2**40,
    "relative_mlp_dim": 2**33,
    "pooling_heads": 2**31,
    "pooling_mlp_dim": 2**31,
    "rope_grid": 2**30,
    "rope_base": 10**40,
    "rope_offset": 2**30,
}
"""Numbers beyond the limits of `ViTConfig`."""

TALL = {"image_size": [2**16 - 8, 8]}
"""8,191 patches, whose pairs are as many as `MAX_TOKEN_PAIRS` allows."""

WITHIN = {
    "image_size": ({"image_size": 8000}, "position_embedding/table|a table of 7 rows"),
    "patch_size": (
        {"patch_size": 2**20, "image_size": 2**20},
        "patches/projection|a table of 7 rows",
    ),
    "in_channels": ({"in_channels": 2**20}, "patches/projection|patch_embed"),
    "stem_depths": ({"stem": "resnet", "stem_depths": [4096]}, "stem_depths="),
    "stem_width": ({"stem": "resnet", "stem_width": 2**19}, "stem/root_conv|stem='resnet'"),
    "width": ({"width": 2**20 - 16}, "patches/projection|width=1048560"),
    "depth": ({"depth": 4096}, "depth=4096"),
    "num_heads": ({"num_heads": 2**20, "head_dim": 4}, r"attention/query/kernel|attn\.qkv"),
    "head_dim": ({"head_dim": 2**20}, r"attention/query/kernel|attn\.qkv"),
    "mlp_dim": ({"mlp_dim": 2**20}, "mlp/dense_1/kernel|mlp_dim=1048576"),
    "num_registers": ({"num_registers": 2**20}, "registers/tokens|num_registers=1048576"),
    "representation_size": ({"representation_size": 2**20}, r"pre_logits[./]"),
    "num_classes": ({"num_classes": 2**24}, "head/kernel|num_classes=16777216"),
    "stem_width with stages": (
        {"stem": "resnet", "stem_depths": [1], "stem_width": 2**18},
        "stem/root_conv|stem='resnet'",
    ),
    "conv stem": ({"stem": "conv", "stem_width": 2**18}, "stem/root_conv|stem='conv'"),
    "patch_shift": ({"patch_shift": True}, "patches/projection|patch_embed"),
    "score_scale": ({"score_scale": "learned"}, "attention/score_scale"),
    "relative": ({**TALL, "position_embedding": "relative"}, "relative_positions/keys|7 rows"),
    "relative_bias": (
        {**TALL, "position_embedding": "relative_bias"},
        "relative_positions/table|7 rows",
    ),
    "relative_mlp_dim": (
        {**TALL, "position_embedding": "relative_mlp", "relative_mlp_dim": 2**20},
        "relative_positions/hidden_kernel|7 rows",
    ),
    "rope_mixed": (
        {**TALL, "position_embedding": "rope_mixed", "head_dim": 2**15},
        r"rotary/frequencies|7 rows|attention/query/kernel|attn\.qkv",
    ),
    "pooling_mlp_dim": (
        {"pooling": "map", "pooling_heads": 1, "pooling_mlp_dim": 2**20},
        r"pooling/mlp/dense_1|attn_pool|pooling/",
    ),
}
"""Numbers within the limits that contradict the arrays: fields, and what the error names."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in each kind of file that states its config."""
    folder = tmp_path_factory.mktemp("saved")
    keras.utils.set_random_seed(0)
    model = ViT(TINY)
    model.save(folder / "m.keras")
    (folder / "h5").mkdir()
    model.save_weights(folder / "h5" / "m.weights.h5")
    (folder / "h5" / CONFIG).write_text(json.dumps(TINY.to_dict()))
    model = ViT(TINY.replace(norm_epsilon=1e-6))
    keras_vit.save_pretrained(model, folder / "m.safetensors", format="timm")
    return folder


def spoil_h5(saved, folder, fields):
    shutil.copytree(saved / "h5", folder / "h5")
    config = {**TINY.to_dict(), **fields}
    (folder / "h5" / CONFIG).write_text(json.dumps(config))
    return folder / "h5"


def spoil_safetensors(saved, folder, fields):
    content = (saved / "m.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    config = {**json.loads(header["__metadata__"][METADATA]), **fields}
    header["__metadata__"][METADATA] = json.dumps(config)
    text = json.dumps(header).encode()
    path = folder / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


def spoil_keras(saved, folder, fields):
    def change(config):
        config["config"]["config"] |= fields

    return changed_keras(saved, folder / "m.keras", change)


def changed_keras(saved, path, change):
    """The same `.keras` file with another config.json."""
    with zipfile.ZipFile(saved / "m.keras") as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename == "config.json":
                config = json.loads(data)
                change(config)
                data = json.dumps(config)
            new.writestr(member, data)
    return path


OPEN = {
    "h5": (spoil_h5, keras_vit.from_pretrained),
    "safetensors": (spoil_safetensors, keras_vit.from_pretrained),
    "keras": (spoil_keras, load_keras),
    "runtime": (spoil_keras, keras_vit.runtime.open),
    "inspect": (spoil_h5, inspect),
}


@pytest.mark.parametrize("kind", OPEN)
def test_valid_files_load(saved, tmp_path, kind):
    spoil, load = OPEN[kind]
    config = load(spoil(saved, tmp_path, {"drop_path": 0.0})).config
    assert config == TINY.replace(interpolation=config.interpolation)


@pytest.mark.backend_free
@pytest.mark.parametrize("field", BEYOND)
@pytest.mark.parametrize("kind", OPEN)
def test_number_beyond_the_limits_is_refused(saved, tmp_path, refused, kind, field):
    spoil, load = OPEN[kind]
    path = spoil(saved, tmp_path, {field: BEYOND[field]})
    refused(f"^{field} must be .*{field}=.*{BEYOND[field]}", load, path)


@pytest.mark.backend_free
@pytest.mark.parametrize("field", WITHIN)
@pytest.mark.parametrize("kind", OPEN)
def test_number_that_contradicts_the_arrays_is_refused(saved, tmp_path, refused, kind, field):
    spoil, load = OPEN[kind]
    fields, found = WITHIN[field]
    refused(found, load, spoil(saved, tmp_path, fields))


@pytest.mark.backend_free
def test_inspect_lists_numbers_that_contradict_the_arrays(saved, tmp_path):
    path = spoil_safetensors(saved, tmp_path, {"depth": 4096, "num_registers": 7})
    found = inspect(path)
    assert found.misshaped == (
        "wrong number: depth=4096 is stated, but the arrays show 2",
        "wrong number: num_registers=7 is stated, but the arrays show 0",
    )
    assert found.config.depth == 2


@pytest.mark.backend_free
@pytest.mark.parametrize("dtype", ["DTypePolicy", "DTypePolicyMap"])
def test_keras_file_of_a_quantized_model_is_checked_too(saved, tmp_path, refused, dtype):
    def change(config):
        config["config"]["dtype"]["class_name"] = dtype
        config["config"]["config"]["mlp_dim"] = 5000

    refused("mlp/dense_1/kernel", load_keras, changed_keras(saved, tmp_path / "m.keras", change))


def test_keras_file_of_another_model_is_refused_before_it_is_built(saved, tmp_path, refused):
    def change(config):
        layers = [{"class_name": "Dense", "module": "keras.layers", "config": {"units": 2**40}}]
        config |= {"class_name": "Sequential", "registered_name": None, "module": "keras"}
        config["config"] = {"layers": layers}

    path = changed_keras(saved, tmp_path / "m.keras", change)
    with pytest.raises(ValueError, match="path must hold a ViT. Received: .* a Sequential model"):
        load_keras(path)


@pytest.mark.backend_free
def test_keras_file_that_is_damaged_is_refused(saved, tmp_path):
    content = (saved / "m.keras").read_bytes()
    path = tmp_path / "m.keras"
    for length in (0, 1, len(content) // 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(Refused, match="whole .keras file"):
            load_keras(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", "{}")
    with pytest.raises(Refused, match="hold model.weights.h5"):
        load_keras(path)
    with zipfile.ZipFile(saved / "m.keras") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    with pytest.raises(Refused, match="stored, as Keras writes it"):
        load_keras(path)
    with pytest.raises(FileNotFoundError, match="path must be a .keras file"):
        load_keras(tmp_path / "none.keras")


# -- what no array limits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 2**14, "patch_size": 1}, "image_size must have at most 1048576 patches"),
        (
            {"image_size": 2**14, "width": 768, "position_embedding": "sincos_2d"},
            "image_size must have at most 268435456 / width=768 patches",
        ),
        (
            {"image_size": 2**14, "head_dim": 512, "position_embedding": "rope"},
            "image_size must have at most 268435456 / head_dim=512 patches",
        ),
        (
            {"image_size": 2048, "position_embedding": "relative_bias"},
            "image_size must have at most 67108864 pairs of tokens",
        ),
        (
            {"image_size": 16, "position_embedding": "relative", "num_registers": 2**14},
            "image_size must have at most 67108864 pairs of tokens",
        ),
    ],
)
@pytest.mark.backend_free
def test_image_size_is_limited_without_a_position_table(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**{"position_embedding": "none", **fields})
    assert ViTConfig(image_size=2**14, position_embedding="none").num_patches == 2**20


# -- our own JSON, with wrong types

NAN, INF = float("nan"), float("inf")


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"width": "20"}, "width must be a positive int"),
        ({"width": 20.0}, "width must be a positive int"),
        ({"width": "x" * 10**6}, "width must be a positive int"),
        ({"depth": [[[]]]}, "depth must be a positive int"),
        ({"norm_epsilon": NAN}, "norm_epsilon must be a positive number"),
        ({"layer_scale": INF}, "layer_scale must be None or a positive number"),
        ({"crop_fraction": 10**400}, "crop_fraction must be"),
        ({"labels": {"a": 1}}, "labels must be None or a sequence"),
        ({"pooling": []}, "pooling must be one of"),
        ({"pixel_mean": [[1], 2, 3]}, "pixel_mean must be a number"),
        ({"image_size": {"height": 3}}, "image_size must be a positive int"),
        ({"x" * 10**5: 1}, "must be those of ViTConfig"),
    ],
)
@pytest.mark.parametrize("kind", ["h5", "safetensors", "keras"])
def test_our_config_with_wrong_types_is_refused(saved, tmp_path, refused, kind, changes, found):
    spoil, load = OPEN[kind]
    refused(found, load, spoil(saved, tmp_path, changes))


@pytest.mark.backend_free
@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1, "a": 2}', "[" * 10**5, "\xff", "1" * 5000])
def test_config_json_that_is_not_an_object_is_refused(saved, tmp_path, refused, text):
    path = spoil_h5(saved, tmp_path, {})
    (path / CONFIG).write_bytes(text.encode("latin-1"))
    refused("hold one JSON object", keras_vit.from_pretrained, path)


# -- the records of exports

RECORD = {
    "config": TINY.to_dict(),
    "labels": ["a", "b", "c"],
    "activation": "softmax",
    "images": "float32",
}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        *(({"config": {**TINY.to_dict(), k: v}}, f"^{k} must be") for k, v in BEYOND.items()),
        ({"config": None}, "state config as an object"),
        ({"config": [1]}, "state config as an object"),
        ({"labels": "abc"}, "state labels as a list of strings"),
        ({"labels": ["a"]}, "state labels as 3 strings"),
        ({"labels": [1, 2, 3]}, "state labels as a list of strings"),
        ({"activation": "relu"}, "state activation as one of"),
        ({"activation": []}, "state activation as one of"),
        ({"images": 5}, "state images as one of"),
    ],
)
def test_record_of_an_export_is_checked(refused, changes, found):
    assert described("x.onnx", RECORD)["config"] == TINY
    refused(found, described, "x.onnx", {**RECORD, **changes})


@pytest.mark.backend_free
def test_input_of_an_export_is_compared_with_its_config():
    check_input("x.onnx", TINY, (None, 24, 16, 3))
    with pytest.raises(Refused, match=r"of the size in its config, \(24, 16, 3\).*x.onnx"):
        check_input("x.onnx", TINY, ["batch", 24, 24, 3])


def test_fixed_table_needs_no_more_memory_than_itself():
    from keras_vit.layers.position_embedding import sincos_2d

    tracemalloc.start()
    try:
        table = sincos_2d((200, 100), 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * table.nbytes
    assert np.isfinite(table).all() and table.shape == (20_000, 64)

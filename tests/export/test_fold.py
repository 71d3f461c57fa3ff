"""A folded model is the model: what each identity of `fold` moves, and what it leaves."""

import dataclasses

import keras
import numpy as np
import pytest
from conformance import KINDS, TINY, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.folded import joined, pixel_gain
from keras_vit.export.in_numpy import NumpyOperators
from keras_vit.export.program import Program
from keras_vit.preprocessing import normalize

FLOAT32 = 1e-5  # of the logits' range


def error(folded, model, x):
    expected = run(model, x)
    got = Program(folded, NumpyOperators()).output(x)
    return np.abs(got - expected).max() / np.ptp(expected)


def with_block(folded, index, **changes):
    blocks = list(folded.blocks)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    return dataclasses.replace(folded, blocks=tuple(blocks))


@pytest.mark.backend_free
def test_folded_stream_is_centered_only_where_norms_alone_read_it():
    centered = {kind: fold(tiny_model(kind)).blocks[0].mlp_norm.centered for kind in KINDS}
    assert {kind for kind, yes in centered.items() if not yes} == {
        "post_norm",
        "patch_norm",
        "embedding_norm",
        "map_all",  # without a norm before the pooling
        "map_registers",
        "rms",  # to which the mean counts
    }
    assert fold(tiny_model("embedding_norm")).embedding_norm.centered
    both = tiny_model("patch_norm", embedding_norm=True)
    assert not fold(both).embedding_norm.centered
    assert error(fold(both), both, images(both.config)) < FLOAT32
    assert not fold(tiny_model(final_norm="none")).blocks[0].mlp_norm.centered
    folded = fold(tiny_model())
    block = folded.blocks[0]
    for array in (block.output.kernel, block.mlp_2.bias, folded.positions, folded.prefix):
        assert np.abs(array.mean(-1)).max() < 1e-7 < np.abs(array).max()


@pytest.mark.backend_free
def test_post_norm_keeps_its_gain():
    """It stands on the residual stream, so a Dense behind it cannot take it over."""
    model = tiny_model("post_norm")
    x = images(model.config)
    folded = fold(model)
    block = folded.blocks[0]
    norm, query = block.mlp_norm, folded.blocks[1].query
    np.testing.assert_allclose(norm.scale, model.blocks[0].mlp_norm.gamma)
    moved = dataclasses.replace(
        query,
        kernel=norm.scale[:, None] * query.kernel,
        bias=norm.offset @ query.kernel + query.bias,
    )
    bare = dataclasses.replace(norm, scale=None, offset=None)
    wrong = with_block(folded, 0, mlp_norm=bare)
    assert error(with_block(wrong, 1, query=moved), model, x) > 1e-2
    assert all(b.attention_norm.scale is None for b in fold(tiny_model()).blocks)


@pytest.mark.backend_free
def test_res_post_centers_what_its_norms_read():
    model = tiny_model("res_post")
    block = fold(model).blocks[0]
    assert block.attention_norm.centered and block.mlp_norm.scale is not None
    for product in (block.output, block.mlp_2):
        assert np.abs(product.kernel.mean(-1)).max() < 1e-7 < np.abs(product.kernel).max()
    folded = fold(model)
    moved = dataclasses.replace(block.mlp_2, bias=block.mlp_2.bias + 1.0)
    x = images(model.config)
    assert error(with_block(folded, 0, mlp_2=moved), model, x) < FLOAT32  # a norm sees no mean
    moved = dataclasses.replace(block.mlp_2, bias=block.mlp_2.bias + np.arange(20))
    assert error(with_block(folded, 0, mlp_2=moved), model, x) > 1e-2


@pytest.mark.backend_free
def test_bias_of_keys_and_values_is_folded_away():
    model = tiny_model()
    columns = model.config.num_heads * model.config.key_dim
    for block in fold(model).blocks:
        for product in (block.query, block.key, block.value):
            assert product.kernel.dtype == "float32" and product.kernel.shape == (20, columns)
        assert np.abs(block.query.bias).min() > 0
        assert not block.key.bias.any() and not block.value.bias.any()


@pytest.mark.backend_free
def test_fold_merges_lora_and_leaves_the_model():
    model = tiny_model("registers")
    x = images(model.config)
    before = run(model, x)
    model.enable_lora(2, ("query", "value", "attention_output", "mlp"))
    for v in model.weights:
        if "lora_kernel_b" in v.path:
            v.assign(np.random.default_rng(0).normal(size=v.shape))
    adapted = run(model, x)
    assert np.abs(adapted - before).max() > 1e-2
    assert error(fold(model), model, x) < FLOAT32
    np.testing.assert_array_equal(run(model, x), adapted)
    assert model.blocks[0].attention.query_dense.lora_enabled


@pytest.mark.backend_free
def test_fold_reads_a_mixed_precision_model_in_full():
    mixed = tiny_model(dtype="mixed_bfloat16")
    full = tiny_model()
    x = images(TINY)
    assert error(fold(mixed), full, x) < FLOAT32
    assert np.abs(run(mixed, x) - run(full, x)).max() / np.ptp(run(full, x)) > 1e-4


@pytest.mark.backend_free
def test_fold_refuses_what_it_cannot_fold():
    quantized = tiny_model()
    quantized.blocks[1].mlp.dense_2.quantize("int8")
    for model, words in (
        (quantized, "must not be quantized"),
        (keras.Sequential(), "must be a keras_vit.ViT"),
        (tiny_model().features(), "must be a keras_vit.ViT"),
        (tiny_model(classifier_activation="relu"), "classifier_activation must be"),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            fold(model)


@pytest.mark.backend_free
def test_folded_weights_are_named_after_the_layers_of_the_model():
    model = tiny_model("patch_norm", qk_norm=True, representation_size=4)
    known = {v.path.rpartition("/")[0] for v in model.weights}
    parts = [fold(model)]
    names = set()
    while parts:
        part = parts.pop()
        if isinstance(part, tuple):
            parts += part
        elif dataclasses.is_dataclass(part) and part is not model.config:
            parts += [getattr(part, field.name) for field in dataclasses.fields(part)]
            names.add(getattr(part, "name", None))
    tables = {"class_token", "position_embedding"}  # arrays alone
    assert names - {None, "encoder_block_0", "encoder_block_1"} == known - tables


@pytest.mark.backend_free
def test_joined_products_are_the_products_side_by_side():
    block = fold(tiny_model()).blocks[1]
    product = joined([block.query, block.key, block.value])
    assert product.name == "encoder_block_1/attention/qkv"
    x = np.random.default_rng(0).normal(size=(4, 20))
    apart = [x @ p.kernel + p.bias for p in (block.query, block.key, block.value)]
    np.testing.assert_allclose(x @ product.kernel + product.bias, np.concatenate(apart, axis=1))
    assert joined([block.key]) is block.key


@pytest.mark.backend_free
def test_pixel_gain_is_the_normalization_of_pixels():
    config = TINY.replace(pixel_mean=(0.1, 0.4, 0.2), pixel_std=(0.3, 0.2, 0.1))
    gain = pixel_gain(config)
    pixels = np.random.default_rng(0).integers(0, 256, (2, *TINY.input_shape), "uint8")
    expected = normalize(pixels, config)
    np.testing.assert_allclose(pixels * gain.scale + gain.offset, expected, atol=1e-5)
    assert np.abs(pixels * gain.scale - expected).max() > 0.1

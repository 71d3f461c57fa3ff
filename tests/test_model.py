"""What holds for models of every kind, and what users do with one."""

import tracemalloc

import keras
import numpy as np
import pytest
from conformance import (
    KINDS,
    PLAIN_HEAD,
    TINY,
    arrays,
    check_model,
    images,
    randomize,
    run,
    tiny_model,
    to_numpy,
)

from keras_vit import ViT, ViTConfig, layers
from keras_vit.model_weights import weight_shapes


@pytest.mark.sampled  # on every backend, test_reference.py computes each kind
@pytest.mark.parametrize("kind", KINDS)
def test_model_keeps_the_contract(kind):
    check_model(KINDS[kind])


def test_model_predicts_what_it_computes():
    model = tiny_model("registers")
    x = images(model.config, 5)
    y = model.predict(x, batch_size=2, verbose=0)
    np.testing.assert_allclose(y, run(model, x), atol=1e-5)
    assert np.abs(y - run(model, x[::-1])).max() > 1e-3


def test_model_summary_reads_like_the_figure():
    names = [layer.name for layer in ViT(TINY).layers]
    assert names == [
        "images",
        "patches",
        "class_token",
        "position_embedding",
        "encoder_block_0",
        "encoder_block_1",
        "encoder_norm",
        "pooling",
        "head",
    ]


def test_model_weight_paths_are_readable():
    paths = [v.path for v in ViT(TINY).weights]
    assert "encoder_block_1/attention/query/kernel" in paths
    assert "patches/projection/kernel" in paths and "head/bias" in paths
    assert len(set(paths)) == len(paths)


def test_model_takes_a_config_or_its_fields():
    assert ViT(TINY.to_dict()).config == TINY
    with pytest.raises(ValueError, match="config must be a ViTConfig.*Received"):
        ViT("b16")


@pytest.mark.parametrize("shape", [(2, 24, 24, 3), (2, 24, 16, 1), (24, 16, 3)])
def test_model_refuses_other_images(shape):
    with pytest.raises(ValueError):
        ViT(TINY)(np.zeros(shape, "float32"))


def test_model_without_positions_ignores_the_order_of_patches():
    for kind, equal in (("no_positions", True), ("paper", False)):
        model = tiny_model(kind)
        x = images(model.config)
        y = run(model, x)
        shuffled = run(model, x[:, ::-1].reshape(3, 3, 8, 16, 3)[:, :, ::-1].reshape(x.shape))
        assert (np.abs(shuffled - y).max() < 1e-5) == equal


def test_model_fresh_logits_are_zero_as_in_the_paper():
    y = run(ViT(TINY), images(TINY))
    np.testing.assert_array_equal(y, 0.0)
    biased = run(ViT(TINY.replace(head_bias=-6.9)), images(TINY))
    np.testing.assert_allclose(biased, -6.9, rtol=1e-6)
    started = run(ViT(TINY.replace(head_init="truncated_normal")), images(TINY))
    assert np.abs(started).max() > 0


def test_model_classifier_activation_gives_probabilities():
    model = tiny_model(classifier_activation="softmax")
    logits = tiny_model()
    y = run(model, images(TINY))
    np.testing.assert_allclose(y.sum(-1), 1.0, atol=1e-5)
    expected = to_numpy(keras.ops.softmax(run(logits, images(TINY))))
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_model_drop_path_rises_linearly():
    model = ViT(TINY.replace(depth=5, drop_path=0.2))
    rates = [block.drop_path for block in model.blocks]
    np.testing.assert_allclose(rates, [0, 0.05, 0.1, 0.15, 0.2])


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path", "patch_dropout"])
def test_model_is_random_only_in_training(rate):
    model = tiny_model(**{rate: 0.5})
    plain = tiny_model()
    x = images(TINY)
    for path, value in arrays(plain).items():
        next(v for v in model.weights if v.path == path).assign(value)
    np.testing.assert_array_equal(run(model, x), run(plain, x))
    first, second = (to_numpy(model(x, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_model_mixed_precision_is_near_float32(dtype):
    exact, mixed = tiny_model(), tiny_model(dtype=dtype)
    x = images(TINY)
    y, z = run(exact, x), run(mixed, x)
    assert z.dtype == "float32"
    tolerance = 0.1 if dtype == "mixed_bfloat16" else 0.02
    assert 0 < np.abs(y - z).max() < tolerance * np.abs(y).max()
    mixed.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = mixed.fit(x, np.array([0, 1, 2]), epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_model_overfits_eight_images():
    model = ViT(TINY.replace(drop_path=0.1))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 24, 16, 3)).astype("float32"), np.arange(8) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2), loss, metrics=["accuracy"])
    model.fit(x, y, epochs=40, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] == 1.0


# -- features


def test_features_stack_any_head():
    model = tiny_model()
    backbone = model.features()
    assert backbone.output_shape == (None, 20)
    new = keras.Model(backbone.input, keras.layers.Dense(7)(backbone.output))
    x = images(TINY)
    assert run(new, x).shape == (3, 7)
    model.blocks[0].mlp.dense_1.kernel.assign(np.zeros((20, 28)))  # shared, not copied
    np.testing.assert_allclose(run(backbone, x), run(model.features("tokens"), x)[:, 0], atol=1e-5)


def test_features_of_blocks():
    model = tiny_model("registers")
    x = images(model.config)
    one = run(model.features(blocks=-1), x)
    first, last = run(model.features(blocks=[0, 1]), x)
    assert one.shape == (3, 9, 20)
    np.testing.assert_array_equal(one, last)
    np.testing.assert_allclose(to_numpy(model.blocks[1](first)), last, atol=1e-5)
    grids = run(model.features(blocks=[0, 1], grid=True), x)
    np.testing.assert_array_equal(grids[1].reshape(3, 6, 20), last[:, 3:])


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "logits"}, "output must be 'pre_logits' or 'tokens'"),
        ({"grid": True}, "grid must be False for output='pre_logits'"),
        ({"blocks": 2}, r"blocks must be in \[-2, 1\]"),
        ({"blocks": [0, -3]}, r"blocks must be in \[-2, 1\]"),
    ],
)
def test_features_refuse_what_is_not_there(arguments, message):
    with pytest.raises(ValueError, match=message + ".*Received"):
        ViT(TINY).features(**arguments)


# -- another resolution


OFFSETS = ("relative_positions/table", "relative_positions/keys")
RELATIVE = ("relative", "relative_bias", "relative_mlp")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["paper", "mean_all", "learned_2d", "sincos_2d", "no_positions", *RELATIVE]
)
@pytest.mark.parametrize("image_size", [(48, 40), 32])
def test_resized_keeps_everything_but_the_table(kind, image_size):
    model = tiny_model(kind)
    model.blocks[0].trainable = False
    model.blocks[1].mlp.dense_1.trainable = False
    larger = model.resized(image_size)
    assert larger.config == model.config.replace(image_size=image_size)
    old, new = arrays(model), arrays(larger)
    assert old.keys() == new.keys()
    for path in old:
        if not path.startswith("position_embedding/") and not path.endswith(OFFSETS):
            np.testing.assert_array_equal(old[path], new[path])
    assert [v.path for v in larger.trainable_weights] == [v.path for v in model.trainable_weights]
    assert np.isfinite(run(larger, images(larger.config))).all()


def test_resized_to_the_same_size_is_bitwise_the_same():
    model = tiny_model()
    x = images(TINY)
    same = model.resized((24, 16))
    np.testing.assert_array_equal(run(same, x), run(model, x))
    same.blocks[0].mlp.dense_1.bias.assign(np.ones(28))  # a copy, not the same arrays
    assert np.abs(run(same, x) - run(model, x)).max() > 0


@pytest.mark.parametrize("interpolation", ["google", "timm", "torchvision"])
def test_resized_resamples_by_the_named_rule(interpolation):
    from keras_vit.resample import resample_grid

    model = tiny_model()
    larger = model.resized((48, 40), interpolation=interpolation)
    assert larger.config.interpolation == interpolation
    expected = resample_grid(
        arrays(model)["position_embedding/table"], (3, 2), (6, 5), interpolation, prefix=1
    )
    np.testing.assert_array_equal(arrays(larger)["position_embedding/table"], expected)
    assert (
        np.abs(
            expected
            - resample_grid(
                arrays(model)["position_embedding/table"], (3, 2), (6, 5), "flexivit", prefix=1
            )
        ).max()
        > 1e-3
    )


def test_resized_2d_resamples_rows_and_columns():
    from keras_vit.resample import matrix

    model = tiny_model("learned_2d")
    larger = model.resized((40, 48))
    old, new = arrays(model), arrays(larger)
    for axis, name in enumerate(("rows", "columns")):
        path = f"position_embedding/{name}"
        weights = matrix(TINY.grid[axis], larger.config.grid[axis], "google")
        np.testing.assert_allclose(new[path], weights @ old[path], atol=1e-6)
    np.testing.assert_array_equal(
        new["position_embedding/class_row"], old["position_embedding/class_row"]
    )


def test_resized_resamples_relative_positions():
    from keras_vit.resample import matrix, resample_offsets

    model = tiny_model("relative_bias")
    path = "encoder_block_1/attention/relative_positions/table"
    for interpolation in ("timm", "huggingface"):
        larger = model.resized((40, 48), interpolation=interpolation)
        expected = resample_offsets(arrays(model)[path], (3, 2), (5, 6), interpolation)
        np.testing.assert_array_equal(arrays(larger)[path], expected)
    model = tiny_model("relative")  # 8 tokens, and so 15 offsets
    larger = model.resized((40, 48))
    path = "encoder_block_1/attention/relative_positions/keys"
    old, new = arrays(model)[path], arrays(larger)[path]
    expected = matrix(15, 2 * larger.config.num_tokens - 1, "google") @ old.reshape(15, -1)
    np.testing.assert_allclose(new, expected.reshape(new.shape), atol=1e-6)
    np.testing.assert_allclose(new[len(new) // 2], old[7], atol=1e-6)  # of a token and itself


def test_resized_keeps_the_dtype_policy():
    assert ViT(TINY, dtype="mixed_bfloat16").resized(32).dtype_policy.name == "mixed_bfloat16"


def test_resized_refuses_wrong_sizes_and_changed_layers():
    with pytest.raises(ValueError, match="image_size must be a multiple.*Received"):
        ViT(TINY).resized(33)
    with pytest.raises(ValueError, match="interpolation must be one of.*Received"):
        ViT(TINY).resized(32, interpolation="area")
    model = ViT(TINY)
    model.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA and quantization.*Received"):
        model.resized(32)


# -- LoRA


@pytest.mark.parametrize(("kind", "count"), [("paper", 6), ("swiglu", 7)])
def test_lora_trains_only_itself_and_the_head(kind, count):
    model = tiny_model(kind)
    x, y = images(TINY, 4), np.array([0, 1, 2, 0])
    before = run(model, x)
    model.enable_lora(2, ("query", "key", "value", "attention_output", "mlp"))
    np.testing.assert_allclose(run(model, x), before, atol=1e-5)
    frozen = {v.path: to_numpy(v.value) for v in model.non_trainable_weights}
    for v in model.trainable_weights:
        assert "lora" in v.path or v.path.endswith("bias") or v.path.startswith("head/"), v.path
    assert sum("lora_kernel" in v.path for v in model.trainable_weights) == 2 * count * 2
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, epochs=2, verbose=0)
    for v in model.non_trainable_weights:
        if v.path in frozen and "seed" not in v.path:
            np.testing.assert_array_equal(to_numpy(v.value), frozen[v.path])
    assert np.abs(run(model, x) - before).max() > 0


def test_lora_freezes_attention_pooling():
    model = tiny_model("map")
    model.enable_lora(2)
    assert not [v.path for v in model.trainable_weights if v.path.startswith("pooling/")]
    assert model.get_layer("pooling").probe.trainable is False


def test_lora_refuses_unknown_targets():
    with pytest.raises(ValueError, match="targets must be some of query.*Received"):
        ViT(TINY).enable_lora(2, ("querry",))
    with pytest.raises(ValueError, match="rank must be a positive int.*Received"):
        ViT(TINY).enable_lora(0)


def test_blocks_are_the_encoder():
    model = randomize(ViT(TINY))
    assert [type(b) for b in model.blocks] == [layers.EncoderBlock] * 2
    assert model.blocks[1] is model.get_layer("encoder_block_1")


@pytest.mark.backend_free
def test_weight_shapes_compute_no_table():
    """The table of fixed positions would take 1 GiB here; a file may state any size."""
    fields = {"image_size": 2**13, "patch_size": 8, "width": 256, "num_heads": 4}
    config = ViTConfig(**fields, **PLAIN_HEAD, position_embedding="sincos_2d", num_classes=0)
    tracemalloc.start()
    try:
        shapes = weight_shapes(config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shapes["patches/projection/kernel"] == (8, 8, 3, 256) and peak < 8 << 20


def test_hybrid_adapts_and_explains_as_any_model():
    """LoRA freezes the stem, int8 leaves it in float, and maps are on the grid of patches."""
    from keras_vit import explain

    model = tiny_model("resnet_stem")
    x = images(model.config)
    before = run(model, x)
    assert explain.class_token_maps(model, x).shape[-2:] == model.config.grid
    assert explain.rollout_map(model, x).shape == (3, *model.config.grid)
    larger = model.resized((32, 24))
    assert run(larger, images(larger.config)).shape == before.shape
    np.testing.assert_array_equal(
        larger.get_layer("stem").root_conv.kernel.numpy(),
        model.get_layer("stem").root_conv.kernel.numpy(),
    )
    model.enable_lora(2)
    assert not model.get_layer("stem").trainable_weights
    np.testing.assert_array_equal(run(model, x), before)

    quantized = tiny_model("resnet_stem")
    quantized.quantize("int8")
    assert quantized.blocks[0].mlp.dense_1.quantization_mode == "int8"
    error = np.abs(run(quantized, x) - before).max() / np.ptp(before)
    assert 1e-5 < error < 0.1

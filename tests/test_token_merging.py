"""Token merging: the model, each export and each refusal, held against the paper in NumPy."""

import dataclasses

import keras
import numpy as np
import pytest
import reference
from conformance import TINY, arrays, images, randomize, run
from keras import ops

import keras_vit
from keras_vit import ViT, ViTConfig
from keras_vit.export.fold import fold
from keras_vit.export.in_numpy import NumpyOperators
from keras_vit.export.merging_margins import merging_margins
from keras_vit.export.program import Program

MERGING = TINY.replace(image_size=(40, 24), depth=3, token_merging=2)  # 15 patches
KINDS = {
    "token": MERGING,
    "mean": MERGING.replace(pooling="mean", final_norm="after_pooling"),
    "no_class_token": MERGING.replace(class_token=False, pooling="mean"),
    "mean_all": MERGING.replace(pooling="mean_all", position_class_row=False),
    "token_mean": MERGING.replace(pooling="token_mean", num_registers=1),
    "token_pair": MERGING.replace(distillation_token=True, pooling="token_pair"),
    "decreasing": MERGING.replace(token_merging_schedule="decreasing"),
    "at_most_half": MERGING.replace(token_merging=99, pooling="mean"),
    "qk_norm": MERGING.replace(qk_norm=True, pooling="mean"),
    "post_norm": MERGING.replace(block_norm="post", final_norm="none"),
    "res_post": MERGING.replace(block_norm="res_post", pooling="mean"),
}


def model_of(kind, **changes):
    return randomize(ViT(KINDS[kind].replace(**changes)))


def error(found, expected):
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.ptp(expected)


def logits(config, model, x):
    return reference.forward(config, arrays(model), x)


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_program_equal_the_paper(kind):
    model = model_of(kind)
    config, x = model.config, images(model.config)
    expected = logits(config, model, x)
    assert error(run(model, x), expected) < 1e-5
    program = Program(fold(model), NumpyOperators())
    assert error(program.output(x), expected) < 1e-5
    assert error(program.features(program.head_input(x)), run(model.features(), x)) < 1e-5
    # Negative control: without merging, and with one token fewer.
    for other in (0, config.token_merging - 1):
        changed = config.replace(token_merging=other)
        if changed.merged_tokens != config.merged_tokens:
            assert error(logits(changed, model, x), expected) > 1e-3


def test_zero_merges_nothing_and_is_the_plain_model():
    model = model_of("token", token_merging=0)
    assert model.config.merged_tokens == (0, 0, 0)
    assert all(block.merging is None for block in model.blocks)
    x = images(model.config)
    merging = keras_vit.with_token_merging(model, 2)
    assert keras_vit.with_token_merging(model, 0) is model
    np.testing.assert_array_equal(run(keras_vit.with_token_merging(merging, 0), x), run(model, x))


def test_without_proportional_attention_the_model_differs(monkeypatch):
    model = model_of("token")
    x = images(model.config)
    expected = run(model, x)
    call = type(model.blocks[0].attention).call
    for block in model.blocks:

        def without(*args, attention=block.attention, token_sizes=None, **kwargs):
            return call(attention, *args, **kwargs)

        monkeypatch.setattr(block.attention, "call", without)
    assert error(run(model, x), expected) > 1e-3


@pytest.mark.backend_free
def test_counts_by_hand():
    config = ViTConfig(token_merging=13)
    assert config.merged_tokens == (13,) * 12
    assert config.num_tokens - sum(config.merged_tokens) == 41
    config = config.replace(token_merging_schedule="decreasing")
    assert config.merged_tokens == (26, 23, 21, 18, 16, 14, 11, 9, 7, 4, 2, 0)
    # At most half: 16 patches, 8 left, 4, 2, 1, and then none to merge with.
    small = ViTConfig(image_size=64, token_merging=50)
    assert small.merged_tokens == (8, 4, 2, 1) + (0,) * 8


def test_gradients_are_those_of_the_paper():
    """Against differences of the reference's loss, and on each backend."""
    model = model_of("mean")
    x = images(model.config, 2)
    labels = np.array([0, 2])
    before = arrays(model)
    rate = 1e-2
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss)
    found = model.train_on_batch(x, labels)

    def loss_of(weights):
        z = reference.forward(model.config, weights, x)
        return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(2), labels])

    assert abs(float(np.ravel(found)[0]) - loss_of(before)) < 1e-5
    rng = np.random.default_rng(4)
    after = arrays(model)
    step = 1e-5
    for path in (
        "patches/projection/kernel",
        "encoder_block_0/attention/value/kernel",
        "encoder_block_1/mlp/dense_1/kernel",
        "head/kernel",
    ):
        gradient = (before[path] - after[path]) / rate
        direction = rng.normal(size=gradient.shape)
        ends = [
            loss_of({**before, path: before[path] + sign * step * direction}) for sign in (1, -1)
        ]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert abs((gradient * direction).sum() - expected) < 2e-3 * max(1, abs(expected)), path


def test_a_model_that_merges_is_saved_resized_and_trained_with_dropped_patches(tmp_path):
    model = model_of("mean", patch_dropout=0.5)
    x = images(model.config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert np.isfinite(model.train_on_batch(x, np.array([0, 1, 2])))
    model.save(tmp_path / "model.keras")
    again = keras_vit.from_pretrained(tmp_path / "model.keras")
    np.testing.assert_allclose(run(again, x), run(model, x), atol=1e-6)
    assert again.config.token_merging == 2
    assert model.resized((56, 24)).config.merged_tokens == (2, 2, 2)
    plain = keras_vit.from_pretrained(tmp_path / "model.keras", token_merging=0)
    assert plain.config.token_merging == 0
    assert error(run(plain, x), run(model, x)) > 1e-3


def test_a_copy_keeps_dtype_weights_and_flags():
    model = randomize(ViT(TINY, dtype="mixed_bfloat16"))
    model.blocks[0].trainable = False
    copy = keras_vit.with_token_merging(model, 1, "decreasing")
    assert copy.config == TINY.replace(token_merging=1, token_merging_schedule="decreasing")
    assert copy.dtype_policy.name == "mixed_bfloat16" and not copy.blocks[0].trainable
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        np.testing.assert_array_equal(
            ops.convert_to_numpy(ours.value), ops.convert_to_numpy(theirs.value)
        )
    y = ops.convert_to_numpy(ops.cast(copy(images(TINY)), "float32"))
    assert y.shape == (3, 3) and np.isfinite(y).all()


@pytest.mark.sampled(cases=0)
def test_margins_say_what_rounding_may_change():
    model = model_of("token")
    x = images(model.config, 6)
    margins = merging_margins(model, x)
    assert margins.shape == (6,) and (margins > 0).all()
    twins = model_of("token", position_embedding="none")
    same = np.tile(x[:, :8, :8], (1, 5, 3, 1))  # all patches alike
    assert (merging_margins(twins, same) < 1e-6).all()


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding": "rope", "head_dim": 8}, "position_embedding='rope'"),
        ({"position_embedding": "relative_bias"}, "position_embedding='relative_bias'"),
        ({"score_diagonal": False}, "score_diagonal=False"),
        ({"pooling": "map"}, "pooling='map'"),
        ({"pooling": None}, "pooling=None"),
        ({"token_merging": -1}, "int >= 0"),
        ({"token_merging": True}, "int >= 0"),
        ({"token_merging_schedule": "up"}, "'constant', 'decreasing'"),
    ],
)
def test_other_kinds_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MERGING.replace(**fields)


def test_what_needs_every_patch_is_refused(tmp_path):
    model = model_of("token")
    x = images(model.config)
    with pytest.raises(ValueError, match="explained patch by patch"):
        keras_vit.explain.attention_maps(model, x)
    for wanted in ({"output": "tokens"}, {"blocks": 0}, {"blocks": [0], "grid": True}):
        with pytest.raises(ValueError, match="merges tokens"):
            model.features(**wanted)
    with pytest.raises(ValueError, match="token_merging must be 0"):
        keras_vit.train.MAE(model)
    with pytest.raises(ValueError, match="must not merge tokens"):
        keras_vit.train.remat(model)
    with pytest.raises(ValueError, match="token_merging must be 0, it is 2"):
        keras_vit.save_pretrained(model, tmp_path / "model", format="timm")
    keras_vit.save_pretrained(
        keras_vit.with_token_merging(model, 0), tmp_path / "model", format="timm"
    )
    assert keras_vit.explain.attention_maps(keras_vit.with_token_merging(model, 0), x).size


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("kind", KINDS)
def test_every_target_equals_the_paper(kind):
    from ai_edge_litert.interpreter import Interpreter

    from keras_vit.export.onnx.operators import to_onnx
    from keras_vit.export.onnx.quantize import open_session
    from keras_vit.export.saved_model.operators import compile_graph
    from keras_vit.export.tflite.operators import to_float32_tflite

    model = model_of(kind)
    x = images(model.config)
    folded, expected = fold(model), logits(model.config, model, x)
    assert error(compile_graph(folded).run(x).numpy(), expected) < 1e-5
    found = open_session(to_onnx(folded), 1).run(["logits"], {"images": x})[0]
    assert error(found, expected) < 1e-5
    content = to_float32_tflite(
        folded, batch_size=3, output="logits", images="float32", activation="softmax"
    )
    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    assert error(found, expected) < 1e-5
    # Negative control: keys without their bias merge other tokens.
    if kind != "token":
        return
    blocks = tuple(
        dataclasses.replace(b, key=dataclasses.replace(b.key, bias=0 * b.key.bias))
        for b in folded.blocks
    )
    broken = dataclasses.replace(folded, blocks=blocks)
    assert error(compile_graph(broken).run(x).numpy(), expected) > 1e-3

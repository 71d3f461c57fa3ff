import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.resample import resizing_matrix
from keras_vit.train import FlexiViT

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SIZES = (4, 6)
KERNEL, TABLE = "patches/projection/kernel", "position_embedding/table"
KINDS = {
    "plain": {},
    "rotary": {"position_embedding": "learned+rope", "head_dim": 8, "num_registers": 1},
    "relative": {"position_embedding": "relative_bias"},
    "axes": {"position_embedding": "learned_2d", "pooling": "map", "class_token": False},
}


def tiny(dtype=None, **fields):
    """A model with patches of (8, 12) pixels on a 3 x 2 grid, all of its arrays random."""
    config = {
        **dict(image_size=(24, 24), patch_size=(8, 12), width=16, depth=1, num_heads=2),
        **dict(mlp_dim=24, num_classes=3, interpolation="flexivit"),
        **fields,
    }
    model, rng = keras_vit.ViT(config, dtype=dtype), np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(0.2 * rng.normal(size=weight.shape) + weight.path.endswith("gamma"))
    return model


def toy(count=24):
    """Three classes that differ in the mean of one channel."""
    rng = np.random.default_rng(1)
    labels = np.arange(count) % 3
    images = 0.5 * rng.normal(size=(count, 24, 24, 3)) + 0.5 * np.eye(3)[labels][:, None, None]
    return images.astype("float32"), labels


def values(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


def compiled(model, patch_sizes=SIZES, rate=0.1, **arguments):
    flexi = FlexiViT(model, patch_sizes, **arguments)
    flexi.compile(keras.optimizers.SGD(rate), LOSS)
    return flexi


def drawn_by(flexi):
    """The list to which the sizes will be added that the model draws."""
    drawn, draw = [], flexi._draw
    flexi._draw = lambda: drawn.append(draw()) or drawn[-1]
    return drawn


def test_fit_moves_all_weights_and_the_loss_falls():
    model = tiny(dropout=0.1)
    flexi, before = compiled(model, seed=3), values(model)
    drawn = drawn_by(flexi)
    losses = flexi.fit(*toy(), batch_size=8, epochs=8, verbose=0).history["loss"]
    assert len(drawn) == 24 and set(drawn) == {(4, 4), (6, 6)}
    assert losses[-1] < 0.5 * losses[0]
    for path, value in values(model).items():
        if not path.endswith("key/bias"):  # the softmax does not see it
            assert np.abs(value - before[path]).max() > 1e-3, path


@pytest.mark.parametrize("kind", KINDS)
def test_loss_at_the_drawn_size_is_that_of_the_resized_model(kind):
    model, (images, labels) = tiny(**KINDS[kind]), toy(8)
    expected = {}
    for size in (4, 6):
        logits = model.resized(24, patch_size=size).predict(images, verbose=0)
        expected[size] = float(LOSS(labels, logits))
    assert abs(expected[4] - expected[6]) > 1e-3
    flexi = compiled(model, rate=0.0, seed=1)
    drawn = drawn_by(flexi)
    for _ in range(6):
        loss = flexi.train_on_batch(images, labels)
        assert abs(loss - expected[drawn[-1][0]]) < 1e-5
    assert set(drawn) == {(4, 4), (6, 6)}


def test_a_step_is_that_of_the_resized_model_through_the_matrices():
    model, (images, labels) = tiny(), toy(8)
    resized = model.resized(24, patch_size=4)
    resized.compile(keras.optimizers.SGD(0.1), LOSS)
    before, resized_before = values(model), values(resized)
    compiled(model, [4]).train_on_batch(images, labels)
    resized.train_on_batch(images, labels)
    after, resized_after = values(model), values(resized)
    for path in before:
        step = after[path] - before[path]
        expected = resized_after[path] - resized_before[path]
        if path in (KERNEL, TABLE):  # the chain rule
            matrix = resizing_matrix(path, step.shape, model.config, resized.config)
            expected = matrix.T @ expected.reshape(len(matrix), -1)
        np.testing.assert_allclose(step.reshape(expected.shape), expected, atol=2e-6, err_msg=path)


def test_evaluation_and_calls_are_at_the_model_s_own_size_or_the_given_one():
    model, (images, labels) = tiny(), toy(6)
    own = model.predict(images, verbose=0)
    other = model.resized(24, patch_size=6).predict(images, verbose=0)
    assert np.abs(own - other).max() > 1e-2
    flexi = compiled(model, [4])
    np.testing.assert_allclose(flexi.predict(images, verbose=0), own, atol=1e-5)
    logits = keras.ops.convert_to_numpy(flexi(images, training=True))
    np.testing.assert_allclose(logits, own, atol=1e-5)
    flexi = compiled(model, [4], eval_patch_size=6)
    np.testing.assert_allclose(flexi.predict(images, verbose=0), other, atol=1e-5)
    loss = flexi.evaluate(images, labels, verbose=0)
    assert abs(loss - float(LOSS(labels, other))) < 1e-5


def test_seed_reproduces_the_draws_and_the_weights():
    first, again, other = (compiled(tiny(), seed=seed) for seed in (1, 1, 2))
    drawn = [drawn_by(flexi) for flexi in (first, again)]
    for flexi in (first, again):
        flexi.fit(*toy(), batch_size=3, shuffle=False, verbose=0)
    np.testing.assert_array_equal(values(first.vit)[KERNEL], values(again.vit)[KERNEL])
    other.make_train_function()
    assert drawn[0] == drawn[1] != [other._draw() for _ in drawn[0]]


def test_restored_variables_resume_the_draws():
    whole, first, second = (compiled(tiny(), seed=seed) for seed in (1, 1, 2))
    drawn = drawn_by(whole)
    whole.fit(*toy(), batch_size=3, epochs=2, shuffle=False, verbose=0)
    first.fit(*toy(), batch_size=3, shuffle=False, verbose=0)
    for theirs, ours in zip(first.variables, second.variables, strict=True):
        ours.assign(keras.ops.convert_to_numpy(theirs))
    rest = drawn_by(second)
    second.fit(*toy(), batch_size=3, shuffle=False, verbose=0)
    assert rest == drawn[8:] and rest != drawn[:8]
    for path, value in values(whole.vit).items():
        np.testing.assert_allclose(values(second.vit)[path], value, atol=1e-6, err_msg=path)


def test_callbacks_and_saving_work_as_for_any_model(tmp_path):
    flexi, (images, labels) = compiled(tiny(dtype="mixed_bfloat16"), seed=5), toy()
    best = tmp_path / "best.keras"
    callbacks = [
        keras.callbacks.EarlyStopping(patience=0, min_delta=1e9, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(best),
    ]
    validation = (images, labels)
    history = flexi.fit(
        *toy(), epochs=5, verbose=0, callbacks=callbacks, validation_data=validation
    )
    assert len(history.epoch) == 2  # the first, and the one that did not improve on it
    loss = flexi.evaluate(images, labels, verbose=0)
    assert abs(loss - history.history["val_loss"][0]) < 1e-3
    loaded = keras.saving.load_model(best)
    assert isinstance(loaded, FlexiViT) and loaded.patch_sizes == ((4, 4), (6, 6))
    assert loaded.vit.config == flexi.vit.config and loaded.seed == 5
    loss = loaded.evaluate(images, labels, verbose=0)
    assert abs(loss - history.history["val_loss"][1]) < 1e-3
    flexi.vit.save(tmp_path / "vit.keras")
    assert isinstance(keras.saving.load_model(tmp_path / "vit.keras"), keras_vit.ViT)


def test_frozen_kernel_stays():
    model = tiny()
    model.get_layer("patches").trainable = False
    before = values(model)
    compiled(model).train_on_batch(*toy(6))
    np.testing.assert_array_equal(values(model)[KERNEL], before[KERNEL])
    assert np.abs(values(model)[TABLE] - before[TABLE]).max() > 0


@pytest.mark.backend_free
def test_what_cannot_be_resized_is_refused():
    with pytest.raises(ValueError, match="model must be a keras_vit.ViT"):
        FlexiViT(keras.Sequential())
    with pytest.raises(ValueError, match="at least one patch size"):
        FlexiViT(tiny(), [])
    with pytest.raises(ValueError, match="multiple of patch_size"):
        FlexiViT(tiny(), [5])
    with pytest.raises(ValueError, match="patch_norm"):
        FlexiViT(tiny(patch_norm=True), [4])
    model = tiny()
    flexi = compiled(model)
    model.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA"):
        flexi.fit(*toy(), verbose=0)

"""`Objective` through a small subclass: what Keras' trainers do with it on each backend."""

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.train import Checkpoint
from keras_vit.train.objectives.objective import Objective


@keras.saving.register_keras_serializable("test_objective")
class Denoise(Objective):
    """Predicts the mean color of an image from a noisy version of it."""

    reads = "pre_logits"

    def __init__(self, vit, noise=1.0, **kwargs):
        super().__init__(vit, **kwargs)
        self.noise, features = noise, vit.features()
        self.features = lambda images, training: features(images, training=training)
        self.color = keras.layers.Dense(3, dtype=vit.dtype_policy, name="color")
        self.color.build((None, vit.config.width))

    def call(self, images, training=None):
        shape = keras.ops.shape(images)
        noise = keras.random.normal(shape, seed=self.seed_for(training))
        color = self.color(self.features(images + self.noise * noise, training))
        return {"color": color, "noise": noise}

    def image_losses(self, images, labels, outputs):
        target = keras.ops.mean(images, axis=(1, 2))
        color = keras.ops.cast(outputs["color"], "float32")
        return keras.ops.sum((color - target) ** 2, axis=-1)

    def get_config(self):
        return {**super().get_config(), "noise": self.noise}


def tiny(dtype=None, **fields):
    config = dict(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=12)
    return keras_vit.ViT({**config, "num_classes": 0, **fields}, dtype=dtype)


def toy(count=12):
    """Images of one color each, with some noise."""
    rng = np.random.default_rng(1)
    colors = rng.normal(size=(count, 1, 1, 3))
    return (colors + 0.1 * rng.normal(size=(count, 8, 8, 3))).astype("float32")


def compiled(vit=None, rate=0.05, noise=1.0, **arguments):
    objective = Denoise(vit or tiny(), noise, seed=1)
    objective.compile(keras.optimizers.SGD(rate), **arguments)
    return objective


def values(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_fit_needs_no_labels_and_trains_the_vit(dtype):
    vit = tiny(dtype)
    objective, before = compiled(vit, noise=0.1), values(vit)
    images = toy()
    losses = objective.fit(images, batch_size=4, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert objective.vit is vit and objective.dtype_policy.name == dtype
    changed = [np.abs(a - b).max() > 0 for a, b in zip(values(vit), before, strict=True)]
    assert sum(changed) > len(changed) - 3  # but the key's bias, which the softmax does not see


def test_labels_are_ignored():
    losses = []
    for data in [(toy(),), (toy(), np.arange(12))]:
        keras.utils.set_random_seed(0)
        objective = compiled()
        losses.append(objective.fit(*data, batch_size=4, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_validation_draws_the_same_noise_each_time_and_training_does_not():
    images = toy()
    objective = compiled(rate=0.0)
    history = objective.fit(images, epochs=2, verbose=0, validation_data=(images,)).history
    assert history["val_loss"][0] == history["val_loss"][1]
    assert history["loss"][0] != history["loss"][1]
    evaluated = objective.evaluate(images, verbose=0)
    np.testing.assert_allclose(evaluated, history["val_loss"][0], rtol=1e-6)
    outputs = objective.predict(images, verbose=0)
    assert {k: v.shape for k, v in outputs.items()} == {"color": (12, 3), "noise": (12, 8, 8, 3)}
    np.testing.assert_array_equal(objective.predict(images, verbose=0)["noise"], outputs["noise"])


def test_evaluation_does_not_change_the_training_that_follows():
    histories = []
    for validation in ((), (toy(4),)):
        keras.utils.set_random_seed(0)
        history = compiled().fit(
            toy(), epochs=2, shuffle=False, verbose=0, validation_data=validation or None
        )
        histories.append(history.history["loss"])
    assert histories[0] == histories[1]


def test_sample_weight_multiplies_the_loss_of_each_image():
    images, objective = toy(4), compiled(noise=0.0)
    objective.color.kernel.assign(np.zeros(objective.color.kernel.shape))
    images[:] = np.float32([1, 2, 3, 4])[:, None, None, None]
    # The prediction is 0: the loss of an image of value v is 3 v^2.
    loss = objective.evaluate(images, verbose=0)
    np.testing.assert_allclose(loss, 3 * (1 + 4 + 9 + 16) / 4, rtol=1e-6)
    weight = np.float32([1, 0, 0.5, 0])
    loss = objective.evaluate(images, np.zeros(4), sample_weight=weight, verbose=0)
    np.testing.assert_allclose(loss, 3 * (1 + 0.5 * 9) / 4, rtol=1e-6)


def test_regularization_is_added():
    objective = compiled(noise=0.0)
    plain = objective.evaluate(toy(), verbose=0)
    penalty = 0.1 * float(np.sum(keras.ops.convert_to_numpy(objective.color.kernel) ** 2))
    assert penalty > 1e-3
    again = compiled(noise=0.0)
    again.set_weights(objective.get_weights())
    again.color.kernel.regularizer = keras.regularizers.L2(0.1)
    np.testing.assert_allclose(again.evaluate(toy(), verbose=0), plain + penalty, rtol=1e-5)


@pytest.mark.only_on("tensorflow", "jax")
def test_steps_per_execution_train_as_single_steps():
    trained = []
    for steps in (1, 2):
        keras.utils.set_random_seed(0)
        objective = compiled(steps_per_execution=steps)
        objective.fit(toy(), batch_size=2, epochs=2, shuffle=False, verbose=0)
        trained.append(values(objective))
    for one, two in zip(*trained, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_interrupted_training_resumes_bit_for_bit(tmp_path):
    def made():
        keras.utils.set_random_seed(0)
        return compiled(tiny(dropout=0.1))

    arguments = dict(batch_size=4, shuffle=False, verbose=0)
    checkpoint, whole = Checkpoint(tmp_path / "whole"), made()
    checkpoint.restore(whole)
    whole.fit(toy(), epochs=3, callbacks=checkpoint.around([]), **arguments)
    checkpoint, first = Checkpoint(tmp_path / "parts"), made()
    checkpoint.restore(first)
    first.fit(toy(), epochs=1, callbacks=checkpoint.around([]), **arguments)
    checkpoint, second = Checkpoint(tmp_path / "parts"), compiled(tiny(dropout=0.1))
    second.seed_generator.state.assign(np.zeros(2))
    assert checkpoint.restore(second).epoch == 1
    second.fit(toy(), epochs=3, initial_epoch=1, callbacks=checkpoint.around([]), **arguments)
    assert_same(values(second), values(whole))
    assert np.abs(values(first)[1] - values(whole)[1]).max() > 0


def test_saving_keeps_the_objective_and_what_it_trained(tmp_path):
    objective = compiled(tiny("mixed_bfloat16"), noise=0.5)
    objective.fit(toy(), verbose=0)
    objective.save(tmp_path / "objective.keras")
    loaded = keras.saving.load_model(tmp_path / "objective.keras")
    assert isinstance(loaded, Denoise) and (loaded.noise, loaded.seed) == (0.5, 1)
    assert loaded.vit.config == objective.vit.config
    assert loaded.dtype_policy.name == loaded.vit.dtype_policy.name == "mixed_bfloat16"
    assert_same(loaded.get_weights(), objective.get_weights())
    assert loaded.evaluate(toy(), verbose=0) == objective.evaluate(toy(), verbose=0)
    loaded.fit(toy(), verbose=0)
    objective.vit.save(tmp_path / "vit.keras")
    assert type(keras.saving.load_model(tmp_path / "vit.keras")) is keras_vit.ViT


def test_weights_that_are_not_read_are_not_trained():
    vit = tiny(num_classes=5, head_init="truncated_normal", pooling="mean")
    objective = Denoise(vit)
    objective.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    before, kernel = vit.get_layer("head").get_weights(), values(vit.get_layer("patches"))
    objective.fit(toy(), verbose=0)
    assert_same(vit.get_layer("head").get_weights(), before)
    assert np.abs(values(vit.get_layer("patches"))[0] - kernel[0]).max() > 0
    paths = {v.path for v in objective.trainable_variables}
    assert "head/kernel" not in paths and "color/kernel" in paths
    rest = {v.path for v in objective.non_trainable_weights}
    assert rest == {"head/kernel", "head/bias"} and len(paths) + 2 == len(objective.weights)


def test_frozen_parts_stay_frozen_after_loading(tmp_path):
    vit = tiny()
    vit.get_layer("patches").trainable = False
    objective = compiled(vit)
    objective.save(tmp_path / "objective.keras")
    loaded = keras.saving.load_model(tmp_path / "objective.keras")
    assert not loaded.vit.get_layer("patches").trainable
    assert len(loaded.trainable_variables) == len(objective.trainable_variables)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="vit must be a keras_vit.ViT"):
        Denoise(keras.Sequential())
    for seed in (-1, 0.5, True, "1"):
        with pytest.raises(ValueError, match="seed must be None or an int"):
            Denoise(tiny(), seed=seed)
    vit = tiny()
    vit.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA and quantization"):
        Denoise(vit)
    vit = tiny()
    vit.blocks[0].mlp.dense_1.quantize("int8")
    with pytest.raises(ValueError, match="without LoRA and quantization"):
        Denoise(vit)


def test_a_loss_of_keras_is_refused():
    objective = Denoise(tiny())
    objective.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match="loss must be None: Denoise computes its own"):
        objective.fit(toy(), toy(), verbose=0)

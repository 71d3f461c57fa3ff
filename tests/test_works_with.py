"""What users of Keras have around `fit`: callbacks, clones, scikit-learn, a tuner, a log."""

import keras
import numpy as np
import pytest
from conformance import TINY, images, tiny_model

from keras_vit import ViT

LABELS = np.arange(6) % 3


@pytest.fixture
def samples():
    return images(TINY, 6)


def compiled():
    model = ViT(TINY)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def test_callbacks_save_restore_and_log(samples, tmp_path):
    pytest.importorskip("tensorboard")
    best = tmp_path / "best.keras"
    callbacks = [
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(best, monitor="loss"),
        keras.callbacks.TensorBoard(tmp_path / "logs"),
    ]
    model = compiled()
    model.fit(samples, LABELS, epochs=2, callbacks=callbacks, verbose=0)
    wanted = model.predict(samples, verbose=0)
    np.testing.assert_allclose(
        keras.saving.load_model(best).predict(samples, verbose=0), wanted, atol=1e-6
    )
    again = compiled()  # as after a crash: it has the weights, and nothing is left to train
    history = again.fit(samples, LABELS, epochs=2, callbacks=callbacks[:1], verbose=0)
    np.testing.assert_allclose(again.predict(samples, verbose=0), wanted, atol=1e-6)
    assert not history.history and list((tmp_path / "logs").rglob("events*"))


def test_clone_is_a_functional_model_of_its_own(samples):
    model = tiny_model()
    clone = keras.models.clone_model(model)
    assert not np.allclose(clone.predict(samples, verbose=0), wanted := model.predict(samples))
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(clone.predict(samples, verbose=0), wanted, atol=1e-6)
    assert isinstance(ViT.from_config(model.get_config()), ViT)


@pytest.mark.backend_free
def test_scikit_learn_takes_flat_images(samples):
    pytest.importorskip("sklearn")

    def build(X, y):
        flat = keras.Input((X.shape[1],))
        pixels = keras.layers.Reshape(TINY.input_shape)(flat)
        model = keras.Model(flat, ViT(TINY)(pixels))
        model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
        return model

    wrapped = keras.wrappers.SKLearnClassifier(build, fit_kwargs={"epochs": 1, "verbose": 0})
    found = wrapped.fit(samples.reshape(6, -1), LABELS).predict(samples.reshape(6, -1))
    assert found.shape == (6,) and set(found) <= {0, 1, 2}


@pytest.mark.backend_free
def test_keras_tuner_searches_the_fields(samples, tmp_path):
    tuner = pytest.importorskip("keras_tuner")

    def build(choice):
        config = TINY.replace(depth=choice.Int("depth", 1, 2), drop_path=choice.Choice("p", [0.0]))
        model = ViT(config)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        return model

    search = tuner.GridSearch(build, "loss", max_trials=2, directory=tmp_path)
    search.search(samples, LABELS, epochs=1, verbose=0)
    assert search.get_best_hyperparameters()[0].get("depth") in (1, 2)


@pytest.mark.backend_free
def test_plot_model_draws_the_layers(tmp_path):
    pytest.importorskip("pydot")
    graph = keras.utils.model_to_dot(tiny_model()).to_string()
    assert all(name in graph for name in ("patches", "encoder_block_1", "head"))


@pytest.mark.only_on("tensorflow")  # the callback imports it, whatever the backend
def test_weights_and_biases_logs_the_epochs(samples, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.integration.keras import WandbMetricsLogger

    logged = []
    run = wandb.init(mode="disabled")  # "offline" starts a process
    monkeypatch.setattr(wandb, "log", logged.append)
    callback = WandbMetricsLogger()
    assert isinstance(callback, keras.callbacks.Callback)
    fitted = compiled().fit(samples, LABELS, epochs=2, callbacks=[callback], verbose=0)
    run.finish()
    assert [logs["epoch/loss"] for logs in logged] == fitted.history["loss"]
    assert logged[-1]["epoch/learning_rate"] == pytest.approx(1e-3)

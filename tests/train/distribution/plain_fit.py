"""`fit` as users call it, on one device or on several; a program that the tests start.

    python plain_fit.py all out.json arrays generator ...

Each case enters its own scope with a model of its own size, so that nothing depends on the scope
before. It is a program because TensorFlow needs its logical devices before anything else.
"""

import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import runtime
from keras_vit.train import distribution

BATCH = 4


def data(number):
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, 5)).astype("float32"), rng.integers(0, 3, number)


def batches(number):
    """A generator that yields each batch once."""
    x, y = data(number * BATCH)
    for first in range(0, len(x), BATCH):
        yield x[first : first + BATCH], y[first : first + BATCH]


def make(devices, width, seed=0):
    if seed is not None:
        keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(width), keras.layers.Dense(3)]
    return compiled(keras.Sequential(layers), devices)


def compiled(model, devices, loss=None, rate=0.5):
    model.compile(
        devices.optimizer(lambda: keras.optimizers.SGD(rate), "float32"),
        loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=devices.jit_compile(),
    )
    devices.prepare(model)
    return model


def numbers(model, history):
    kernels = [keras.ops.convert_to_numpy(weight).ravel().tolist() for weight in model.weights]
    return {"weights": sum(kernels, []), **history.history}


def arrays(devices):
    """Arrays with sample weights; the last batch has two samples."""
    model = make(devices, 3)
    x, y = data(10)
    weights = np.linspace(0, 2, 10)
    history = model.fit(x, y, BATCH, 2, sample_weight=weights, shuffle=False, verbose=0)
    return numbers(model, history)


def generator(devices):
    model = make(devices, 4)
    return numbers(model, model.fit(batches(5), steps_per_epoch=2, epochs=2, verbose=0))


def generator_of_keras(devices):
    """Like `generator`, but with Keras' own trainer, on TensorFlow."""
    from keras_vit.train.distribution.tensorflow_trainer_fixes import trainer

    build = trainer.TensorFlowTrainer._maybe_symbolic_build
    trainer.TensorFlowTrainer._maybe_symbolic_build = getattr(build, "__wrapped__", build)
    try:
        return generator(devices)
    finally:
        trainer.TensorFlowTrainer._maybe_symbolic_build = build


def dataset(devices):
    """Whole batches of tf.data, with class weights."""
    model = make(devices, 5)
    x, y = data(12)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(whole, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, shuffle=False, verbose=0)
    return numbers(model, history)


def evaluation(devices):
    """Nine samples: the last batch has one, which only one device gets."""
    model = make(devices, 6)
    x, y = data(9)
    found = model.evaluate(x, y, BATCH, verbose=0)
    history = model.fit(
        x[:8], y[:8], BATCH, validation_data=(x, y, np.linspace(0, 2, 9)), verbose=0, shuffle=False
    )
    predictions = np.asarray(model.predict(x, BATCH, verbose=0))
    with devices.alone():
        layers = [keras.Input((5,)), keras.layers.Dense(6), keras.layers.Dense(3)]
        plain = keras.Sequential(layers)
        plain.set_weights([keras.ops.convert_to_numpy(w) for w in model.weights])
        called = keras.ops.convert_to_numpy(plain(x))
    return {
        "evaluation": found,
        "predictions": predictions.ravel().tolist(),
        "called": called.ravel().tolist(),
        **numbers(model, history),
    }


def once(devices):
    """Losses of epochs with rate 0, shuffled without a seed: each is the mean over all samples."""
    x, y = np.zeros((16, 5), "float32"), 2.0 ** np.arange(16)
    found = {}
    for name, batches in (
        ("arrays", (x, y, BATCH)),
        ("dataset", (tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(BATCH),)),
    ):
        model = compiled(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]), devices)
        model.compile(keras.optimizers.SGD(0.0), "mae", jit_compile=devices.jit_compile())
        try:
            found[name] = model.fit(*batches, epochs=3, verbose=0).history["loss"]
        except ValueError as error:
            found[name] = str(error)
    return found


def unequal(devices):
    """Batches that two devices of TensorFlow refuse."""
    model = make(devices, 7)
    x, y = data(9)
    odd = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    said = {}
    for name, call in (
        ("arrays", lambda: model.fit(x, y, BATCH, verbose=0)),
        ("dataset", lambda: model.fit(odd, verbose=0)),
    ):
        try:
            call()
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            said[name] = str(error)
    return said


def elsewhere(devices):
    """A model that was created outside the scope."""
    with devices.alone():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    try:
        compiled(model, devices)
    except ValueError as error:
        return str(error)
    return ""


def exported(devices):
    """A ViT that one process saves and exports inside the scope."""
    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(
        image_size=(24, 16),
        patch_size=8,
        in_channels=1,
        width=20,
        depth=1,
        num_heads=5,
        mlp_dim=28,
        num_classes=3,
    )
    model = compiled(keras_vit.ViT(config), devices)
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (8, 24, 16, 1)).astype("float32"), rng.integers(0, 3, 8)
    model.fit(x, y, BATCH, 2, verbose=0, shuffle=False)
    found = {"model": keras.ops.softmax(model.predict(x, verbose=0)).numpy().ravel().tolist()}
    with tempfile.TemporaryDirectory() as folder, devices.alone():
        file, saved = Path(folder, "model.keras"), Path(folder, "saved")
        model.save(file)
        keras_vit.export_saved_model(model, saved)
        opened = {"keras": runtime.open(file), "saved_model": runtime.open(saved)}
        found |= {name: one.probabilities(x).ravel().tolist() for name, one in opened.items()}
    return found


def masks(devices):
    """Three dropout masks on each device, and the states of the seeds."""
    layer = keras.layers.Dropout(0.5, seed=3)
    layer.build((None, 64))
    run = tf.function(lambda: layer(tf.ones((1, 64)), training=True))
    strategy = getattr(devices, "strategy", tf.distribute.get_strategy())
    local = strategy.experimental_local_results
    seen = [[v.numpy().tolist() for v in local(strategy.run(run))] for _ in range(3)]
    return seen, [v.numpy().tolist() for v in local(layer.seed_generator.state.value)]


def main(devices, out, *cases):
    if keras.backend.backend() == "tensorflow" and devices != "auto":
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, parts)
    found = {}
    for case in cases:
        with distribution.scope(devices) as made:
            found[case] = globals()[case](made)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Programs for several processes on torch: `run` starts them and reads their results."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
from processes import run_together


def run(what, folder, settings, timeout=240):
    """The exit code, the output and the file of each process."""
    outs = [folder / f"{number}.json" for number in range(len(settings))]
    commands = [[sys.executable, __file__, what, str(out)] for out in outs]
    codes, said = zip(*run_together(commands, settings, timeout), strict=True)
    return list(codes), said, [json.loads(out.read_text()) for out in outs if out.exists()]


# -- what the processes do


def vit(precision="float32", **config):
    import keras_vit

    keras.utils.set_random_seed(0)
    config = {"patch_size": 8, "width": 20, "depth": 1, "num_heads": 5, "mlp_dim": 28, **config}
    config |= {"image_size": (24, 16), "in_channels": 1, "num_classes": 3}
    config["head_init"] = "truncated_normal"
    return keras_vit.ViT(keras_vit.ViTConfig(**config), dtype=precision)


def numbers(samples=32):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((samples, 24, 16, 1)).astype("float32")
    return images, np.eye(3, dtype="float32")[rng.integers(0, 3, samples)]


def compiled(model, optimizer, **more):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.CategoricalAccuracy(name="accuracy"), keras.metrics.AUC(name="auc")]
    model.compile(optimizer, loss, weighted_metrics=metrics, **more)
    return model


def trained(model, x, y, **more):
    """The losses and metrics of each step and of an evaluation, and every weight."""
    rows = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rows.append([float(v) for v in logs.values()])
    )
    model.fit(x, y, batch_size=8, callbacks=[each], verbose=0, **{"shuffle": False, **more})
    some = keras.tree.map_structure(lambda a: a[:21], (x, y))  # 8, 8, 5
    rows.append(np.atleast_1d(model.evaluate(*some, batch_size=8, verbose=0)).tolist())
    return {"logs": rows, **{w.path: keras.ops.convert_to_numpy(w) for w in model.weights}}


def simple(optimizer, **config):
    return lambda: trained(compiled(vit(**config), optimizer()), *numbers())


def uneven():
    x, y = numbers(29)  # the last batch has 5
    return trained(compiled(vit(), keras.optimizers.SGD(0.05)), x, y, epochs=2)


def weighted():
    x, y = numbers()
    weights = np.random.default_rng(1).uniform(0, 2, len(x)).astype("float32")
    return trained(compiled(vit(), keras.optimizers.SGD(0.05)), x, y, sample_weight=weights)


def summed():
    """A loss that is a sum, a penalty on weights, two outputs, and an unused weight."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((24, 16, 1))
    layer = WithSpare(5, kernel_regularizer=keras.regularizers.L2(0.01), name="hidden")
    x = layer(keras.layers.Flatten()(inputs))
    outputs = {"a": keras.layers.Dense(3, name="a")(x), "b": keras.layers.Dense(3, name="b")(x)}
    model = keras.Model(inputs, outputs)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(keras.optimizers.SGD(0.001), {"a": loss, "b": "mse"})
    x, y = numbers()
    return trained(model, x, {"a": y, "b": y})


class WithSpare(keras.layers.Dense):
    """A Dense layer with a weight that it does not use."""

    def build(self, input_shape):
        super().build(input_shape)
        self.spare = self.add_weight(shape=(2,), name="spare")


def frozen():
    """Trains only the head, then everything."""
    x, y = numbers()
    model = compiled(vit(), keras.optimizers.SGD(0.05))
    frozen_layers = [layer for layer in model.layers if layer.name != "head"]
    for layer in frozen_layers:
        layer.trainable = False
    compiled(model, keras.optimizers.SGD(0.05))
    found = {f"head {k}": v for k, v in trained(model, x, y).items()}
    for layer in frozen_layers:
        layer.trainable = True
    compiled(model, keras.optimizers.SGD(0.05))
    return found | trained(model, x, y)


def overflow():
    """An image with values too large for float16, in the second half of the second batch."""
    x, y = numbers()
    x[13] = 1e6
    model = compiled(vit("mixed_float16"), keras.optimizers.SGD(0.05))
    found = trained(model, x, y)
    return {"scale": float(model.optimizer.dynamic_scale), "head": found["head/kernel"]}


def brightness():
    """An objective whose loss reads the images, as those of masked training do."""
    from keras_vit.train.objectives.objective import Objective

    class Brightness(Objective):
        reads = "logits"

        def call(self, images, training=None):
            return {"logits": self.vit(images, training=training)}

        def image_losses(self, images, labels, outputs):
            means = keras.ops.mean(images, axis=(1, 2, 3))  # (B,)
            return (outputs["logits"][:, 0] - 20 * means) ** 2

    model = Brightness(vit(), seed=0)
    model.compile(keras.optimizers.SGD(0.05))
    return model


CASES = {
    "sgd": simple(lambda: keras.optimizers.SGD(0.05)),
    "adamw": simple(lambda: keras.optimizers.AdamW(0.002)),
    "accumulate": simple(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)),
    "clip": simple(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1)),
    "ema": simple(
        lambda: keras.optimizers.SGD(
            0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
        )
    ),
    "uneven": uneven,
    "weighted": weighted,
    "summed": summed,
    "frozen": frozen,
    "overflow": overflow,
    "objective": lambda: trained(brightness(), *numbers()),
}


def apart(one, other):
    """The largest difference of two results, without the biases of keys."""
    assert one.keys() == other.keys()
    return max(
        float(np.abs(np.asarray(one[k], "float64") - np.asarray(other[k], "float64")).max())
        for k in one
        if not k.endswith("key/bias")
    )


def own_parts(devices, model):
    """Trained as it is alone, but each process makes a dataset of its own part."""
    x, y = numbers()
    mine = [tuple(a[i : i + 8][devices.process * 4 :][:4] for a in (x, y)) for i in range(0, 32, 8)]
    rows = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rows.append([float(v) for v in logs.values()])
    )
    model.fit(devices.distribute(mine), callbacks=[each], verbose=0)
    rows.append(np.atleast_1d(model.evaluate(x[:21], y[:21], batch_size=8, verbose=0)).tolist())
    return {"logs": rows, **{w.path: keras.ops.convert_to_numpy(w) for w in model.weights}}


def message(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    return "nothing was raised"


class Marks(keras.layers.Layer):
    """Records what dropout kept."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.seen = []

    def call(self, inputs, training=False):
        outputs = self.dropout(inputs, training=training) * self.scale
        if training and keras.ops.convert_to_tensor(outputs).device.type != "meta":
            self.seen.append(keras.ops.convert_to_numpy(outputs) != 0)
        return outputs


def masks(devices):
    """The dropout masks of three steps in every process, and the states after them."""
    marks = Marks()
    model = keras.Sequential([marks])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    ones = np.ones((24, 10), "float32")
    model.fit(ones, ones, batch_size=8, shuffle=False, verbose=0)
    state = keras.ops.convert_to_numpy(marks.dropout.seed_generator.state)
    return devices.gather(np.stack(marks.seen)).tolist(), devices.gather(state).tolist()


def strangers(devices):
    """How far the weights differ after `fit` shuffled arrays, with another seed in each process."""
    keras.utils.set_random_seed(devices.process)
    model = keras.Sequential([keras.Input((384,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x, y = numbers()
    model.fit(x.reshape(32, -1), y, batch_size=8, epochs=2, verbose=0)
    return float(np.ptp(devices.gather(model.layers[0].kernel.numpy()), axis=0).max())


def compare(out):
    from keras_vit.train import distribution

    wanted = {name: case() for name, case in CASES.items()}
    found = {}
    with distribution.scope("auto") as devices:
        for name, case in CASES.items():
            found[name] = apart(case(), wanted[name])
        plain = compiled(vit(), keras.optimizers.SGD(0.05))
        found["own"] = apart(own_parts(devices, plain), wanted["sgd"])
        found["own objective"] = apart(own_parts(devices, brightness()), wanted["objective"])
        found["control"] = apart(simple(lambda: keras.optimizers.SGD(0.0499))(), wanted["sgd"])
        found["scale"] = wanted["overflow"]["scale"]
        found["masks"], found["states"] = masks(devices)
        found["strangers"] = strangers(devices)
        found["gathered"] = [
            devices.gather(np.full((2, 3), 7 * devices.process + 1, dtype)).tolist()
            for dtype in ("uint8", "int32", "float32", "bool")
        ]
        found["facts"] = [devices.kind, devices.replicas, devices.processes, devices.process]
        found["said"] = str(devices)
        x, y = numbers(8)
        model = compiled(vit(), keras.optimizers.SGD(0.05))
        found["others"] = message(lambda: model.train_on_batch(x + devices.process, y), ValueError)
        found["sizes"] = message(
            lambda: model.fit(
                devices.distribute([(x[: 4 + devices.process], y[: 4 + devices.process])]),
                verbose=0,
            ),
            ValueError,
        )
        found["jit"] = message(lambda: devices.jit_compile(True), ValueError)
        compiled_whole = vit()
        compiled_whole.compile("sgd", "mse", jit_compile=True)
        found["jit in fit"] = message(lambda: compiled_whole.fit(x, y, verbose=0), ValueError)
        found["predicted"] = model.predict(x[:5], verbose=0).shape
    found["after"] = apart(CASES["sgd"](), wanted["sgd"])  # Keras' own steps again
    Path(out).write_text(json.dumps(found))


def die(out):
    from keras_vit.train import distribution

    x, y = numbers()
    with distribution.scope("auto") as devices:

        def step(batch, logs):
            if devices.process == 1 and batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        model = compiled(vit(), keras.optimizers.SGD(0.05))
        each = keras.callbacks.LambdaCallback(on_train_batch_end=step)
        model.fit(x, y, batch_size=8, epochs=10_000, callbacks=[each], verbose=0)


def wait(out):
    from keras_vit.train import distribution

    start = time.time()
    try:
        with distribution.scope("auto"):
            pass
    finally:
        Path(out).write_text(str(time.time() - start))


if __name__ == "__main__":
    {"compare": compare, "die": die, "wait": wait}[sys.argv[1]](sys.argv[2])

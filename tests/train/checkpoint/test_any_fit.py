"""`Checkpoint` and what users pass to `fit`: arrays, a PyDataset, optimizers, callbacks."""

import json
import os
import shutil
import signal

import keras
import numpy as np
import pytest
from processes import receive_sigterm

from keras_vit.lock import Lock
from keras_vit.train.checkpoint import manifest, model_state
from keras_vit.train.checkpoint.checkpoint import Checkpoint
from keras_vit.train.checkpoint.sigterm import Sigterm

STEPS, BATCH, EPOCHS = 4, 6, 3
TORCH, TENSORFLOW = (keras.backend.backend() == name for name in ("torch", "tensorflow"))


def make_model(optimizer=None, seed=0):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((7,)), *layers])
    model.compile(optimizer or keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


def numbers(size=STEPS * BATCH):
    x = np.random.default_rng(0).standard_normal((size, 7)).astype("float32")
    return x, x[:, :3]


class Numbered(keras.utils.PyDataset):
    """Returns a batch by its number."""

    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        x, y = numbers()
        return x[number * BATCH : (number + 1) * BATCH], y[number * BATCH : (number + 1) * BATCH]


def dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(numbers()).batch(BATCH)


DATA = {
    "arrays": (lambda: {"x": numbers()[0], "y": numbers()[1], "batch_size": BATCH}, False),
    "shuffled arrays": (lambda: {"x": numbers()[0], "y": numbers()[1], "batch_size": BATCH}, True),
    "a PyDataset": (lambda: {"x": Numbered()}, False),
    "a tf.data.Dataset": (lambda: {"x": dataset()}, False),
}


class OneLayer(keras.Model):
    """A subclassed model, built by its first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


class Raise(keras.callbacks.Callback):
    """Ends a run like a kill, at the start of a step, counted over the whole run."""

    def __init__(self, at):
        super().__init__()
        self.at, self.seen = at, 0

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        if self.seen == self.at:
            raise KeyboardInterrupt
        self.seen += 1


def fit(model, folder, kind, callbacks=(), shuffle=None, **settings):
    """Returns the history of `fit` and the position where it started."""
    make, shuffled = DATA[kind]
    checkpoint = Checkpoint(folder, **{"save_freq": 1, "keep": 100, **settings})
    start = checkpoint.restore(model)
    try:
        history = model.fit(
            **make(),
            epochs=EPOCHS,
            initial_epoch=start.epoch,
            callbacks=checkpoint.around([*callbacks]),
            shuffle=shuffled,
            verbose=0,
        )
    finally:
        checkpoint.close()
    return history, start


def state(model):
    return model_state.collect(model, model_state.STATE)


def same(one, other):
    return all(array.tobytes() == other[name].tobytes() for name, array in one.items())


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("kind", DATA)
def test_data_that_restarts_resumes_at_the_start_of_an_epoch(tmp_path, kind, caplog):
    if kind == "shuffled arrays" and TENSORFLOW:
        pytest.skip("the state of TensorFlow's shuffling cannot be read")
    straight = make_model()
    wanted, _ = fit(straight, tmp_path / "straight", kind)
    assert f"Keras restarts {kind.removeprefix('shuffled ')}" in caplog.text
    assert manifest.steps(tmp_path / "straight") == [4, 8, 12]  # though save_freq is 1
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), tmp_path / "killed", kind, [Raise(at=6)])
    model = make_model()
    history, start = fit(model, tmp_path / "killed", kind)
    assert (start.epoch, start.step_in_epoch, start.step) == (1, 0, 4)
    assert same(state(straight), state(model)) and history.history == wanted.history
    other = make_model(seed=1)
    fit(other, tmp_path / "other", kind)
    assert not same(state(straight), state(other))


@pytest.mark.only_on("torch")
def test_shuffled_arrays_are_shuffled_differently_each_epoch(tmp_path):
    """Without dropout, which also draws random numbers."""
    seen = []

    class Look(keras.layers.Layer):
        def call(self, x):
            seen.append(keras.ops.convert_to_numpy(x)[:, 0].tolist())
            return x

    model = keras.Sequential([keras.Input((7,)), Look(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    seen.clear()
    fit(model, tmp_path, "shuffled arrays")
    epochs = [sum(seen[-12:][4 * n : 4 * n + 4], []) for n in range(EPOCHS)]
    assert len(set(map(tuple, epochs))) == EPOCHS
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_arrays_with_steps_do_not_resume_bit_for_bit_and_log_it(tmp_path, caplog):
    x, y = numbers(2 * STEPS * BATCH)
    for epochs in (2, 3):
        model, checkpoint = make_model(), Checkpoint(tmp_path)
        start = checkpoint.restore(model)
        assert ("not bit for bit" in caplog.text) is False
        model.fit(
            *(x, y, BATCH, epochs, 0, checkpoint.around()),
            initial_epoch=start.epoch,
            steps_per_epoch=STEPS,
            shuffle=False,
        )
    assert "Keras starts arrays at the first sample, and not where the run was" in caplog.text


def test_arrays_in_the_middle_of_an_epoch_are_refused(tmp_path):
    x, y = numbers()
    checkpoint = Checkpoint(tmp_path, save_freq=3)
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(
            ((x, y) for _ in range(20)),
            steps_per_epoch=STEPS,
            epochs=2,
            callbacks=checkpoint.around([Raise(at=7)]),
            verbose=0,
        )
    checkpoint.close()
    assert manifest.steps(tmp_path)[-1] == 6
    with pytest.raises(
        ValueError, match="x must be data that can start at step 6.*Received: arrays"
    ):
        fit(make_model(), tmp_path, "arrays")


def test_sigterm_with_data_that_restarts_keeps_the_last_epoch(tmp_path, caplog):
    class Terminate(Raise):
        def on_train_batch_begin(self, batch, logs=None):
            if self.seen == self.at:
                receive_sigterm()
            self.seen += 1

    with pytest.raises(SystemExit):
        fit(make_model(), tmp_path / "later", "arrays", [Terminate(at=6)])
    assert manifest.steps(tmp_path / "later") == [4]
    assert "SIGTERM: the run ends, saved at step 4" in caplog.text
    with pytest.raises(SystemExit):
        fit(make_model(), tmp_path / "early", "arrays", [Terminate(at=1)])
    assert "SIGTERM: the run ends, nothing was saved" in caplog.text


def test_sigterm_during_an_evaluation_saves_at_its_end(tmp_path):
    class Terminate(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            receive_sigterm()

    x, y = numbers()
    checkpoint = Checkpoint(tmp_path, every_minutes=None)
    with pytest.raises(SystemExit):
        make_model().fit(
            x, y, BATCH, 3, 0, checkpoint.around([Terminate()]), validation_data=(x, y)
        )
    assert Checkpoint(tmp_path).restore(make_model()).epoch == 1


def test_second_sigterm_reaches_the_previous_handler(monkeypatch):
    """As above, without the signal itself."""
    monkeypatch.setattr(os, "kill", lambda process, number: receive_sigterm())
    obeyed = []
    before = signal.signal(signal.SIGTERM, lambda *_: obeyed.append(1))
    try:
        watcher = Sigterm()
        watcher.watch()
        receive_sigterm()
        assert watcher.came and not obeyed
        receive_sigterm()
        assert obeyed == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_copied_run_writes_to_its_own_folder(tmp_path):
    class Log(keras.callbacks.Callback):
        """Derives a path from a setting."""

        def __init__(self, folder):
            super().__init__()
            self.path = str(folder / "log.txt")
            self.lines = 0

        def on_epoch_end(self, epoch, logs=None):
            self.lines += 1
            with open(self.path, "a") as file:
                file.write(f"{self.lines}\n")

    one, two = tmp_path / "one", tmp_path / "two"
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), one / "checkpoints", "arrays", [Log(one), Raise(at=10)])
    shutil.copytree(one, two)
    fit(make_model(), two / "checkpoints", "arrays", [Log(two)])
    assert (one / "log.txt").read_text() == "1\n2\n"
    assert (two / "log.txt").read_text() == "1\n2\n3\n"  # its counter is restored


@pytest.mark.sampled(cases=0)
def test_learning_rate_callbacks_resume_in_the_middle_of_an_epoch(tmp_path):
    """They set the rate at the start of a run or an epoch, which is repeated after a kill."""

    def schedule(epoch, rate):
        return rate * 0.5

    def batches(step):
        while True:
            x = np.random.default_rng(step).standard_normal((BATCH, 7)).astype("float32")
            yield x, x[:, :3]
            step += 1

    def run(folder, at=None):
        model, checkpoint = make_model(), Checkpoint(folder, save_freq=1)
        start = checkpoint.restore(model)
        others = [keras.callbacks.LearningRateScheduler(schedule)]
        others += [keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9)]
        others += [] if at is None else [Raise(at)]
        arguments = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0}
        arguments |= {"initial_epoch": start.epoch, "callbacks": checkpoint.around(others)}
        model.fit(batches(start.step), **arguments)
        return model

    straight = run(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", at=6)
    assert same(state(straight), state(run(tmp_path / "killed")))


def test_further_optimizers_of_a_model_are_restored(tmp_path):
    def make(rate=0.1, built=True):
        keras.backend.clear_session()
        model = OneLayer()
        model(np.zeros((1, 7), "float32"))
        model.compile("sgd", "mse")
        model.second = keras.optimizers.Adam(rate)
        if built:
            model.second.build(model.trainable_variables)
        return model

    model = make()
    for number, variable in enumerate(model.second.variables):
        variable.assign(keras.ops.full(variable.shape, number + 2, dtype=variable.dtype))
    fit(model, tmp_path, "arrays")
    again = make()
    assert not same(state(model), state(again))
    Checkpoint(tmp_path).restore(again)
    assert same(state(model), state(again))
    with pytest.raises(ValueError, match="must be built before a checkpoint.*Received: adam"):
        Checkpoint(tmp_path).restore(make(built=False))


def test_model_that_only_looks_built_is_refused(tmp_path):
    model = OneLayer()
    model.built = True
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="call it once on a batch. Received: .*dense.* is not"):
        Checkpoint(tmp_path).restore(model)
    model(np.zeros((1, 7), "float32"))
    model.unused = keras.layers.Dense(4)  # never called
    Checkpoint(tmp_path).restore(model)


def test_other_optimizer_with_the_same_slots_is_refused_and_the_folder_is_released(tmp_path):
    fit(make_model(keras.optimizers.Adam(0.01)), tmp_path, "arrays")
    with pytest.raises(ValueError, match="optimizer: adam in the checkpoint, adam_w here"):
        Checkpoint(tmp_path).restore(make_model(keras.optimizers.AdamW(0.01)))
    assert str(Lock(tmp_path).path) not in Lock._held
    Checkpoint(tmp_path).restore(make_model(keras.optimizers.Adam(0.01)))


def test_other_backend_is_refused(tmp_path):
    fit(make_model(), tmp_path, "arrays")
    path = tmp_path / "ckpt-000012"
    facts = json.loads((path / manifest.FACTS).read_text())
    facts["versions"]["backend"] = "other"
    (path / manifest.FACTS).write_text(json.dumps(facts))
    files = {name: manifest.file_record(path / name) for name in (manifest.ARRAYS, manifest.FACTS)}
    (path / manifest.MANIFEST).write_text(manifest.manifest_text(files))
    with pytest.raises(
        ValueError, match="KERAS_BACKEND must be that of the checkpoint, other. Received"
    ):
        Checkpoint(tmp_path).restore(make_model())


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    fit(make_model(), tmp_path, "arrays")
    left = tmp_path / "ckpt-000013.tmp-1"
    left.mkdir()
    (left / "state.safetensors").write_text("half")
    Checkpoint(tmp_path).restore(make_model())
    assert not left.exists()


def test_best_starts_over_with_another_metric(tmp_path, caplog):
    fit(make_model(), tmp_path, "arrays", monitor="mae", mode="max", keep=1)
    model, checkpoint = make_model(), Checkpoint(tmp_path, monitor="loss", keep=1)
    start = checkpoint.restore(model)
    x, y = numbers()
    model.fit(x, y, BATCH, 5, 0, checkpoint.around(), initial_epoch=start.epoch)
    assert checkpoint._best.found["name"] == "loss"
    assert "chosen by mae, and is now chosen by loss" in caplog.text

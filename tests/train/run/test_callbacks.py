"""What a run logs, compared with the optimizer's own figures and with a clock of the test."""

import json
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit.train.run import callbacks as watch


def fit(callbacks, epochs=3, steps=4, learning_rate=0.1, validate=True, poison=False):
    """Trains a linear model on 5 features; returns it and the history."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype("float32"), rng.normal(size=(60, 1)).astype("float32")
    if poison:
        y[30:] = np.nan

    def endless():
        while True:
            for i in range(0, 60, 10):
                yield x[i : i + 10], y[i : i + 10]

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    history = model.fit(
        endless(),
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=(x, y) if validate else None,
        callbacks=callbacks,
        verbose=0,
    )
    return model, history.history


class Asked(keras.callbacks.Callback):
    """Records after each epoch the learning rate that the optimizer will use next."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def test_progress_logs_the_learning_rate_that_was_used():
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, 8, warmup_target=0.1, warmup_steps=4, alpha=0.1
    )
    asked = Asked()
    _, history = fit([watch.Progress(10, 12, schedule), asked], learning_rate=schedule)
    last_used = [float(schedule(step)) for step in (3, 7, 11)]
    np.testing.assert_allclose(history["learning_rate"], last_used, rtol=1e-6)
    # The optimizer gives the same rates one step later, so both count steps in the same way.
    np.testing.assert_allclose(asked.rates, [float(schedule(s)) for s in (4, 8, 12)], rtol=1e-6)
    assert abs(history["learning_rate"][0] - asked.rates[0]) > 0.01


def test_progress_logs_a_constant_learning_rate():
    _, history = fit([watch.Progress(10, 12, 0.25)])
    assert history["learning_rate"] == [0.25] * 3


def test_images_per_second_and_minutes_left_follow_the_clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Passes(keras.callbacks.Callback):
        """A batch takes 2 s, the first one 50 s more, an evaluation 7 s."""

        def on_train_batch_begin(self, batch, logs=None):
            self.first = not hasattr(self, "first")
            clock[0] += 52 if self.first else 2

        def on_test_end(self, logs=None):
            clock[0] += 7

    progress = watch.Progress(10, 12)
    progress.async_safe = False  # run in this thread, batch by batch
    _, history = fit([progress, Passes()])
    # 10 images in 2 s; neither the compilation nor the evaluation counts.
    np.testing.assert_allclose(history["images_per_second"], [5.0] * 3, rtol=1e-6)
    # The epochs take 65, 15 and 15 s; the rest is estimated from the speed so far.
    left = [65 / 60 * 2, 80 / 60 / 2, 0.0]
    np.testing.assert_allclose(history["minutes_left"], left, rtol=1e-6)


def test_nan_loss_ends_the_run():
    with pytest.raises(FloatingPointError, match="loss must stay finite.*learning_rate"):
        fit([watch.Progress(10, 12)], poison=True)


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_stop_after_stops_at_its_step(steps):
    model, history = fit([watch.StopAfter(steps)])
    assert int(model.optimizer.iterations) == steps
    assert len(history["val_loss"]) == math.ceil(steps / 4)  # the last epoch is evaluated too
    model, _ = fit([])
    assert int(model.optimizer.iterations) == 12


def test_json_lines_has_one_line_an_epoch(tmp_path):
    path = tmp_path / "log.jsonl"
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(len(path.read_text().splitlines()))

    _, history = fit([watch.Progress(10, 12), watch.JsonLines(path), Reader()])
    assert seen == [1, 2, 3]  # written at once
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert "minutes_left" not in lines[0]
    for name in ("loss", "val_loss", "learning_rate", "images_per_second"):
        np.testing.assert_allclose([line[name] for line in lines], history[name])
    assert sorted(line["seconds"] for line in lines) == [line["seconds"] for line in lines]


def test_json_lines_resume_where_they_stopped(tmp_path):
    log = watch.JsonLines(tmp_path / "log.jsonl")
    log.on_train_begin()
    for epoch in range(3):
        log.on_epoch_end(epoch, {"loss": 1.0})
        if epoch == 1:
            state = log.get_state()
    whole = log.path.read_bytes()
    first, second, _ = whole.splitlines(keepends=True)
    for there, kept in (
        (whole, first + second),  # the third epoch will be repeated
        (first + second, first + second),
        (first + second[:9], first),  # a disk that lost flushed data
        (first[:9], b""),
    ):
        log.path.write_bytes(there)
        log.set_state(state)
        assert log.path.read_bytes() == kept
    log.path.unlink()
    log.set_state(state)


def test_json_lines_stay_json_with_a_nan_loss(tmp_path):
    fit([watch.JsonLines(tmp_path / "log.jsonl")], epochs=1, poison=True)
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text)["loss"] is None and "NaN" not in text


def test_progress_bar_of_keras_shows_our_figures(capsys):
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = rng.normal(size=(20, 5)).astype("float32")
    model.fit(x, x[:, :1], 10, callbacks=[watch.Progress(10, 2, 0.5)], verbose=2)
    line = capsys.readouterr().out
    assert "learning_rate: 0.5000" in line and "minutes_left" in line
    assert "images_per_second" in line


def test_event_files_hold_the_figures_of_each_epoch(tmp_path):
    _, history = fit([watch.EventFiles(tmp_path)], epochs=2)
    for part, tag, name in (
        ("train", "epoch_loss", "loss"),
        ("validation", "epoch_loss", "val_loss"),
    ):
        (path,) = (tmp_path / part).glob("events.out.tfevents.*")
        events = [
            tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(path))
        ]
        got = {e.step: v.simple_value for e in events for v in e.summary.value if v.tag == tag}
        np.testing.assert_allclose([got[0], got[1]], history[name], rtol=1e-6)
    assert history["loss"] != history["val_loss"]


def test_average_is_evaluated_and_training_is_unaffected():
    x, y = (np.random.default_rng(i).normal(size=(8, 3)).astype("float32") for i in (1, 2))

    def run(**validation):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        model.compile(keras.optimizers.AdamW(0.1, use_ema=True, ema_momentum=0.5), "mse")
        kept = []

        def keep(epoch, logs):
            kept.append([np.array(keras.ops.convert_to_numpy(w)) for w in model.weights])

        watchers = [watch.EvaluateAverage(), keras.callbacks.LambdaCallback(on_epoch_end=keep)]
        history = model.fit(
            x, y, epochs=3, verbose=0, callbacks=watchers, shuffle=False, **validation
        )
        return kept, history.history

    kept, history = run(validation_data=(x, y))
    without, _ = run()
    for ours, theirs in zip(kept, without, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    average = kept[0]
    for later in kept[1:]:
        average = [0.5 * a + 0.5 * b for a, b in zip(average, later, strict=True)]

    def loss(weights):
        return np.mean(((x @ weights[0] + weights[1]) @ weights[2] + weights[3] - y) ** 2)

    assert history["val_loss"][-1] == pytest.approx(loss(average), rel=1e-5)
    assert history["val_loss"][-1] != pytest.approx(loss(kept[-1]), rel=1e-2)


def test_before_the_first_update_there_is_no_average():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    plain = model.evaluate(x, y, verbose=0)
    average = model.evaluate(x, y, verbose=0, callbacks=[watch.EvaluateAverage()])
    assert average == plain and plain > 0


@pytest.mark.only_on("tensorflow")
def test_average_is_evaluated_under_a_strategy():
    """Its variables are of another class, even with one device."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        test_before_the_first_update_there_is_no_average()

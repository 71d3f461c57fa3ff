"""`Checkpoint` with small models: what it restores, when it saves, and what it refuses."""

import json
import logging
import os
import resource
import shutil
import signal
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from processes import receive_sigterm

from keras_vit.train.checkpoint import checkpoint as checkpoint_module
from keras_vit.train.checkpoint import files, manifest, model_state
from keras_vit.train.checkpoint.checkpoint import Checkpoint
from keras_vit.train.distribution.devices import Devices
from keras_vit.train.run.callbacks import JsonLines

STEPS = 4


def make_model(width=5, optimizer=None, **compiled):
    model = keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(width), keras.layers.Dropout(0.2), dense()]
    )
    compiled = {"metrics": ["mae"], **compiled}
    model.compile(optimizer or keras.optimizers.AdamW(0.01), "mse", **compiled)
    return model


def dense():
    return keras.layers.Dense(3)


def data(steps=40, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x = rng.standard_normal((6, 7), dtype="float32")
        yield x, x[:, :3]


def fit(model, batches, callbacks, epochs=2, initial_epoch=0, **arguments):
    return model.fit(
        batches,
        epochs=epochs,
        initial_epoch=initial_epoch,
        steps_per_epoch=STEPS,
        callbacks=callbacks,
        shuffle=False,
        verbose=0,
        **arguments,
    )


class Raise(keras.callbacks.Callback):
    """Ends a run like a kill, at the start of a batch, counted over the whole run."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.seen == self.at:
            raise KeyboardInterrupt
        self.seen += 1


class Value(keras.callbacks.Callback):
    """Puts a given metric into the logs of each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["val_mae"] = self.values[epoch]


def test_checkpoint_restores_the_best_and_the_state_of_callbacks(tmp_path):
    """F8: a worse epoch after a restart does not become the best, and patience continues."""
    values = [3.0, 1.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.8]

    def parts():
        checkpoint = Checkpoint(tmp_path, save_freq="epoch", keep=1, monitor="val_mae")
        stopping = keras.callbacks.EarlyStopping("val_mae", patience=4, min_delta=0.01)
        return checkpoint, stopping, checkpoint.around([Value(values), stopping])

    model = make_model()
    _, _, callbacks = parts()
    fit(model, data(), callbacks, epochs=3)
    assert manifest.steps(tmp_path) == [8, 12]  # the best and the last

    model = make_model()
    checkpoint, stopping, callbacks = parts()
    start = checkpoint.restore(model)
    assert (start.epoch, start.step_in_epoch, start.step, start.stopped) == (3, 0, 12, False)
    history = fit(model, data(), callbacks, epochs=8, initial_epoch=3)
    assert history.history["val_mae"] == values[:6] and history.epoch == [0, 1, 2, 3, 4, 5]
    assert (stopping.best, stopping.wait, stopping.stopped_epoch) == (1.0, 4, 5)
    assert [e["step"] for e in manifest.listing(tmp_path) if e["best"]] == [8]
    assert manifest.steps(tmp_path) == [8, 24]
    assert Checkpoint(tmp_path).restore(make_model()).stopped

    fresh = Checkpoint(tmp_path / "other", monitor="val_mae", save_freq="epoch", keep=1)
    late = keras.callbacks.EarlyStopping("val_mae", patience=4, min_delta=0.01)
    fit(make_model(), data(), fresh.around([Value(values[3:]), late]), epochs=3)
    assert late.wait == 1  # without the restored state it starts counting again


@pytest.mark.parametrize("mode", ["min", "max"])
def test_checkpoint_best_follows_its_mode(tmp_path, mode):
    checkpoint = Checkpoint(tmp_path, monitor="val_mae", mode=mode, keep=1)
    around = checkpoint.around([Value([2.0, 1.0, 3.0, float("nan"), 2.5])])
    fit(make_model(), data(), around, epochs=5)
    assert manifest.steps(tmp_path) == [{"min": 8, "max": 12}[mode], 20]


def test_checkpoint_second_fit_runs_all_its_epochs(tmp_path):
    """F9."""
    checkpoint = Checkpoint(tmp_path, save_freq=3)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), data(), checkpoint.around([Raise(at=7)]), epochs=3)
    model = make_model()
    checkpoint = Checkpoint(tmp_path, save_freq=3)
    start = checkpoint.restore(model)
    assert (start.epoch, start.step_in_epoch, start.step) == (1, 2, 6)
    counter = Raise(at=-1)
    first = fit(model, data(), checkpoint.around([counter]), epochs=2, initial_epoch=1)
    assert first.epoch == [0, 1] and counter.seen == 8  # 6 of them are restored
    counter = Raise(at=-1)
    second = fit(model, data(), checkpoint.around([counter]), epochs=2)
    assert second.epoch == [0, 1] and counter.seen == 8 and int(model.optimizer.iterations) == 16
    assert manifest.steps(tmp_path)[-1] == 16
    assert checkpoint.restore(make_model()).epoch == 2


def test_checkpoint_in_the_middle_of_an_epoch_restores_its_metrics(tmp_path):
    """The epoch's logs equal an uninterrupted run's; without the metrics' state they do not."""

    def plain():
        keras.utils.set_random_seed(3)
        return make_model()

    wanted = fit(plain(), data(), Checkpoint(tmp_path / "straight").around()).history
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), data(), Checkpoint(tmp_path, save_freq=3).around([Raise(at=7)]))
    for forget in (False, True):
        model, checkpoint = make_model(), Checkpoint(tmp_path, every_minutes=None)
        start = checkpoint.restore(model)
        around = checkpoint.around()
        if forget:
            arrays = checkpoint._pending.snapshot.arrays
            arrays.update({n: a * 0 for n, a in arrays.items() if "metrics" in n})
        rest = data()
        for _ in range(start.step):
            next(rest)
        got = fit(model, rest, around, initial_epoch=start.epoch).history
        assert (got == wanted) is not forget
        for step in manifest.steps(tmp_path)[1:]:
            shutil.rmtree(tmp_path / f"ckpt-{step:06d}")


def test_checkpoint_lists_every_difference_and_changes_nothing(tmp_path):
    fit(make_model(), data(), Checkpoint(tmp_path).around(), epochs=1)
    for model, lines in (
        (make_model(width=6), ["/kernel (7, 5) float32 in the", "/kernel (6, 3)", "_velocity"]),
        (make_model(optimizer=keras.optimizers.SGD(0.1)), ["only in the checkpoint"]),
        (make_model(optimizer=keras.optimizers.Adagrad(0.1)), ["accumulator"]),
    ):
        before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]
        with pytest.raises(ValueError, match="must be those of .*ckpt-000004. Received") as error:
            Checkpoint(tmp_path).restore(model)
        assert all(line in str(error.value) for line in lines), error.value
        after = [keras.ops.convert_to_numpy(v) for v in model.variables]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    Checkpoint(tmp_path).restore(make_model())


@pytest.mark.parametrize("factor, loss", [(np.nan, "mse"), (1e37, "mae")])
def test_checkpoint_nan_ends_the_run_and_is_not_saved(tmp_path, factor, loss):
    """F10: a NaN in a batch; and values with a finite loss whose squares overflow."""

    def batches():
        for number, (x, y) in enumerate(data()):
            yield (x * np.float32(factor) if number == 5 else x), y

    model = make_model()
    model.compile(keras.optimizers.AdamW(0.01), loss)
    checkpoint = Checkpoint(tmp_path, save_freq=1, keep=100)
    handler = signal.getsignal(signal.SIGTERM)
    what = "loss=nan" if loss == "mse" else r"\S*velocity"
    with pytest.raises(
        FloatingPointError, match=rf"must stay finite. Received: {what}, found after \d+ steps"
    ):
        fit(model, batches(), checkpoint.around(), epochs=4)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert manifest.steps(tmp_path) == [1, 2, 3, 4, 5]
    found, _ = files.newest(tmp_path)
    assert model_state.find_non_finite(found.arrays) is None


def test_checkpoint_float16_overflow_is_not_an_error(tmp_path):
    """The loss scale skips the step; its own state is saved and restored."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**127)
    checkpoint = Checkpoint(tmp_path, save_freq=1)
    fit(make_model(optimizer=optimizer), data(), checkpoint.around(), epochs=2)
    scale = float(optimizer.dynamic_scale)
    again = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**127)
    Checkpoint(tmp_path).restore(make_model(optimizer=again))
    assert float(again.dynamic_scale) == scale < 2.0**127


def test_checkpoint_error_of_the_thread_ends_the_run(tmp_path):
    """F3 in a run: the system refuses to write a file; earlier checkpoints stay."""
    checkpoint = Checkpoint(tmp_path, save_freq=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Fill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if checkpoint.step == 4:
                checkpoint._writer.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))

    try:
        with pytest.raises(OSError, match="of step 4 cannot be written: File too large; the last"):
            fit(make_model(), data(), checkpoint.around([Fill()]), epochs=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    start = Checkpoint(tmp_path).restore(make_model())
    assert start.step == 3 and manifest.steps(tmp_path) == [2, 3]


def test_checkpoint_sigterm_saves_before_the_next_step(tmp_path):
    """F13."""
    ended, evaluated = [], []

    class Terminate(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if checkpoint.step == 6:
                receive_sigterm()

        def on_test_begin(self, logs=None):
            evaluated.append(checkpoint.step)

        def on_epoch_end(self, epoch, logs=None):
            ended.append(epoch)

    handler = signal.getsignal(signal.SIGTERM)
    checkpoint = Checkpoint(tmp_path)
    validation = next(data())
    with pytest.raises(SystemExit) as error:
        around = checkpoint.around([Terminate()])
        fit(make_model(), data(), around, epochs=4, validation_data=validation)
    assert error.value.code == 143 and checkpoint.interrupted
    assert ended == [0] and evaluated == [4]  # the interrupted epoch is neither ended nor evaluated
    assert signal.getsignal(signal.SIGTERM) is handler
    start = Checkpoint(tmp_path).restore(make_model())
    assert (start.epoch, start.step_in_epoch, start.step) == (1, 2, 6)


@pytest.mark.sampled(cases=0)
def test_checkpoint_that_is_corrupt_is_set_aside_and_the_run_resumes(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    fit(make_model(), data(), Checkpoint(tmp_path, save_freq=3).around(), epochs=2)
    assert manifest.steps(tmp_path) == [6, 8]
    broken = tmp_path / "ckpt-000008" / manifest.ARRAYS
    os.truncate(broken, 100)
    model, checkpoint = make_model(), Checkpoint(tmp_path)
    start = checkpoint.restore(model)
    assert start.step == 6 and str(broken) in caplog.text
    assert (tmp_path / "ckpt-000008.broken").is_dir()
    fit(model, data(), checkpoint.around(), initial_epoch=1)
    assert manifest.steps(tmp_path) == [6, 8]
    for step in (6, 8):
        os.truncate(tmp_path / f"ckpt-{step:06d}" / manifest.FACTS, 3)
    with pytest.raises(manifest.BrokenCheckpointError, match="None of the checkpoints .* is whole"):
        Checkpoint(tmp_path).restore(make_model())


def test_checkpoint_refuses_what_would_lose_or_mix_runs(tmp_path):
    checkpoint = Checkpoint(tmp_path, save_freq=3, extra={"recipe": [1, None]})
    with pytest.raises(ValueError, match="must be those that around"):
        fit(make_model(), data(), [checkpoint])
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), data(), checkpoint.around([Raise(at=7)]))
    with pytest.raises(FileExistsError, match="folder must be new, or restore"):
        fit(make_model(), data(), Checkpoint(tmp_path).around())

    model, checkpoint = make_model(), Checkpoint(tmp_path)
    assert checkpoint.restore(model).extra == {"recipe": [1, None]}
    with pytest.raises(ValueError, match="initial_epoch must be 1"):
        fit(model, data(), checkpoint.around())
    with pytest.raises(ValueError, match="steps_per_epoch must be 4"):
        model.fit(
            data(),
            epochs=2,
            initial_epoch=1,
            steps_per_epoch=5,
            callbacks=checkpoint.around(),
            shuffle=False,
            verbose=0,
        )
    with pytest.raises(ValueError, match="built and compiled"):
        Checkpoint(tmp_path).restore(keras.Sequential([dense()]))
    with pytest.raises(TypeError, match="JSON"):
        Checkpoint(tmp_path, extra={"recipe": object()})
    for arguments in ({"keep": 0}, {"save_freq": "never"}, {"save_freq": 0}, {"mode": "up"}):
        name = next(iter(arguments))
        with pytest.raises(ValueError, match=f"{name} must .* Received: "):
            Checkpoint(tmp_path, **arguments)


def test_checkpoint_by_time_and_at_the_end_only(tmp_path, monkeypatch):
    clock = [0.0]
    mine = SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(checkpoint_module, "time", mine)

    class Wait(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if checkpoint.step == 3:
                clock[0] += 61

    checkpoint = Checkpoint(tmp_path / "time", every_minutes=1, keep=100)
    fit(make_model(), data(), checkpoint.around([Wait()]))
    assert manifest.steps(tmp_path / "time") == [3, 8]
    fit(make_model(), data(), Checkpoint(tmp_path / "end").around())
    assert manifest.steps(tmp_path / "end") == [8]


def test_checkpoint_keeps_a_request_to_stop_in_the_shortened_epoch(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if checkpoint.step == stop_at:
                self.model.stop_training = True

    for stop_at, epochs in ((7, [0, 1]), (100, [0, 1, 2])):
        folder = tmp_path / str(stop_at)
        checkpoint = Checkpoint(folder, save_freq=3)
        with pytest.raises(KeyboardInterrupt):
            fit(make_model(), data(), checkpoint.around([Raise(at=7)]), epochs=3)
        model, checkpoint = make_model(), Checkpoint(folder)
        start = checkpoint.restore(model)
        history = fit(
            model, data(), checkpoint.around([Stop()]), epochs=3, initial_epoch=start.epoch
        )
        assert history.epoch == epochs
        assert files.newest(folder)[0].facts["position"]["stopped"] is (stop_at == 7)


def test_checkpoint_progress_bar_starts_where_the_epoch_resumes(tmp_path, capsys, monkeypatch):
    shown, update = [], keras.utils.Progbar.update  # it prints at most 20 times a second

    def note(bar, current, *arguments, **options):
        shown.append(current)
        return update(bar, current, *arguments, **options)

    monkeypatch.setattr(keras.utils.Progbar, "update", note)
    checkpoint = Checkpoint(tmp_path, save_freq=3)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), data(), checkpoint.around([Raise(at=7)]))
    model, checkpoint = make_model(), Checkpoint(tmp_path)
    checkpoint.restore(model)
    capsys.readouterr()
    shown.clear()
    model.fit(
        data(),
        epochs=2,
        initial_epoch=1,
        steps_per_epoch=STEPS,
        callbacks=checkpoint.around(),
        shuffle=False,
        verbose=1,
    )
    said = capsys.readouterr().out
    assert set(shown) == {3, 4} and "Epoch 2/2" in said and "4/4" in said
    assert "1/4" not in said and "2/4" not in said


def test_log_of_an_epoch_says_which_steps_its_metrics_count(tmp_path, caplog):
    """On several TensorFlow workers, metrics cannot be saved in the middle of an epoch."""

    class Workers(Devices):
        reads_metrics_alone = False

    def resumed(name, devices):
        def checkpoint():
            return Checkpoint(tmp_path / name, save_freq=1, devices=devices)

        log = [JsonLines(tmp_path / f"{name}.jsonl")]
        with pytest.raises(KeyboardInterrupt):
            fit(make_model(), data(), checkpoint().around([*log, Raise(STEPS + 3)]))
        again = checkpoint()
        start = again.restore(model := make_model())
        rest = list(data())[start.step :]
        fit(
            model, (batch for batch in rest), again.around(log), epochs=3, initial_epoch=start.epoch
        )
        lines = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        return start.step_in_epoch, [line.get("metrics_from_step") for line in lines]

    done, counted = resumed("workers", Workers(["this"]))
    assert done > 0 and counted == [None, done, None]
    assert f"The metrics of epoch 2 count its steps from {done} on" in caplog.text
    caplog.clear()
    done, counted = resumed("one", Devices(["this"]))
    assert done > 0 and counted == [None, None, None] and "count its steps" not in caplog.text

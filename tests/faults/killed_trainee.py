"""A tiny run in a process of its own, for the tests here, and how to start and compare runs.

It has all state that a run must resume: augmentation, dropout, drop path, patch dropout, weight
decay, a schedule, averaged weights, early stopping. It has three epochs of four steps.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
from processes import run_together

EPOCHS, STEPS, BATCH = 3, 4, 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run; a process can do several, one after another."""

    folder: str
    save_freq: int | str | None = 1
    keep: int = 100
    steps_per_execution: int = 1
    epochs: int = EPOCHS
    forget_position: bool = False  # resume with the data of step 0
    precision: str = "float32"
    # `signal` is sent at the start of this step, or after the last one.
    kill_at: int | None = None
    signal: int = signal.SIGKILL
    width: int = 20


def run(*plans: Plan) -> tuple[int | None, str]:
    """The exit code and the output of a process that does these runs."""
    fields = json.dumps([dataclasses.asdict(plan) for plan in plans])
    return run_together([[sys.executable, __file__, fields]], timeout=500)[0]


def check_same(one, other) -> None:
    """Fails if two checkpoints differ in anything but their time."""
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype, name
        assert array.tobytes() == other.arrays[name].tobytes(), name
    kept = ("position", "inside_epoch", "best", "versions", "extra", "callbacks", "random")
    for key in kept:
        assert one.facts[key] == other.facts[key], key


def make(plan):
    """A compiled model, its callbacks and its data."""
    import keras

    import keras_vit
    from keras_vit.train import recipe
    from keras_vit.train.data import batching, sources
    from keras_vit.train.optim.optimizer import make_optimizer
    from keras_vit.train.run import callbacks

    keras.backend.clear_session()  # names as in a new process
    keras.utils.set_random_seed(0)
    one = recipe.Recipe(
        "test",
        recipe.Data("digits"),
        recipe.Model(config={}),
        recipe.Run(BATCH, steps=EPOCHS * STEPS),
        optimizer=recipe.Optimizer("adamw", 2e-3, weight_decay=0.1, ema_momentum=0.9),
        schedule=recipe.Schedule(warmup_steps=3),
    )
    config = keras_vit.ViTConfig(
        image_size=(8, 8),
        in_channels=1,
        patch_size=4,
        width=plan.width,
        depth=2,
        num_heads=5,
        mlp_dim=28,
        dropout=0.1,
        drop_path=0.1,
        patch_dropout=0.25,
        num_classes=10,
    )
    model = keras_vit.ViT(config, dtype=plan.precision)
    model.compile(
        make_optimizer(one, model, EPOCHS * STEPS),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.CategoricalAccuracy(name="accuracy")],
        steps_per_execution=plan.steps_per_execution,
        jit_compile="auto" if keras.backend.backend() != "tensorflow" else False,
    )
    source = sources.open_source(one.data)
    augment = recipe.Augment(crop="pad", crop_padding=1, mixup=0.2)

    def batches(step):
        return batching.train_batches(source, config, augment, BATCH, 0, step)

    tests = batching.test_batches(source.test, config, 120, 10).take(1)
    observers = [
        callbacks.StopAfter(EPOCHS * STEPS),
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.SwapEMAWeights(),
    ]
    return model, batches, tests, observers


def train(plan):
    """Does one run in this process."""
    import keras

    from keras_vit.train.checkpoint.checkpoint import Checkpoint

    class Kill(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.kill_after(checkpoint.step - plan.steps_per_execution)

        def on_train_end(self, logs=None):
            self.kill_after(checkpoint.step)

        def kill_after(self, step):
            if step == plan.kill_at:
                checkpoint._writer.wait()
                os.kill(os.getpid(), plan.signal)

    model, batches, tests, observers = make(plan)
    checkpoint = Checkpoint(
        plan.folder,
        save_freq=plan.save_freq,
        keep=plan.keep,
        monitor="val_accuracy",
        extra={"seed": 0},
    )
    begin = checkpoint.restore(model)
    print(f"begin {begin.step}", flush=True)
    around = checkpoint.around(observers)
    history = model.fit(
        batches(0 if plan.forget_position else begin.step),
        epochs=begin.epoch if begin.stopped else plan.epochs,
        steps_per_epoch=STEPS,
        initial_epoch=begin.epoch,
        validation_data=tests,
        callbacks=[*around[:-1], Kill(), around[-1]] if plan.kill_at is not None else around,
        shuffle=False,
        verbose=0,
    )
    np.savez(
        Path(plan.folder, "end.npz"),
        **{w.path: keras.ops.convert_to_numpy(w) for w in model.weights},
    )
    print("done", json.dumps(history.history), flush=True)


if __name__ == "__main__":
    for fields in json.loads(sys.argv[1]):
        train(Plan(**fields))

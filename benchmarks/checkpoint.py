"""`python -m benchmarks.checkpoint`: the cost of saving checkpoints during training.

One process trains with `model.fit` and the real `Checkpoint`, and takes turns: some steps of which
the first begins with a save that is written meanwhile, and as many steps in which nothing is saved.
What the first take longer is what a save costs, whoever of it pays: the copy that training waits
for, or the thread that hashes and writes on the same cores.
"""

import argparse
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "checkpoint.json"
AIM = 0.02


def main():
    options = _options()
    os.environ.update(machine.environment(options.backend))  # before Keras is imported
    record = {
        "machine": machine.describe(),
        "backend": options.backend,
        "variant": options.variant,
        "batch": options.batch,
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        record |= measure(options, folder)
    machine.write(options.json, record)
    _report(record)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--variant", default="vit_b16", help="as of benchmarks.throughput")
    parser.add_argument("--backend", choices=machine.BACKENDS, default="tensorflow")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps a side; a save must end within them"
    )
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument(
        "--folder", default=".", help="where the checkpoints go meanwhile: the disk that is meant"
    )
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def measure(options, folder):
    """Trains in this process: seconds with and without a save, and memory."""
    import keras

    from keras_vit.train.checkpoint import checkpoint, manifest, writer

    steps, turns = options.steps, options.turns

    class Writer(writer.Writer):
        seconds = []

        def _write(self, *args):
            begin = time.perf_counter()
            super()._write(*args)
            self.seconds.append(time.perf_counter() - begin)

    class Saves(checkpoint.Checkpoint):
        seconds = []

        def _save(self, *args, **kwargs):
            begin = time.perf_counter()
            super()._save(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)

    class Marks(keras.callbacks.Callback):
        """Records the end of each step, the peak memory, and what was written."""

        ends, peaks, written = [], [], []

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append(time.perf_counter())
            self.peaks.append(_peak())
            self.written.append(len(Writer.seconds))
            machine.say(f"step {batch + 1} of {2 * steps * (turns + 1)}")

    # The first turn warms up: it compiles and saves nothing. Later turns start with a save.
    saves = Saves(folder, every_minutes=None, save_freq=2 * steps, keep=1)
    saves._writer = Writer(folder, keep=1)
    model, batches = _training(options)
    model.fit(
        batches,
        steps_per_epoch=2 * steps * (turns + 1),
        callbacks=[*saves.around(), Marks()],
        verbose=0,
        shuffle=False,
    )
    ends, rows = Marks.ends, []
    for turn in range(1, turns + 1):
        before = 2 * steps * turn - 1  # the last step before the save
        middle, after = before + steps, before + 2 * steps
        if Marks.written[middle] != turn:
            sys.exit(f"--steps must be more: a save took longer. Received: --steps={steps}")
        rows.append({"with": ends[middle] - ends[before], "without": ends[after] - ends[middle]})
    with_, without = (
        statistics.median(row[side] / steps for row in rows) for side in ("with", "without")
    )
    extra = statistics.median(row["with"] - row["without"] for row in rows)
    minutes = checkpoint.Checkpoint(folder).every_minutes
    return {
        "state_bytes": manifest.listing(folder)[-1]["bytes"],
        "seconds_a_step_without": without,
        "seconds_a_step_with": with_,
        "of_without": statistics.median(row["with"] / row["without"] for row in rows),
        "copy_seconds": statistics.median(saves.seconds[:turns]),
        "write_seconds": statistics.median(Writer.seconds[:turns]),
        "seconds_a_save": extra,
        "minutes": minutes,
        "share": extra / (60 * minutes),
        "peak_bytes": Marks.peaks[2 * steps - 1],
        "extra_bytes": Marks.peaks[-1] - Marks.peaks[2 * steps - 1],
        "turns": rows,
        "copies": saves.seconds[:turns],
        "writes": Writer.seconds[:turns],
    }


def _training(options):
    """A compiled model, and one batch repeated forever."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_vit
    from benchmarks.worker import variant_config
    from keras_vit.train.distribution.devices import jit_compile

    config = variant_config(options.variant)
    model = keras_vit.ViT(config)
    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile(),
    )
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    images = rng.random((options.batch, *config.input_shape), "float32")
    labels = rng.integers(0, config.num_classes, options.batch)
    targets = np.eye(config.num_classes, dtype="float32")[labels]
    return model, tf.data.Dataset.from_tensors((images, targets)).repeat()


def _peak():
    """The peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _report(record):
    table = Table(
        title=f"{record['variant']}, AdamW, batch {record['batch']}, float32, {record['backend']}: "
        f"{record['state_bytes'] / 1e9:.2f} GB of state",
        caption=machine.line(record["machine"]),
        box=box.SIMPLE,
        pad_edge=False,
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for title, text in (
        ("a step, nothing saved", f"{record['seconds_a_step_without']:.2f} s"),
        (
            f"a step of {record['steps']} in which a save is written",
            f"{record['seconds_a_step_with']:.2f} s",
        ),
        ("the second over the first", f"{record['of_without']:.2f}x"),
        ("copying, while training waits", f"{record['copy_seconds']:.2f} s"),
        ("hashing and writing, while training continues", f"{record['write_seconds']:.2f} s"),
        ("what a save costs in all", f"{record['seconds_a_save']:.2f} s"),
        (
            f"of training, with a save every {record['minutes']:g} minutes",
            f"{record['share']:.2%} (aim {AIM:.0%})",
        ),
        ("peak memory, nothing saved", f"{record['peak_bytes'] / 1e9:.2f} GB"),
        ("more with saves", f"{record['extra_bytes'] / 1e9:.2f} GB"),
    ):
        table.add_row(title, text)
    Console().print(table)


if __name__ == "__main__":
    main()

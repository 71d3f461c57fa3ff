"""`python -m benchmarks.pipeline`: training images a second on one core, by library.

From JPEGs of 500x375 pixels to a batch for the model: a random crop at 224x224, flip,
RandAugment(2, 10), normalization, MixUp(0.2). Each contender has one thread, and processor time is
measured, so that a busy machine changes little. The contenders run in turns.
"""

import argparse
import io
import os
import pathlib
import statistics
import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.throughput import positive

RESULTS = machine.ROOT / "benchmarks" / "results" / "pipeline.json"
AIM = 1.5  # times timm's
SIZE, BATCH, CLASSES = 224, 64, 1000
LAYERS, MAGNITUDE, MIXUP = 2, 10, 0.2
WHOLE = "whole"


def main():
    options = _options()
    os.environ.update(machine.environment("tensorflow"))  # before Keras is imported
    record = {"machine": machine.describe(), "batch": BATCH, "size": SIZE}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jpegs = make_jpegs(options.images)
    makers = {**_tensorflow(jpegs), **_timm(jpegs)}
    record["rows"] = _measure(makers, options)
    machine.write(options.json, record)
    _report(record)
    machine.say(f"Written to {options.json}")


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--batches", type=positive, default=4, help="batches a round")
    parser.add_argument("--images", type=positive, default=36, help="different JPEGs")
    parser.add_argument("--only", nargs="*", help="contenders whose name has one of these in it")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    return parser.parse_args()


def make_jpegs(number):
    """Photographs as JPEG: crops of scikit-learn's two sample images, at different scales."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_image

    rng = np.random.default_rng(0)
    jpegs = []
    for i in range(number):
        photo = Image.fromarray(load_sample_image(("china.jpg", "flower.jpg")[i % 2]))
        scale = rng.uniform(0.9, 1.2)
        photo = photo.resize((round(photo.width * scale), round(photo.height * scale)))
        left, top = rng.integers(photo.width - 500 + 1), rng.integers(photo.height - 375 + 1)
        encoded = io.BytesIO()
        photo.crop((left, top, left + 500, top + 375)).save(encoded, "JPEG", quality=90)
        jpegs.append(encoded.getvalue())
    return jpegs


def _tensorflow(jpegs):
    """Functions that return an iterator of batches, for the contenders in tf.data."""
    import keras
    import tensorflow as tf

    from keras_vit import ViTConfig
    from keras_vit.train.augment.image import augment_image, normalize_batch
    from keras_vit.train.augment.mixing import mix_batch
    from keras_vit.train.recipe import Augment

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    config = ViTConfig(image_size=SIZE)
    crop = Augment(crop="inception", flip=True)
    rand = Augment(
        crop="inception",
        flip=True,
        rand_augment_layers=LAYERS,
        rand_augment_magnitude=MAGNITUDE,
        mixup=MIXUP,
    )

    options = {"augmentations_per_image": LAYERS, "magnitude": MAGNITUDE / 10}
    named = Augment(crop="inception", flip=True, keras_cv=("RandAugment", options))

    def batches(per_image, per_batch=None):
        def image(number, encoded):
            return augment_image(encoded, config, per_image, tf.stack([0, number]))

        encoded = tf.data.Dataset.from_tensor_slices(jpegs).repeat()
        dataset = tf.data.Dataset.zip(tf.data.Dataset.counter(dtype=tf.int32), encoded)
        dataset = dataset.map(image).batch(BATCH, drop_remainder=True)
        if per_batch is not None:
            dataset = tf.data.Dataset.zip(tf.data.Dataset.counter(dtype=tf.int32), dataset)
            dataset = dataset.map(per_batch)
        one = tf.data.Options()
        one.threading.private_threadpool_size = 1
        one.threading.max_intra_op_parallelism = 1
        one.autotune.enabled = False
        # By default `map` becomes parallel and makes the next batch in the background, while the
        # next contender is measured.
        one.experimental_optimization.apply_default_optimizations = False
        return iter(dataset.with_options(one))

    def mixed(number, images):
        targets = tf.one_hot(tf.range(BATCH), CLASSES)
        images = normalize_batch(images, config)
        return mix_batch(images, targets, rand, tf.stack([1, number]))

    def layer_then_mixed(layer):
        def per_batch(number, images):
            changed = layer(tf.cast(images, tf.float32), training=True)
            return mixed(number, tf.cast(tf.clip_by_value(changed, 0, 255), tf.uint8))

        return batches(crop, per_batch)

    def keras_cv():
        # Imported here, because it prints.
        from keras_cv.layers import RandAugment

        return layer_then_mixed(RandAugment((0, 255), **options))

    def keras_own():
        return layer_then_mixed(keras.layers.RandAugment((0, 255), LAYERS, MAGNITUDE / 10))

    return {
        ("keras_vit", WHOLE): lambda: batches(rand, mixed),
        ("keras_vit", "crop, flip"): lambda: batches(crop),
        ("keras_vit", "crop, flip, RandAugment"): lambda: batches(rand),
        ("keras_cv's RandAugment", WHOLE): keras_cv,
        ("keras_vit, augment.keras_cv", WHOLE): lambda: batches(named, mixed),
        ("Keras' RandAugment", WHOLE): keras_own,
    }


def _timm(jpegs):
    """The same for timm, whose RandAugment leaves out half of the layers unless p is 1."""

    def make(auto_augment, whole=True):
        import torch

        machine.import_torchvision()
        from PIL import Image
        from timm.data import Mixup, create_transform

        torch.set_num_threads(1)
        transform = create_transform(
            SIZE,
            is_training=True,
            color_jitter=None,
            auto_augment=auto_augment,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
        )
        mixup = Mixup(mixup_alpha=MIXUP, label_smoothing=0, num_classes=CLASSES)
        labels = torch.arange(BATCH)
        number = 0
        while True:
            samples = []
            for _ in range(BATCH):
                image = Image.open(io.BytesIO(jpegs[number % len(jpegs)]))
                samples.append((transform(image.convert("RGB")), 0))
                number += 1
            images, _ = torch.utils.data.default_collate(samples)
            yield mixup(images, labels) if whole else images

    return {
        ("timm rand-m10-n2", WHOLE): lambda: make(f"rand-m{MAGNITUDE}-n{LAYERS}"),
        ("timm rand-m10-n2-p1", WHOLE): lambda: make(f"rand-m{MAGNITUDE}-n{LAYERS}-p1.0"),
        ("timm", "crop, flip"): lambda: make(None, whole=False),
    }


def _measure(makers, options):
    rows, iterators = [], []
    for (name, stage), make in makers.items():
        if options.only and not any(part in name for part in options.only):
            continue
        row = {"contender": name, "stage": stage, "seconds": []}
        rows.append(row)
        try:
            iterator = make()
            next(iterator)
        except ImportError as error:
            row["message"] = f"not measured: {error}"
            continue
        iterators.append((row, iterator))
    for i in range(1, options.rounds + 1):
        machine.say(f"round {i} of {options.rounds}")
        for row, iterator in iterators:
            begin = time.process_time()
            for _ in range(options.batches):
                next(iterator)
            row["seconds"].append(time.process_time() - begin)
            _check_idle(row)
    for row in rows:
        images = options.batches * BATCH
        if seconds := row["seconds"]:
            row["images_per_second"] = images / min(seconds)
            row["images_per_second_median"] = images / statistics.median(seconds)
    return rows


def _check_idle(row):
    """Raises if a contender still works after its turn, in the time of the next one."""
    begin = time.process_time()
    time.sleep(0.1)
    worked = time.process_time() - begin
    if worked > 0.01:
        raise RuntimeError(
            f"{row['contender']} ({row['stage']}) worked for {worked:.3f} s after its turn"
        )


def _report(record):
    table = Table("contender", "stage", box=box.SIMPLE, title="Images a second on one core")
    for column in ("img/s", "median", "x timm"):
        table.add_column(column, justify="right")
    rows = record["rows"]
    timm = next(
        (r.get("images_per_second") for r in rows if r["contender"] == "timm rand-m10-n2"), None
    )
    for row in rows:
        speed = row.get("images_per_second")
        if speed is None:
            table.add_row(row["contender"], row["message"])
            continue
        ratio = f"{speed / timm:.2f}" if timm and row["stage"] == WHOLE else ""
        median = f"{row['images_per_second_median']:.0f}"
        table.add_row(row["contender"], row["stage"], f"{speed:.0f}", median, ratio)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print(
        "timm applies each layer of rand-m10-n2 by a coin, and of -p1 always, as the others do. "
        f"Aim: {AIM} times timm's rand-m10-n2."
    )
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


if __name__ == "__main__":
    main()

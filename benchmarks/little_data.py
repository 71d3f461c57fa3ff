"""`python -m benchmarks.little_data`: a ViT and a CNN of its size on few training images.

Both learn Fashion-MNIST from scratch, with the same optimizer, steps, batches and images, and
without augmentation. They differ only in what their architecture assumes about images.
"""

import argparse
import time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine

SEED = 0


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.little_data", description=__doc__)
    parser.add_argument(
        "--pictures", nargs="+", type=int, default=[300, 1000, 3000, 10_000, 60_000]
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of 64 images")
    options = parser.parse_args()
    train, test = _fashion("train"), _fashion("test")
    table = Table("images", "ViT", "CNN", "seconds", box=box.SIMPLE)
    for count in options.pictures:
        begin = time.perf_counter()
        scores = [accuracy(make(), train, test, count, options.steps) for make in (vit, cnn)]
        seconds = f"{time.perf_counter() - begin:.0f}"
        table.add_row(f"{count:,}", *(f"{score:.1%}" for score in scores), seconds)
        machine.say(f"{count:,} images: ViT {scores[0]:.1%}, CNN {scores[1]:.1%}")
    console = Console(width=100)
    console.print(table)
    console.print(f"Parameters: ViT {vit().count_params():,}, CNN {cnn().count_params():,}")
    console.print(machine.line(machine.describe()), markup=False, highlight=False)


def vit():
    """Patches of 4 px, four blocks of width 64."""
    import keras_vit

    return keras_vit.ViT(
        keras_vit.ViTConfig(
            image_size=28,
            patch_size=4,
            in_channels=1,
            width=64,
            depth=4,
            num_heads=4,
            mlp_dim=128,
            class_token=False,
            pooling="mean",
            position_embedding="sincos_2d",
            num_classes=10,
        )
    )


def cnn():
    """Four convolutions of 3x3 that halve the image twice, then the mean over positions."""
    import keras

    layers = [keras.Input((28, 28, 1))]
    for filters, stride in ((32, 2), (64, 1), (96, 2), (64, 1)):
        layers += [
            keras.layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def accuracy(model, train, test, count, steps, batch_size=64):
    """Test accuracy of a model after training on `count` images."""
    import keras

    keras.utils.set_random_seed(SEED)
    images, labels = (part[:count] for part in train)
    rate = keras.optimizers.schedules.CosineDecay(
        1e-5, steps, warmup_target=1e-3, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    # An epoch of a few images would be a few steps, so all steps are one epoch in random order.
    rng = np.random.default_rng(SEED)
    rounds = -(-steps * batch_size // count)
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])[: steps * batch_size]
    model.fit(images[order], labels[order], batch_size=batch_size, shuffle=False, verbose=0)
    logits = model.predict(test[0], batch_size=500, verbose=0)
    return float(np.mean(logits.argmax(-1) == test[1]))


def _fashion(split):
    import tensorflow_datasets as tfds

    images, labels = tfds.as_numpy(
        tfds.load("fashion_mnist", split=split, batch_size=-1, as_supervised=True, download=False)
    )
    return (images / 127.5 - 1).astype("float32"), labels


if __name__ == "__main__":
    main()

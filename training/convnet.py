"""`python -m training.convnet runs/convnet`: a ConvNet for CIFAR-10, to teach `cifar10_distill`.

It is plain Keras: `keras_vit.train` makes the batches, and any other Keras model could be trained
like this. It sees the pixels that the student sees, so the pixel fields are the student's.
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

import keras_vit
from keras_vit import train
from keras_vit.atomic import atomic_path
from keras_vit.train.recipe import Schedule, override

STUDENT = "cifar10_distill"
WIDTHS = (64, 128, 256)
"""Channels of each stage."""


def convnet(config: keras_vit.ViTConfig, dtype: str, *, normalized: bool = True):
    """Stages of two convolutions, the first of which halves the size of the images.

    Args:
        config: The student's: image size, channels and classes.
        dtype: dtype policy of all layers but the head.
        normalized: Whether a normalization follows each convolution, else its bias.

    Returns:
        A `keras.Model` from `(B, H, W, C)` to logits `(B, K)`.
    """
    x = images = keras.Input(config.input_shape)  # (B, H, W, C)
    for width in WIDTHS:
        for stride in (2, 1):  # on torch, pooling bfloat16 takes longer than all convolutions
            x = layers.Conv2D(  # (B, h, w, width)
                width, 3, stride, "same", use_bias=not normalized, dtype=dtype
            )(x)
            if normalized:
                x = layers.BatchNormalization(momentum=0.9, dtype=dtype)(x)
            x = layers.Activation("gelu", dtype=dtype)(x)
    x = layers.GlobalAveragePooling2D(dtype=dtype)(x)  # (B, width)
    return keras.Model(images, layers.Dense(config.num_classes, dtype="float32")(x), name="convnet")


def folded(model: keras.Model, config: keras_vit.ViTConfig, dtype: str) -> keras.Model:
    """The trained ConvNet with its normalizations in the weights, for a teacher that runs often.

    What a normalization does to the output of a convolution is, for inference, one factor and one
    bias a channel.
    """
    teacher = convnet(config, dtype, normalized=False)
    weights = []
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            gamma, beta, mean, variance = layer.get_weights()
            factor = gamma / np.sqrt(variance + layer.epsilon)  # (C,)
            weights += [weights.pop() * factor, beta - mean * factor]
        else:
            weights += layer.get_weights()
    teacher.set_weights(weights)
    return teacher


def main(argv: list[str] | None = None) -> int:
    """Trains the ConvNet, prints its test accuracy, and writes `convnet.keras`."""
    parser = argparse.ArgumentParser(prog="python -m training.convnet", description=__doc__)
    parser.add_argument("folder", type=Path, help="where convnet.keras is written")
    parser.add_argument("--data", help="data_dir of tensorflow-datasets")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args(argv)
    settings = [] if options.data is None else [f"data.path={options.data}"]
    recipe = override(train.load_recipe(STUDENT), settings)
    source = train.open_source(recipe.data)
    config = train.build_model(recipe, source).config
    steps = max(1, source.train.num_examples // options.batch_size)
    total = steps * options.epochs

    keras.utils.set_random_seed(0)
    model = convnet(config, recipe.run.precision)
    rate = train.make_schedule(Schedule(warmup_steps=total // 5), 0.2, total)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=0.0025)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        train.train_batches(source, config, recipe.augment, options.batch_size, seed=0),
        epochs=options.epochs,
        steps_per_epoch=steps,
        shuffle=False,
        verbose=2,
    )
    teacher = folded(model, config, recipe.run.precision)
    teacher.compile(loss=loss, metrics=["accuracy"])
    _, accuracy = teacher.evaluate(
        train.test_batches(source.test, config, 500, config.num_classes), verbose=0
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "convnet.keras"
    with atomic_path(path) as temporary:
        teacher.save(temporary)
    print(f"{path}: {teacher.count_params():,} parameters, {accuracy:.2%} of the test images right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

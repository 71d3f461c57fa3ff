"""A recipe's optimizer on a tiny model, batch by batch, for the tests of optimizers."""

import keras
import numpy as np
from keras import ops

from keras_vit import train
from keras_vit.train.recipe import Data, Model, Optimizer, Recipe, Run, Schedule

RATE = 0.01
CONSTANT = Schedule("constant")


def recipe(schedule=CONSTANT, **options):
    options = {"name": "adamw", "learning_rate": RATE, **options}
    return Recipe(
        "test",
        Data("digits"),
        Model(),
        Run(batch_size=4, steps=10),
        optimizer=Optimizer(**options),
        schedule=schedule,
    )


def make(model, steps=10, **options):
    optimizer = train.make_optimizer(recipe(**options), model, steps)
    optimizer.build(model.trainable_variables)
    return optimizer


def apply(optimizer, model, gradients):
    """One batch, as `fit` applies it."""
    gradients = [ops.convert_to_tensor(gradients[v.path]) for v in model.trainable_variables]
    if keras.backend.backend() == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
    else:
        optimizer.apply(gradients, model.trainable_variables)


def random_gradients(model, seed):
    rng = np.random.default_rng(seed)
    return {v.path: rng.normal(size=v.shape).astype("float32") for v in model.trainable_variables}


def zero_gradients(model):
    return {v.path: np.zeros(v.shape, "float32") for v in model.trainable_variables}

"""A recipe's optimizer: one of Keras' own, with weight decay on kernels only."""

import keras

from keras_vit.train.optim.layer_decay import layer_factors, with_layer_factors
from keras_vit.train.optim.muon import Muon
from keras_vit.train.optim.schedule import PerUpdate, make_schedule
from keras_vit.train.recipe import Recipe


def make_optimizer(recipe: Recipe, model: keras.Model, steps: int) -> keras.optimizers.Optimizer:
    """The optimizer of a recipe, for `model.compile`.

    In mixed_float16 `compile` wraps it in Keras' LossScaleOptimizer.

    Args:
        recipe: A recipe.
        model: The model that is trained.
        steps: Batches in the whole run. With `accumulate` = k there is one update in k of them,
            and warm-up counts updates.

    Returns:
        A Keras optimizer, not yet built.
    """
    options = recipe.optimizer
    every = options.accumulate
    if not 1 <= every <= steps:
        raise ValueError(
            "accumulate must be at least 1 and at most the batches of the run. "
            f"Received: accumulate={every!r}, steps={steps!r}"
        )
    schedule = make_schedule(recipe.schedule, recipe.learning_rate, steps // every)
    arguments = {
        "learning_rate": schedule if every == 1 else PerUpdate(schedule, every),
        "weight_decay": options.weight_decay or None,
        "global_clipnorm": options.global_clipnorm,
        "clipnorm": options.clipnorm,
        "gradient_accumulation_steps": every if every > 1 else None,
        "name": options.name,
    }
    if options.ema_momentum is not None:
        # Keras averages after every batch, also after those that only accumulate: k of them
        # together weigh as much as one update.
        arguments |= {"use_ema": True, "ema_momentum": options.ema_momentum ** (1 / every)}
    adam = {"beta_1": options.beta_1, "beta_2": options.beta_2}
    if options.name == "sgd":
        cls, own = keras.optimizers.SGD, {"momentum": options.momentum}
    elif options.name == "lamb":
        cls, own = keras.optimizers.Lamb, adam
    elif options.name == "muon":
        own = {f"adam_{name}": value for name, value in adam.items()}
        own |= {"momentum": options.momentum, "adam_weight_decay": options.weight_decay or None}
        half = recipe.run.precision == "mixed_bfloat16"
        own |= {"iteration_dtype": "bfloat16" if half else None}
        cls = Muon
    else:  # Keras' AdamW is its Adam, which decays the same way, but takes no None
        decays_any = options.name == "adamw" and options.weight_decay
        cls, own = keras.optimizers.AdamW if decays_any else keras.optimizers.Adam, adam
    if options.layer_decay != 1:
        cls = with_layer_factors(cls)  # pyright: ignore[reportArgumentType]
        own = {**own, "factors": layer_factors(model, options.layer_decay)}
    optimizer = cls(**arguments, **own)
    kept = decays(model)
    optimizer.exclude_from_weight_decay([v for v in model.weights if not kept[v.path]])
    return optimizer


def decays(model: keras.Model) -> dict[str, bool]:
    """Which weights decay: the kernels, including LoRA's, and nothing else.

    Returns:
        Path of a weight -> whether it decays, if it is trained.
    """
    return {v.path: "kernel" in v.name for v in model.weights}

"""A recipe's optimiser and schedule: Keras' own, with weight decay on kernels only."""

import math

import keras
from keras import ops

from training import recipe as recipes
from training.distribution.devices import in_replica
from training.layer_decay import BLOCK, LayerFactors, layer_factors, with_layer_factors


def make_optimizer(
    recipe: recipes.Recipe, model: keras.Model, steps: int
) -> keras.optimizers.Optimizer:
    """The optimiser of a recipe, for `model.compile`.

    In mixed_float16 `compile` wraps it in Keras' LossScaleOptimizer.

    Args:
        recipe: A recipe.
        model: The model that is trained.
        steps: Batches in the whole run. With `accumulate` = k there is one update in k of them,
            and warm-up counts updates.

    Returns:
        A Keras optimiser, not yet built.
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
        cls = Muon
    else:  # Keras' AdamW is its Adam, which decays the same way, but takes no None
        decays_any = options.name == "adamw" and options.weight_decay
        cls, own = keras.optimizers.AdamW if decays_any else keras.optimizers.Adam, adam
    if options.layer_decay != 1:
        cls = with_layer_factors(cls)
        own = {**own, "factors": layer_factors(model, options.layer_decay)}
    optimizer = cls(**arguments, **own)
    kept = decays(model)
    optimizer.exclude_from_weight_decay([v for v in model.weights if not kept[v.path]])
    return optimizer


def make_schedule(
    schedule: recipes.Schedule, learning_rate: float, steps: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """The learning rate of each update, counted from 0.

    It is 0 at step 0 and the peak at step `warmup_steps`, if there is a warm-up; the last step,
    `steps - 1`, has `final` times the peak.

    Args:
        schedule: How it goes.
        learning_rate: The peak.
        steps: Updates in the whole run.
    """
    warmup = schedule.warmup_steps
    if not 0 <= warmup < steps:
        raise ValueError(
            "warmup_steps must be in [0, updates of the run). "
            f"Received: warmup_steps={warmup!r}, with {steps} updates"
        )
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else learning_rate,
        decay_steps=max(1, steps - 1 - warmup),
        # A cosine from the peak to the peak is a constant.
        alpha=1.0 if schedule.name == "constant" else schedule.final,
        warmup_target=learning_rate if warmup else None,
        warmup_steps=warmup,
    )


def decays(model: keras.Model) -> dict[str, bool]:
    """Which weights decay: the kernels, LoRA's too, and nothing else.

    Returns:
        Path of a weight -> whether it decays, if it is trained.
    """
    return {v.path: "kernel" in v.name for v in model.weights}


class PerUpdate(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule over updates, for an optimiser that accumulates gradients.

    Keras asks a schedule with the number of batches, and not with that of updates.

    Args:
        schedule: A schedule over updates.
        accumulate: Batches in an update.
    """

    def __init__(self, schedule, accumulate):
        self.schedule = schedule
        self.accumulate = accumulate

    def __call__(self, step):
        return self.schedule(step // self.accumulate)

    def get_config(self):
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "accumulate": self.accumulate}

    @classmethod
    def from_config(cls, config):
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["accumulate"])


class Muon(keras.optimizers.Muon):
    """Keras' Muon for the kernels of the encoder blocks, and its Adam for all else.

    Deviation: Keras' Muon leaves the kernels of attention to Adam, because they are (D, h, d) and
    (h, d, D), and takes the head. Here they are orthogonalised as the matrices they are in the
    paper, (D, h * d) and (h * d, D). Patches, positions, tokens, norms, biases, LoRA, pre-logits
    and head are Adam's.
    """

    def _should_use_adamw(self, variable):
        return not (BLOCK.search(variable.path) and variable.name == "kernel")

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        """Matrices of one shape are orthogonalised together: a few large products, not many."""
        if isinstance(self, LayerFactors) or in_replica():
            return super()._backend_update_step(grads, trainable_variables, learning_rate)
        adams, groups = [], {}
        for pair in zip(grads, trainable_variables, strict=True):
            if self.adam_velocities[self._get_variable_index(pair[1])] is not None:
                adams.append(pair)
            else:
                groups.setdefault(self._matrix_shape(pair[1]), []).append(pair)
        if adams:
            super()._backend_update_step(*zip(*adams, strict=True), learning_rate)
        for pairs in groups.values():
            self._update_together(pairs, learning_rate)
        return None

    def _muon_update_step(self, gradient, variable, lr, m):
        self._update_together([(gradient, variable)], lr)

    def _update_together(self, pairs, learning_rate):
        """One update of kernels that are matrices of one shape."""
        shape = self._matrix_shape(pairs[0][1])
        matrices = ops.stack([ops.reshape(self._momentum(g, v), shape) for g, v in pairs])
        updates = self.zeropower_via_newtonschulz5(matrices, self.ns_steps)
        # As large as Adam's (arXiv 2502.16982).
        updates = updates * (math.sqrt(max(shape)) * self.rms_rate) * learning_rate
        for (_, variable), update in zip(pairs, ops.unstack(updates, len(pairs)), strict=True):
            self.assign_sub(variable, ops.reshape(update, variable.shape))

    def _momentum(self, gradient, variable):
        m = self.momentums[self._get_variable_index(variable)]
        momentum = gradient + self.momentum * m
        self.assign(m, momentum)
        return gradient + self.momentum * momentum if self.nesterov else momentum

    def _matrix_shape(self, variable):
        """Rows and columns of the matrix that a kernel is in the paper."""
        # TensorFlow hands in its own variable, which does not know its path.
        ours = self._trainable_variables[self._get_variable_index(variable)]
        inputs = 2 if "/attention_output/" in ours.path and len(ours.shape) == 3 else 1
        return math.prod(ours.shape[:inputs]), math.prod(ours.shape[inputs:])

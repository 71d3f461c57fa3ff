"""Compares optimizers on two devices with one device; a program that the tests start.

Each case makes a recipe's optimizer for a tiny ViT and applies the same gradients twice: on one
device, and on two replicas, whose parts add up to the same gradients. It writes how far all
variables differ, the optimizer's included. It is a program because TensorFlow needs its logical
devices before anything else.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit.train import recipe
from keras_vit.train.distribution.tensorflow_optimizer import for_strategy
from keras_vit.train.optim.optimizer import make_optimizer

STEPS, OVERFLOW, GROWTH = 8, 3, 2
ALL = ("optimizer.accumulate=2", "optimizer.global_clipnorm=0.5", "optimizer.ema_momentum=0.8")
# Name -> settings of the recipe, and whether the loss is scaled and a batch overflows.
CASES = {
    "sgd": (("optimizer.name=sgd", *ALL), False),
    "adamw": (("optimizer.name=adamw", "optimizer.layer_decay=0.7", *ALL), True),
    "muon": (("optimizer.name=muon", *ALL), True),
    "lamb": (("optimizer.name=lamb", "optimizer.global_clipnorm=0.5"), True),
}


def make(settings, dtype="float32"):
    """A model and its optimizer, the same each time."""
    keras.utils.set_random_seed(0)
    base = recipe.Recipe(
        "test",
        recipe.Data("digits"),
        recipe.Model(),
        recipe.Run(batch_size=8, steps=STEPS),
        optimizer=recipe.Optimizer("sgd", 0.02, weight_decay=0.1),
        schedule=recipe.Schedule("cosine", warmup_steps=2),
    )
    config = keras_vit.ViTConfig(
        image_size=(24, 16),
        in_channels=1,
        patch_size=8,
        width=20,
        depth=1,
        num_heads=4,
        mlp_dim=28,
        num_classes=3,
        head_init="truncated_normal",
    )
    model = keras_vit.ViT(config, dtype=dtype)
    return model, make_optimizer(recipe.override(base, [*settings]), model, STEPS)


def scaled(optimizer, loss_scale):
    """The optimizer as `compile` makes it."""
    if not loss_scale:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")


def gradients(model, step, overflow):
    """Two parts for each weight. Only the second one overflows."""
    rng = np.random.default_rng(step)
    parts = [rng.normal(size=(2, *v.shape)).astype("float32") for v in model.trainable_variables]
    if overflow and step == OVERFLOW:
        parts[0][1].flat[0] = np.inf
    return parts


def train(strategy, case, adapt, steps=range(STEPS), state=None):
    """Applies the gradients of some steps.

    Args:
        strategy: The strategy to train under.
        case: A name of `CASES`.
        adapt: From an optimizer, and whether the loss is scaled, to the optimizer for `compile`.
        steps: The numbers of the steps.
        state: All variables before the first step; by default as they are initialized.

    Returns:
        Path -> array of all variables after each step, and the paths of those that differ between
        the devices at the end.
    """
    settings, loss_scale = CASES[case]
    keras.backend.clear_session()
    with strategy.scope():
        model, optimizer = make(settings)
        optimizer = adapt(optimizer, loss_scale)
        optimizer.build(model.trainable_variables)
        if loss_scale:
            optimizer.dynamic_growth_steps = GROWTH
        variables = [*model.weights, *optimizer.variables]
        if state is not None:
            for variable, value in zip(variables, state, strict=True):
                variable.assign(value)

        def step(parts):
            # The gradients of a scaled loss.
            parts = [optimizer.scale_loss(part) for part in parts]
            optimizer.apply(parts, model.trainable_variables)

        run = tf.function(lambda parts: strategy.run(step, args=(parts,)), autograph=False)
        states = []
        for number in steps:
            parts = gradients(model, number, loss_scale)
            if strategy.num_replicas_in_sync == 1:
                run([part.sum(0) for part in parts])
            else:
                run([_per_replica(strategy, part) for part in parts])
            states.append({v.path: v.numpy() for v in variables})
        return states, [v.path for v in variables if not _copies_are_equal(v)]


def fit(strategy, adapt):
    """A real `fit` in mixed_float16. An image in the second half of one batch overflows.

    Returns:
        Path -> array of the weights and of the optimizer's numbers.
    """
    keras.backend.clear_session()
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8 * STEPS, 24, 16, 1)).astype("float32")
    images[8 * OVERFLOW + 7] = np.inf
    targets = np.eye(3, dtype="float32")[rng.integers(0, 3, len(images))]
    with strategy.scope():
        model, optimizer = make(("optimizer.accumulate=2", *ALL[1:]), "mixed_float16")
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(adapt(optimizer, True), loss, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices((images, targets)).batch(8, drop_remainder=True)
    model.fit(batches, shuffle=False, verbose=0)
    numbers = [v for v in model.optimizer.variables if v.ndim == 0]
    return {v.path: v.numpy() for v in [*model.weights, *numbers]}


def _per_replica(strategy, parts):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def _copies_are_equal(variable):
    values = [copy.numpy() for copy in getattr(variable.value, "values", (variable.value,))]
    return all(np.array_equal(values[0], value, equal_nan=True) for value in values)


def _compare(found, wanted):
    """The largest difference, infinite if a value is not finite, and the path of its variable."""
    if list(found) != list(wanted):
        return float("inf"), f"{sorted(found.keys() ^ wanted.keys())}"
    apart = {path: np.abs(found[path] - wanted[path]).max() for path in wanted}
    apart = {path: float(a) if np.isfinite(a) else float("inf") for path, a in apart.items()}
    worst = max(apart, key=apart.get)
    return apart[worst], worst


def _facts(found, wanted):
    apart, worst = _compare(found, wanted)
    numbers = {path.rpartition("/")[2]: float(v) for path, v in found.items() if not v.shape}
    return {"apart": apart, "worst": worst, **numbers}


def main(out, *names):
    """Runs some cases and writes the results as JSON."""
    one = tf.distribute.get_strategy()
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    result = {}
    for case in [case for case in CASES if case in names]:
        wanted, _ = train(one, case, scaled)
        found, copies_differ = train(two, case, for_strategy)
        result[case] = {**_facts(found[-1], wanted[-1]), "copies_differ": copies_differ}
        if case == "adamw":  # started on two devices, ended on one
            state = found[3].values()
            moved, _ = train(one, case, scaled, range(4, STEPS), state)
            result["adamw, moved"] = _facts(moved[-1], wanted[-1])
        try:
            alone, _ = train(two, case, scaled)
        except RuntimeError as error:  # it cannot accumulate
            result[f"{case}, Keras alone"] = str(error)
        else:
            before = _facts(alone[OVERFLOW - 1], wanted[OVERFLOW - 1])
            result[f"{case}, Keras alone, before the overflow"] = before
            result[f"{case}, Keras alone"] = _facts(alone[-1], wanted[-1])
    if "fit" in names:
        result["fit"] = _facts(fit(two, for_strategy), fit(one, lambda optimizer, _: optimizer))
    Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    two_cpus = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two_cpus)
    main(*sys.argv[1:])

"""A training run in separate processes: `run` starts them and reads their results.

Every run trains the same tiny ViT on the same numbers without dropout, so that runs can be
compared. A process writes its loss after each step, an evaluation of 21 samples in batches of 8,
and every weight.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from processes import run_together

ROOT = Path(__file__).parents[3]
BATCH, STEPS, TESTS = 8, 5, 21


@dataclasses.dataclass(frozen=True)
class Plan:
    """The run of a process."""

    devices: str = "one"
    optimizer: str = "sgd"  # a name of keras_vit.train.recipe.Optimizer
    settings: tuple[str, ...] = ()  # as --set takes them, for example "optimizer.accumulate=2"
    logical_cpus: int = 1  # TensorFlow's; JAX has XLA_FLAGS
    own_part: bool = False  # each process feeds only its part, through devices.distribute
    keras_file: str | None = None  # the chief saves the model there


@dataclasses.dataclass
class Result:
    """What one process wrote and printed."""

    code: int | None
    said: str
    losses: np.ndarray | None = None
    evaluation: np.ndarray | None = None  # loss and accuracy
    weights: dict[str, np.ndarray] | None = None
    facts: dict | None = None  # replicas, processes, process, kind


def run(
    plan: Plan, environments: Sequence[dict[str, str]] = ({},), timeout: float = 240
) -> list[Result]:
    """Runs one process for each environment, at the same time."""
    return run_in_turn([plan], environments, timeout)[0]


def run_in_turn(
    plans: Sequence[Plan], environments: Sequence[dict[str, str]] = ({},), timeout: float = 240
) -> list[list[Result]]:
    """Like `run`, but the processes run several plans in turn and load Keras once.

    Returns:
        For each plan the results of the processes.
    """
    fields = json.dumps([dataclasses.asdict(plan) for plan in plans])
    with tempfile.TemporaryDirectory() as folder:
        outs = [
            [Path(folder, f"{number}_{i}.npz") for i in range(len(plans))]
            for number in range(len(environments))
        ]
        commands = [[sys.executable, __file__, fields, *map(str, mine)] for mine in outs]
        ended = run_together(commands, environments, timeout)
        return [
            [read_result(*one, mine[i]) for one, mine in zip(ended, outs, strict=True)]
            for i in range(len(plans))
        ]


def read_result(code: int | None, said: str, out: Path) -> Result:
    """The result of a process from its exit code, its output and its file."""
    if code != 0 or not out.exists():
        return Result(code, said)
    with np.load(out) as file:
        arrays = dict(file)
    return Result(
        code,
        said,
        arrays.pop("losses"),
        arrays.pop("evaluation"),
        facts=json.loads(str(arrays.pop("facts"))),
        weights=arrays,
    )


def check_same(result: Result, reference: Result, tolerance: float = 1e-5) -> None:
    """Fails if a run differs from the run of one device on the same batches.

    The bias of the keys is not compared: its true gradient is zero, so AdamW amplifies noise.
    """
    assert result.code == 0, result.said[-3000:]
    np.testing.assert_allclose(result.losses, reference.losses, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        result.evaluation, reference.evaluation, rtol=tolerance, atol=tolerance
    )
    assert result.weights.keys() == reference.weights.keys()
    for path, wanted in reference.weights.items():
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(
                result.weights[path], wanted, rtol=0, atol=tolerance, err_msg=path
            )


def main(plan: Plan, out: str) -> None:
    """Runs a plan in this process."""
    if plan.logical_cpus > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * plan.logical_cpus
        tf.config.set_logical_device_configuration(cpu, parts)

    from keras_vit.train import distribution

    with distribution.scope(plan.devices) as devices:
        train(plan, devices, out)


def train(plan, devices, out):
    """Builds, trains and evaluates a model in the scope of the devices, and writes the result."""
    import keras
    import tensorflow as tf

    import keras_vit
    from keras_vit.model_weights import float32_copy
    from keras_vit.train import recipe
    from keras_vit.train.optim.optimizer import make_optimizer

    settings = [f"optimizer.name={plan.optimizer}", "optimizer.learning_rate=0.05"]
    if plan.optimizer != "sgd":
        settings[1] = "optimizer.learning_rate=0.002"
    one = recipe.override(
        recipe.Recipe(
            "test",
            recipe.Data("digits"),
            recipe.Model(
                config={"patch_size": 8, "width": 20, "depth": 1, "num_heads": 4, "mlp_dim": 28}
            ),
            recipe.Run(BATCH, steps=STEPS),
            schedule=recipe.Schedule("constant"),
        ),
        [*settings, *plan.settings],
    )
    keras.utils.set_random_seed(0)
    config = {**one.model.config, "head_init": "truncated_normal", "num_classes": 3}
    model = keras_vit.ViT(
        keras_vit.ViTConfig(image_size=(24, 16), in_channels=1, **config), dtype=one.run.precision
    )
    model.compile(
        devices.optimizer(lambda: make_optimizer(one, model, STEPS), one.run.precision),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.CategoricalAccuracy(name="accuracy")],
        jit_compile=devices.jit_compile(one.run.jit_compile),
        steps_per_execution=one.run.steps_per_execution,
    )
    devices.prepare(model)

    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH * STEPS + TESTS, 24, 16, 1)).astype("float32")
    targets = np.eye(3, dtype="float32")[rng.integers(0, 3, len(images))]
    part = BATCH // devices.processes

    def dataset(first, number, *more):
        """Whole batches, or this process' part of them."""
        arrays = (images[first : first + number], targets[first : first + number], *more)
        if not plan.own_part:
            return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True)
        mine = np.arange(number).reshape(-1, devices.processes, part)[:, devices.process].ravel()
        mine = tf.data.Dataset.from_tensor_slices(tuple(a[mine] for a in arrays))
        return devices.distribute(mine.batch(part, drop_remainder=True))

    losses = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(logs))
    model.fit(
        dataset(0, BATCH * STEPS),
        epochs=STEPS // one.run.steps_per_execution,
        steps_per_epoch=one.run.steps_per_execution,
        callbacks=[keep],
        shuffle=False,
        verbose=0,
    )
    # The last batch is padded with samples of weight 0; the other weights are scaled up for it.
    padded = -(-TESTS // BATCH) * BATCH
    weights = np.where(np.arange(padded) < TESTS, padded / TESTS, 0).astype("float32")
    images = np.concatenate([images, images[: padded - TESTS]])
    targets = np.concatenate([targets, targets[: padded - TESTS]])
    found = model.evaluate(dataset(BATCH * STEPS, padded, weights), verbose=0)
    if plan.keras_file and devices.is_chief:
        # Some devices require this for a model that only one process creates.
        with getattr(devices, "alone", contextlib.nullcontext)():
            float32_copy(model).save(plan.keras_file)
    facts = {k: getattr(devices, k) for k in ("kind", "replicas", "processes", "process")}
    weights = {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}
    devices.barrier()
    np.savez(
        out,
        losses=[logs["loss"] for logs in losses],
        evaluation=found,
        facts=json.dumps(facts),
        **weights,
    )


if __name__ == "__main__":
    for one, path in zip(json.loads(sys.argv[1]), sys.argv[2:], strict=True):
        main(Plan(**{**one, "settings": tuple(one["settings"])}), path)

"""Schedules, weight decay, and each optimizer compared with NumPy, on every backend."""

import typing

import keras
import numpy as np
import pytest
from conformance import arrays, images, tiny_model, to_numpy
from optimizer_steps import (
    RATE,
    apply,
    make,
    random_gradients,
    recipe,
    zero_gradients,
)

from keras_vit import train
from keras_vit.train.optim.layer_decay import layer_factors
from keras_vit.train.recipe import Optimizer, Schedule

NAMES = ["adamw", "adam", "sgd", "lamb", "muon"]
DECAY = 0.1


def rates(schedule, steps):
    return [float(to_numpy(schedule(step))) for step in steps]


# -- schedules


def test_schedule_starts_at_zero_peaks_after_the_warm_up_and_ends_at_final():
    schedule = train.make_schedule(Schedule("cosine", 4, final=0.1), 0.5, 25)
    assert rates(schedule, [0, 1, 4, 24]) == pytest.approx([0, 0.125, 0.5, 0.05])
    assert rates(schedule, [14]) == pytest.approx([0.5 * (0.9 * 0.5 + 0.1)])  # halfway down
    assert rates(schedule, [25, 99]) == pytest.approx([0.05, 0.05])  # and stays there
    assert rates(schedule, [23])[0] > 0.0501


def test_schedule_without_a_warm_up_starts_at_the_peak():
    schedule = train.make_schedule(Schedule("cosine"), 0.5, 11)
    assert rates(schedule, [0, 5, 10]) == pytest.approx([0.5, 0.25, 0.0], abs=1e-7)
    assert rates(train.make_schedule(Schedule(), 0.5, 1), [0]) == [0.5]


def test_schedule_constant_warms_up_too():
    schedule = train.make_schedule(Schedule("constant", 4, final=0.1), 0.5, 25)
    assert rates(schedule, [0, 2, 4, 14, 24]) == pytest.approx([0, 0.25, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("warmup", [10, 11, -1])
def test_schedule_refuses_a_warm_up_that_never_ends(warmup):
    with pytest.raises(ValueError, match=rf"warmup_steps must be .*warmup_steps={warmup}"):
        train.make_schedule(Schedule("cosine", warmup), 0.5, 10)
    train.make_schedule(Schedule("cosine", 9), 0.5, 10)


def test_schedule_counts_updates_where_keras_counts_batches():
    schedule = Schedule("cosine", 2, final=0.1)
    optimizer = make(tiny_model(depth=1), steps=15, schedule=schedule, accumulate=3)
    seen = []
    for _ in range(15):
        seen.append(float(to_numpy(optimizer.learning_rate)))
        optimizer._iterations.assign_add(1)
    updates = rates(train.make_schedule(schedule, RATE, 5), range(5))
    assert seen == pytest.approx(np.repeat(updates, 3))
    copy = type(optimizer._learning_rate).from_config(optimizer._learning_rate.get_config())
    assert rates(copy, range(15)) == pytest.approx(seen)
    # The negative control: the schedule by batches.
    inner = optimizer._learning_rate.schedule
    assert rates(inner, range(15)) != pytest.approx(seen)


@pytest.mark.parametrize("accumulate", [0, 11])
def test_accumulation_must_leave_an_update(accumulate):
    with pytest.raises(ValueError, match=f"accumulate must .*accumulate={accumulate}, steps=10"):
        train.make_optimizer(recipe(accumulate=accumulate), tiny_model(), 10)


# -- weight decay


def test_decays_names_the_kernels_and_nothing_else():
    table = {}
    for kind in ("registers", "learned_2d", "patch_norm", "qk_norm", "pre_logits"):
        table.update(train.decays(tiny_model(kind)))
    assert table["patches/projection/kernel"] and table["head/kernel"]
    assert table["encoder_block_1/attention/query/kernel"]
    assert table["encoder_block_0/mlp/dense_2/kernel"] and table["pre_logits/kernel"]
    kept = {path.rsplit("/", 1)[-1] for path, decays in table.items() if not decays}
    assert kept == {"bias", "gamma", "beta", "tokens", "table", "rows", "columns", "class_row"}
    assert not {path for path, decays in table.items() if decays} & set(
        path for path in table if not path.endswith("/kernel")
    )


def test_decays_reaches_lora():
    model = tiny_model()
    model.enable_lora(2)
    table = train.decays(model)
    assert table["encoder_block_0/attention/query/lora_kernel_a"]
    assert not table["encoder_block_0/attention/query/bias"]
    assert train.make_optimizer(recipe(weight_decay=DECAY), model, 10)


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_moves_only_the_kernels(name, layer_decay):
    model = tiny_model("registers")
    optimizer = make(model, name=name, weight_decay=DECAY, layer_decay=layer_decay)
    before = arrays(model)
    apply(optimizer, model, zero_gradients(model))
    factors = layer_factors(model, layer_decay)
    for path, decays in train.decays(model).items():
        wanted = before[path] * (1 - RATE * DECAY * factors[path] * decays)
        after = arrays(model)[path]
        np.testing.assert_allclose(after, wanted, rtol=1e-6, err_msg=path)
        assert (after != before[path]).any() == decays, path


# -- layer-wise learning-rate decay


def numpy_adamw(values, gradients, factors, decays):
    """AdamW (arXiv 1711.05101) with a learning rate for each weight."""
    values = {path: value.astype("float64") for path, value in values.items()}
    m = {path: 0.0 for path in values}
    v = {path: 0.0 for path in values}
    for step, grads in enumerate(gradients, start=1):
        for path, g in grads.items():
            rate = RATE * factors[path]
            m[path] = 0.9 * m[path] + 0.1 * g
            v[path] = 0.999 * v[path] + 0.001 * np.square(g, dtype="float64")
            values[path] -= rate * DECAY * decays[path] * values[path]
            mean, correction = m[path] / (1 - 0.9**step), np.sqrt(1 - 0.999**step)
            # Keras adds epsilon before the correction: Adam's "epsilon hat".
            values[path] -= rate * mean * correction / (np.sqrt(v[path]) + 1e-7)
    return values


@pytest.mark.parametrize("layer_decay", [1.0, 0.6])
def test_adamw_agrees_with_numpy(layer_decay):
    model = tiny_model("registers")
    optimizer = make(model, weight_decay=DECAY, layer_decay=layer_decay)
    before = arrays(model)
    gradients = [random_gradients(model, seed) for seed in range(3)]
    for grads in gradients:
        apply(optimizer, model, grads)
    after, decays = arrays(model), train.decays(model)

    def largest_error(factors, decays):
        wanted = numpy_adamw(before, gradients, factors, decays)
        return max(np.abs(after[path] - wanted[path]).max() for path in wanted)

    factors = layer_factors(model, layer_decay)
    assert largest_error(factors, decays) < 5e-6
    # The negative controls: another layer decay, and another weight decay.
    assert largest_error(layer_factors(model, 0.8), decays) > 1e-3
    assert largest_error(factors, dict.fromkeys(decays, True)) > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_layer_decay_scales_the_step_of_every_optimizer(name):
    steps = []
    for layer_decay in (1.0, 0.5):
        model = tiny_model()
        optimizer = make(model, name=name, layer_decay=layer_decay)
        before, gradients = arrays(model), random_gradients(model, 0)
        apply(optimizer, model, gradients)
        steps.append({path: value - before[path] for path, value in arrays(model).items()})
    for path, factor in layer_factors(model, 0.5).items():
        np.testing.assert_allclose(
            steps[1][path], factor * steps[0][path], rtol=1e-3, atol=1e-6, err_msg=path
        )
        assert np.abs(steps[0][path]).max() > 1e-4


# -- clipping, accumulation, averages


def test_global_clip_limits_the_norm_of_the_whole_gradient():
    model = tiny_model()
    optimizer = make(model, name="sgd", momentum=0.0, global_clipnorm=1.0)
    before = arrays(model)
    apply(optimizer, model, random_gradients(model, 0))
    step = [(value - before[path]).ravel() for path, value in arrays(model).items()]
    assert np.linalg.norm(np.concatenate(step)) == pytest.approx(RATE, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layer_decay"),
    [
        ("adamw", 0.7),
        *(pytest.param(name, 1.0, marks=pytest.mark.slow) for name in ("sgd", "muon")),
    ],
)
def test_accumulation_equals_larger_batches(name, layer_decay):
    options = {
        "name": name,
        "weight_decay": DECAY,
        "layer_decay": layer_decay,
        "global_clipnorm": 30.0,
        "ema_momentum": 0.5,
        "schedule": Schedule("cosine", 1, final=0.5),
    }
    accumulated, whole = tiny_model(depth=1), tiny_model(depth=1)
    every = make(accumulated, steps=12, accumulate=3, **options)
    once = make(whole, steps=4, **options)
    for update in range(3):
        batches = [random_gradients(whole, 3 * update + i) for i in range(3)]
        start = arrays(accumulated)
        for i, batch in enumerate(batches):
            apply(every, accumulated, batch)
            still = all((value == start[path]).all() for path, value in arrays(accumulated).items())
            # The first update has a learning rate of zero.
            assert still == (i < 2 or update == 0)
        apply(once, whole, {path: sum(b[path] for b in batches) / 3 for path in batches[0]})
    for path, value in arrays(whole).items():
        np.testing.assert_allclose(arrays(accumulated)[path], value, atol=2e-6, err_msg=path)
    # An update enters the average during the batches after it, before the next update.
    zeros = zero_gradients(accumulated)
    averages = averages_of(once, whole)
    early = averages_of(every, accumulated)
    for _ in range(2):
        apply(every, accumulated, zeros)
    late = averages_of(every, accumulated)
    path = "head/kernel"
    np.testing.assert_allclose(late[path], averages[path], atol=2e-6)
    assert np.abs(early[path] - averages[path]).max() > 1e-4


def averages_of(optimizer, model):
    kept = optimizer._model_variables_moving_average
    return {
        v.path: to_numpy(average.value)
        for v, average in zip(model.trainable_variables, kept, strict=True)
    }


def test_average_is_exponential_and_replaces_the_weights_at_the_end():
    model = tiny_model()
    optimizer = make(model, ema_momentum=0.75)
    path = "encoder_block_1/mlp/dense_1/kernel"
    wanted = None
    for seed in range(4):
        apply(optimizer, model, random_gradients(model, seed))
        value = arrays(model)[path]
        wanted = value if wanted is None else 0.75 * wanted + 0.25 * value
    last = arrays(model)[path]
    optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_allclose(arrays(model)[path], wanted, atol=1e-6)
    assert np.abs(last - wanted).max() > 1e-3


# -- in fit


def fit(model, epochs=4, **options):
    x = images(model.config, 12)
    y = np.eye(3, dtype="float32")[np.arange(12) % 3]
    optimizer = train.make_optimizer(recipe(**options), model, 3 * epochs)
    compiled = "auto" if keras.backend.backend() == "jax" else False
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=compiled)
    return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0).history["loss"]


@pytest.mark.parametrize("name", NAMES)
def test_fit_lowers_the_loss(name):
    model = tiny_model(depth=1)
    rate = {"sgd": 0.05, "lamb": 0.03}.get(name, 0.01)
    losses = fit(model, name=name, learning_rate=rate, weight_decay=DECAY, layer_decay=0.75)
    assert losses[-1] < 0.8 * losses[0]


def test_fit_with_everything_on():
    model = tiny_model(depth=1)
    losses = fit(
        model,
        epochs=6,
        schedule=Schedule("cosine", 1),
        weight_decay=DECAY,
        layer_decay=0.75,
        global_clipnorm=1.0,
        ema_momentum=0.9,
        accumulate=3,
    )
    assert losses[-1] < losses[0] and np.isfinite(losses).all()


def test_fit_in_float16_scales_the_loss():
    model = tiny_model(depth=1, dtype="mixed_float16")
    losses = fit(model, weight_decay=DECAY, layer_decay=0.75)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert type(model.optimizer.inner_optimizer).__name__ == "LayerDecayAdamW"
    assert losses[-1] < losses[0] and np.isfinite(losses).all()


def test_options_reach_keras():
    model = tiny_model()
    adamw = make(model, beta_1=0.8, beta_2=0.95, weight_decay=DECAY)
    assert isinstance(adamw, keras.optimizers.AdamW)
    assert (adamw.beta_1, adamw.beta_2) == (0.8, 0.95)
    muon = make(model, name="muon", beta_1=0.8, beta_2=0.95, momentum=0.7)
    assert (muon.adam_beta_1, muon.adam_beta_2, muon.momentum) == (0.8, 0.95, 0.7)
    sgd = make(model, name="sgd", momentum=0.7)
    assert (sgd.momentum, sgd.nesterov, sgd.weight_decay) == (0.7, False, None)
    assert isinstance(make(model, name="lamb"), keras.optimizers.Lamb)
    assert typing.get_args(typing.get_type_hints(Optimizer)["name"]) == tuple(NAMES)

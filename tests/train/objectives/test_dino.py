"""DINO equals the authors' formulas, in NumPy beside it, and its teacher follows its student."""

import keras
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file, save_file
from scipy.special import erf, log_softmax, softmax
from scipy.stats import entropy
from sklearn.datasets import load_digits

import keras_vit
from keras_vit.resample import resample_grid
from keras_vit.train import DINO, Checkpoint

SIZES = dict(num_prototypes=10, hidden_dim=12, bottleneck_dim=6)


def tiny(dtype=None, **fields):
    config = dict(image_size=16, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=12)
    config |= {"num_classes": 0, "norm_epsilon": 1e-6, **fields}
    return keras_vit.ViT(config, dtype=dtype)


def toy(count=6, local=3, seed=1):
    rng = np.random.default_rng(seed)
    one = rng.normal(size=(count, 2, 16, 16, 3)).astype("float32")
    return {"global": one, "local": one[:, [0] * local, :8, 4:12] + np.float32(0.1)}


def made(vit=None, steps=8, rate=0.1, compiled=None, **arguments):
    """A compiled DINO whose arrays are all random; those of its teacher are others."""
    arguments = {"local_size": 8, **SIZES, **arguments}
    dino, rng = DINO(vit or tiny(), steps, **arguments), np.random.default_rng(3)
    for weight in [*dino.weights, dino.center]:
        if weight.path.split("/")[-1] not in ("step", "teacher_step", "seed_generator_state"):
            scale = weight.name in ("gamma", "gain")
            weight.assign(0.3 * rng.normal(size=weight.shape) + scale)
    if arguments.get("norm_last_layer", True):
        for head in (dino.head, dino.teacher_head):
            head.gain.assign(np.ones(head.gain.shape))
    dino.compile(keras.optimizers.SGD(rate), **(compiled or {}))
    return dino


def values(layer):
    return {w.path: np.array(keras.ops.convert_to_numpy(w), "float64") for w in layer.weights}


def parts(dino):
    """Arrays of student, its head, teacher, and its head."""
    return [values(part) for part in (dino.vit, dino.head, dino.teacher, dino.teacher_head)]


# -- the authors' formulas


def head_of(weights, x):
    w = {path.split("/", 1)[1]: value for path, value in weights.items()}
    for i in range(3):
        if i:
            x = 0.5 * x * (1 + erf(x / np.sqrt(2)))
        x = x @ w[f"dense_{i}/kernel"] + w[f"dense_{i}/bias"]
    x = x / np.sqrt((x**2).sum(-1, keepdims=True))
    v = w["kernel"]
    return x @ (w["gain"] * v / np.sqrt((v**2).sum(0)))


def logits_of(config, vit, head, crops):
    """One crop number after the other, as in the authors' loop."""
    outputs = []
    for images in crops:
        size = images.shape[1:3]
        at = config.replace(image_size=size)
        table = vit["position_embedding/table"]
        table = resample_grid(table, config.grid, at.grid, config.interpolation, prefix=1)
        weights = {**vit, "position_embedding/table": table}
        outputs.append(head_of(head, reference.forward(at, weights, images)))
    return outputs


def crops_of(views, *names):
    return [views[name][:, i] for name in names for i in range(views[name].shape[1])]


def losses_of(student, teacher, center, student_temp=0.1, teacher_temp=0.04):
    total, terms = 0.0, 0
    for i, t in enumerate(teacher):
        q = softmax((t - center) / teacher_temp, axis=-1)
        for v, s in enumerate(student):
            if v != i:
                total = total - (q * log_softmax(s / student_temp, axis=-1)).sum(-1)
                terms += 1
    return total / terms


def expected_losses(dino, views, arrays=None, center=None, **temperatures):
    vit, head, teacher, teacher_head = arrays or parts(dino)
    config = dino.vit.config
    center = keras.ops.convert_to_numpy(dino.center) if center is None else center
    student = logits_of(config, vit, head, crops_of(views, *views))
    teacher = logits_of(config, teacher, teacher_head, crops_of(views, "global"))
    return losses_of(student, teacher, center, **temperatures), np.stack(teacher)


# -- loss and gradient


def test_loss_is_the_authors():
    dino, views = made(tiny(interpolation="timm")), toy()
    expected, _ = expected_losses(dino, views)
    np.testing.assert_allclose(dino.evaluate(views, verbose=0), expected.mean(), rtol=2e-5)
    without, _ = expected_losses(dino, {"global": views["global"]})
    assert abs(without.mean() - expected.mean()) > 1e-3
    weight = np.float32([1, 0, 2, 0, 0, 1])
    loss = dino.evaluate(views, np.zeros(6), sample_weight=weight, verbose=0)
    np.testing.assert_allclose(loss, (weight * expected).mean(), rtol=2e-5)


def test_loss_worked_out_by_hand():
    # Two prototypes. The teacher is certain that view 0 is the first and view 1 the second one.
    # With student logits (0, 0), each of the two terms is log 2. With temperature 0.5 and logits
    # (1, 0) for view 0, which is to be the second, it is -log(1 / (1 + e^2)).
    dino = made(local_size=None, num_prototypes=2, student_temp=0.5, teacher_temp=0.01)
    dino.center.assign([0.5, 0.5])
    teacher = np.float32([[[1, 0], [0, 1]]])
    for student, expected in (
        ([[0, 0], [0, 0]], np.log(2)),
        ([[1, 0], [0, 0]], (np.log(2) + np.log(1 + np.e**2)) / 2),
        ([[0, 20], [20, 0]], 0),
    ):
        outputs = {"student": np.float32([student]), "teacher": teacher}
        outputs = {k: keras.ops.convert_to_tensor(v) for k, v in outputs.items()}
        loss = keras.ops.convert_to_numpy(dino.image_losses(None, None, outputs))
        np.testing.assert_allclose(loss, [expected], atol=1e-5)


def test_gradient_is_that_of_the_formulas():
    # A step of SGD with rate 1 is the gradient. The formulas' gradient is a central difference.
    dino, views = made(rate=1.0, norm_last_layer=False), toy()
    before, center = parts(dino), np.array(keras.ops.convert_to_numpy(dino.center))
    dino.train_on_batch(views)
    after, rng = parts(dino), np.random.default_rng(0)
    compared = 0
    for number in (0, 1):
        for path, value in before[number].items():
            gradient = value - after[number][path]
            way = rng.normal(size=value.shape)
            sides = []
            for sign in (1, -1):
                moved = {**before[number], path: value + sign * 1e-5 * way}
                arrays = [moved if n == number else part for n, part in enumerate(before)]
                sides.append(expected_losses(dino, views, arrays, center)[0].mean())
            expected = (sides[0] - sides[1]) / 2e-5
            tolerance = 1e-4 * np.sqrt((gradient**2).sum() * (way**2).sum()) + 2e-6
            assert abs((gradient * way).sum() - expected) < tolerance, path
            compared += abs(expected) > 1e-4
    assert compared > 0.8 * (len(before[0]) + len(before[1]))
    for path, value in before[2].items():  # the first step has no update to catch up with
        np.testing.assert_array_equal(after[2][path], value)


def test_temperature_warms_up_and_the_center_follows_the_teacher():
    dino = made(warmup_teacher_temp=0.02, teacher_temp=0.06, warmup_steps=4)
    for step in range(6):
        views, center = toy(seed=step), keras.ops.convert_to_numpy(dino.center)
        dino.update_teacher()
        tau = min(0.02 + 0.01 * step, 0.06)
        expected, teacher = expected_losses(dino, views, teacher_temp=tau)
        np.testing.assert_allclose(dino.train_on_batch(views), expected.mean(), rtol=1e-4)
        center = 0.9 * center + 0.1 * teacher.mean((0, 1))
        np.testing.assert_allclose(keras.ops.convert_to_numpy(dino.center), center, atol=2e-6)
    dino.evaluate(toy(), verbose=0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(dino.center), center, atol=2e-6)


def test_padding_does_not_move_the_center():
    views, weight = toy(), np.float32([1, 1, 1, 1, 0, 0])
    centers = []
    for data in ((views, np.zeros(6), weight), ({k: v[:4] for k, v in views.items()},)):
        dino = made()
        dino.train_on_batch(*data)
        centers.append(keras.ops.convert_to_numpy(dino.center))
    np.testing.assert_allclose(*centers, atol=1e-6)


# -- teacher


def test_teacher_is_the_moving_average_of_the_student():
    dino = made(steps=5, teacher_momentum=0.7)
    _, _, *teacher = parts(dino)
    for step in range(5):
        dino.train_on_batch(toy(seed=step))
        student = parts(dino)[:2]
        # The authors' table: from the base value to 1 by half a cosine.
        momentum = 1 + 0.5 * (0.7 - 1) * (1 + np.cos(np.pi * step / 5))
        for number in (0, 1):
            theirs = [w.path for w in (dino.teacher, dino.teacher_head)[number].weights]
            for path, source in zip(theirs, student[number].values(), strict=True):
                value = momentum * teacher[number][path] + (1 - momentum) * source
                teacher[number][path] = value
        if step in (1, 4):
            assert dino.update_teacher() is dino.teacher
            again = parts(dino.update_teacher() and dino)[2:]  # the second call changes nothing
            for got, expected in zip(again, teacher, strict=True):
                for path, value in expected.items():
                    np.testing.assert_allclose(got[path], value, atol=2e-6, err_msg=path)
    assert momentum > 0.95


def test_teacher_begins_as_the_student_and_gets_no_gradient():
    dino = DINO(tiny(dropout=0.1), 10, **SIZES)
    student, head, teacher, teacher_head = map(list, map(dict.values, parts(dino)))
    for ours, theirs in zip(student + head, teacher + teacher_head, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    trained = {id(v) for v in dino.trainable_variables}
    assert not trained & {id(v) for v in [*dino.teacher.weights, *dino.teacher_head.weights]}
    assert len(trained) == len(dino.vit.weights) + len(dino.head.weights) - 1  # but the gains


def test_last_layer_is_frozen_at_first():
    dino = made(freeze_last_layer=2, rate=0.5)
    moved = []
    for step in range(4):
        before, first = (np.array(keras.ops.convert_to_numpy(w)) for w in weights_of(dino))
        dino.train_on_batch(toy(seed=step))
        after, last = (keras.ops.convert_to_numpy(w) for w in weights_of(dino))
        moved.append(np.abs(after - before).max() > 0)
        assert np.abs(last - first).max() > 0
    assert moved == [False, False, True, True]


def weights_of(dino):
    return dino.head.kernel, dino.head.mlp[0].kernel


# -- published files


def full_checkpoint(folder, gain=None, **changes):
    """A teacher's arrays, named as main_dino.py saves them, and the ViT that they hold."""
    rng, vit = np.random.default_rng(5), made(tiny(width=64, num_heads=1)).vit
    keras_vit.save_pretrained(vit, folder, format="timm")
    arrays = {f"backbone.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    shapes = {"mlp.0": (12, 64), "mlp.2": (12, 12), "mlp.4": (6, 12)}
    for name, shape in shapes.items():
        arrays[f"head.{name}.weight"] = rng.normal(size=shape).astype("float32")
        arrays[f"head.{name}.bias"] = rng.normal(size=shape[0]).astype("float32")
    arrays["head.last_layer.weight_v"] = rng.normal(size=(10, 6)).astype("float32")
    gains = np.ones((10, 1)) if gain is None else gain
    arrays["head.last_layer.weight_g"] = np.asarray(gains, "float32")
    arrays |= changes
    save_file({k: v for k, v in arrays.items() if v is not None}, folder / "full.safetensors")
    return folder / "full.safetensors", arrays, vit


def test_full_checkpoint_gives_student_and_teacher(tmp_path):
    gain = np.linspace(0.5, 2, 10)[:, None]
    path, a, vit = full_checkpoint(tmp_path, gain)
    dino = DINO.from_pretrained(path, 7, local_size=8)
    assert len(dino.head.trainable_variables) == 8  # the gains too
    assert dino.vit.config.interpolation == "dinov2" and dino.vit.config.crop_fraction == 0.875
    views = toy()
    x = np.stack(
        [reference.forward(vit.config, values(vit), i) for i in crops_of(views, "global")], 1
    )
    for name in ("mlp.0", "mlp.2", "mlp.4"):
        if name != "mlp.0":
            x = 0.5 * x * (1 + erf(x / np.sqrt(2)))
        x = x @ a[f"head.{name}.weight"].T + a[f"head.{name}.bias"]
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    v = a["head.last_layer.weight_v"].astype("float64")
    expected = x @ (gain * v / np.linalg.norm(v, axis=1, keepdims=True)).T
    outputs = dino.predict(views, verbose=0)
    np.testing.assert_allclose(outputs["teacher"], expected, atol=1e-5)
    np.testing.assert_allclose(outputs["student"][:, :2], expected, atol=1e-5)
    dino.compile("sgd")
    dino.fit(views, verbose=0)
    path, *_ = full_checkpoint(tmp_path)
    assert len(DINO.from_pretrained(path, 7).head.trainable_variables) == 7
    plain = keras_vit.from_pretrained(path)  # the ViT alone
    for name, value in values(vit).items():
        np.testing.assert_array_equal(values(plain)[name], value, err_msg=name)


def test_files_without_the_whole_head_are_refused(tmp_path):
    path, *_ = full_checkpoint(tmp_path, **{"head.mlp.2.bias": None})
    with pytest.raises(ValueError, match=r"missing: 'head\.mlp\.2\.bias'"):
        DINO.from_pretrained(path, 7)
    path, *_ = full_checkpoint(tmp_path, **{"head.mlp.1.weight": np.ones(12, "float32")})
    with pytest.raises(ValueError, match=r"extra: 'head\.mlp\.1\.weight'"):  # of a BatchNorm
        DINO.from_pretrained(path, 7)
    nan = np.full((6, 12), np.nan, "float32")
    path, *_ = full_checkpoint(tmp_path, **{"head.mlp.4.weight": nan})
    with pytest.raises(ValueError, match="72 NaN"):
        DINO.from_pretrained(path, 7)
    with pytest.raises(ValueError, match="hold a ViT with DINO's head"):
        DINO.from_pretrained(tmp_path / "model.safetensors", 7)


# -- training


def digits_after_training(**arguments):
    """Information of the teacher about 250 digits, in nats, and accuracy by nearest neighbors."""
    digits, labels = load_digits(return_X_y=True)
    images = np.float32(digits.reshape(-1, 8, 8, 1)[:250] / 8 - 1)
    noise = np.random.default_rng(0).normal(size=(250, 2, 8, 8, 1))
    views = {"global": np.float32(images[:, None] + 0.3 * noise)}
    keras.utils.set_random_seed(0)
    fields = dict(image_size=8, in_channels=1, width=32, mlp_dim=64, class_token=False)
    sizes = dict(num_prototypes=16, hidden_dim=64, bottleneck_dim=16)
    arguments = dict(teacher_momentum=0.9, **sizes, **arguments)
    dino = DINO(tiny(**fields, pooling="mean"), 150, **arguments)
    rate = keras.optimizers.schedules.CosineDecay(0.0, 150, warmup_target=1e-3, warmup_steps=20)
    dino.compile(keras.optimizers.AdamW(rate, weight_decay=0.04, clipnorm=3.0))
    dino.fit(views, batch_size=50, epochs=30, verbose=0)
    logits = dino.predict(views, verbose=0)["teacher"][:, 0]
    center = keras.ops.convert_to_numpy(dino.center)
    p = softmax((logits - center) / dino.teacher_temp, axis=-1)
    information = entropy(p.mean(0)) - entropy(p, axis=1).mean()
    features = dino.update_teacher().predict(images, verbose=0)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    nearest = (features[125:] @ features[:125].T).argmax(1)
    return information, (labels[:125][nearest] == labels[125:250]).mean()


@pytest.mark.sampled(cases=0)  # loss, gradient and teacher are compared on every backend
def test_training_on_digits_does_not_collapse():
    # Outputs that are all the same, certain or uniform, say nothing about the image.
    information, accuracy = digits_after_training()
    assert information > 0.8 and accuracy > 0.65
    # A teacher that is no sharper than the student collapses to the uniform distribution.
    assert digits_after_training(teacher_temp=0.1)[0] < 0.1


def test_interrupted_training_resumes_bit_for_bit(tmp_path):
    arguments = dict(batch_size=2, shuffle=False, verbose=0)
    runs = []
    for name, cuts in (("whole", (2,)), ("parts", (1, 2))):
        for epochs in cuts:
            keras.utils.set_random_seed(0)
            dino = made(tiny(dropout=0.1), teacher_momentum=0.7, freeze_last_layer=1)
            checkpoint = Checkpoint(tmp_path / name)
            start = checkpoint.restore(dino)
            dino.fit(
                toy(),
                epochs=epochs,
                initial_epoch=start.epoch,
                callbacks=checkpoint.around([]),
                **arguments,
            )
            runs.append([np.array(keras.ops.convert_to_numpy(v)) for v in dino.variables])
    whole, first, second = runs
    for one, other in zip(whole, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(whole, first, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_saving_keeps_student_teacher_and_state(tmp_path, dtype):
    dino = made(tiny(dtype, num_classes=3), norm_last_layer=False, warmup_steps=9)
    losses = dino.fit(toy(), epochs=4, verbose=0, validation_data=(toy(),)).history
    assert losses["loss"][-1] < losses["loss"][0] and len(losses["val_loss"]) == 4
    assert dino.head.compute_dtype == dino.teacher.compute_dtype == dino.vit.compute_dtype
    dino.save(tmp_path / "dino.keras")
    loaded = keras.saving.load_model(tmp_path / "dino.keras")
    assert isinstance(loaded, DINO) and loaded.get_config() == dino.get_config()
    assert loaded.evaluate(toy(), verbose=0) == dino.evaluate(toy(), verbose=0)
    for one, other in zip(dino.variables, loaded.variables, strict=True):
        a, b = (keras.ops.convert_to_numpy(v) for v in (one, other))
        if "seed_generator" not in one.path:
            np.testing.assert_array_equal(a, b, err_msg=one.path)
    for number, model in enumerate((dino.vit, loaded.update_teacher())):
        model.save(tmp_path / f"{number}.keras")
        plain = keras.saving.load_model(tmp_path / f"{number}.keras")
        assert type(plain) is keras_vit.ViT and plain.config == dino.vit.config
    loaded.fit(toy(), verbose=0)


def test_predict_returns_logits_of_all_views():
    outputs = made().predict(toy(), verbose=0)
    assert {k: v.shape for k, v in outputs.items()} == {
        "student": (6, 5, 10),
        "teacher": (6, 2, 10),
    }


@pytest.mark.backend_free
def test_bad_arguments_are_refused():
    for field, value in (
        ("steps", 0),
        ("num_prototypes", 0),
        ("hidden_dim", 1.5),
        ("student_temp", 0),
        ("warmup_teacher_temp", -1),
        ("warmup_steps", -1),
        ("teacher_momentum", 1.5),
        ("center_momentum", None),
        ("freeze_last_layer", 1.5),
        ("norm_last_layer", 1),
    ):
        with pytest.raises(ValueError, match=f"{field} must be .* Received: {field}={value}"):
            DINO(tiny(), **{"steps": 1, field: value})
    with pytest.raises(ValueError, match="local_size must be .* Received: local_size=9"):
        DINO(tiny(), 1, local_size=9)
    with pytest.raises(ValueError, match="pooling must be another than None"):
        DINO(tiny(pooling=None), 1)
    with pytest.raises(ValueError, match="vit must have weights in float32"):
        DINO(tiny("bfloat16"), 1)
    dino, views = made(), toy()
    for wrong in (views["global"], {"global": views["global"]}, {**views, "other": views["local"]}):
        with pytest.raises(ValueError, match="views must be a dict of global and local"):
            dino(wrong)
    with pytest.raises(ValueError, match=r"the shape \(batch, 2, 16, 16, 3\) in 'global'"):
        dino({**views, "global": views["global"][:, :1]})
    with pytest.raises(ValueError, match=r"the shape \(batch, any, 8, 8, 3\) in 'local'"):
        dino({**views, "local": views["global"]})

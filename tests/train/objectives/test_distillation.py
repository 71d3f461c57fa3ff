"""Distillation: its losses against DeiT's formulas in PyTorch, teachers, features, training."""

import keras
import numpy as np
import pytest
import torch
from torch.nn import functional

import keras_vit
from keras_vit import preprocessing
from keras_vit.train import Distillation

PAIR = {"distillation_token": True, "pooling": "token_pair"}
FeatureDistillation = keras.distillation.FeatureDistillation


def randomize(model, seed=0):
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        ones = weight.path.endswith(("gamma", "variance"))
        weight.assign(0.3 * np.abs(rng.normal(size=weight.shape)) + 0.7 * ones)
        if not ones:
            weight.assign(0.3 * rng.normal(size=weight.shape))
    return model


def student(dtype=None, **fields):
    sizes = dict(image_size=16, patch_size=8, width=12, depth=1, num_heads=2, mlp_dim=20)
    return randomize(keras_vit.ViT({**sizes, "num_classes": 3, **fields}, dtype=dtype))


def convnet(classes=3, size=16, activation=None):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((size, size, 3)),
            layers.Conv2D(5, 3, strides=4, padding="same", name="map"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling2D(name="vector"),
            layers.Dense(classes, activation=activation, name="logits"),
        ]
    )
    return randomize(model, seed=1)


def toy(count=12):
    """Three classes that differ in the mean of one channel."""
    rng = np.random.default_rng(2)
    labels = np.arange(count) % 3
    images = 0.5 * rng.normal(size=(count, 16, 16, 3)) + np.eye(3)[labels][:, None, None]
    return images.astype("float32"), labels


def mixed(labels, share=0.3):
    rows = np.eye(3, dtype="float32")[labels]
    return share * rows + (1 - share) * rows[::-1]


def compiled(objective, rate=0.1, **arguments):
    objective.compile(keras.optimizers.SGD(rate), **arguments)
    return objective


def values(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


def numbers(outputs):
    return {k: keras.ops.convert_to_numpy(keras.ops.stop_gradient(v)) for k, v in outputs.items()}


def deit_loss(z_class, z_dist, taught, labels, kind, alpha, tau, smoothing, over_classes):
    """What facebookresearch/deit minimizes, on torch tensors; labels are ints or rows."""
    if labels.ndim == 1:
        own = functional.cross_entropy(z_class, labels, label_smoothing=smoothing)
    else:  # its mixup smooths the rows
        rows = labels * (1 - smoothing) + smoothing / labels.shape[1]
        own = (-rows * torch.log_softmax(z_class, 1)).sum(1).mean()
    if kind == "hard":
        other = functional.cross_entropy(z_dist, taught.argmax(1))
    else:
        p = torch.softmax(taught / tau, 1)
        q = torch.softmax(z_dist / tau, 1)
        other = (p * (p.log() - q.log())).sum() * tau**2
        other = other / (z_dist.numel() if over_classes else len(z_dist))
    return (1 - alpha) * own + alpha * other


CASES = {
    "hard": dict(kind="hard"),
    "hard, smoothed": dict(kind="hard", label_smoothing=0.1),
    "hard, alpha": dict(kind="hard", alpha=0.8),
    "soft": dict(kind="soft", alpha=0.3, temperature=2.0),
    "soft, smoothed": dict(kind="soft", temperature=0.7, label_smoothing=0.2),
    "soft, per image": dict(kind="soft", mean_over_classes=False),
}


def expected_loss(z_class, z_dist, taught, labels, arguments):
    names = ("kind", "alpha", "temperature", "label_smoothing", "mean_over_classes")
    given = dict(zip(names, ("hard", 0.5, 3.0, 0.0, True), strict=True)) | arguments
    tensors = torch.tensor(taught), torch.tensor(labels)
    return deit_loss(z_class, z_dist, *tensors, *(given[name] for name in names))


@pytest.mark.parametrize("case", CASES)
def test_loss_is_that_of_deit(case):
    objective = Distillation(student(**PAIR), convnet(), **CASES[case])
    rng = np.random.default_rng(0)
    z_class, z_dist, taught = rng.normal(size=(3, 12, 3)).astype("float32")
    names = ("class_logits", "distillation_logits", "teacher_logits")
    outputs = dict(zip(names, (z_class, z_dist, taught), strict=True))
    for labels in (toy()[1], mixed(toy()[1])):
        losses = keras.ops.convert_to_numpy(objective.image_losses(None, labels, outputs))
        z = torch.tensor(z_class), torch.tensor(z_dist)
        expected = expected_loss(*z, taught, labels, CASES[case])
        assert losses.shape == (12,) and losses.mean() == pytest.approx(expected.item(), abs=1e-6)
        swapped = expected_loss(*z[::-1], taught, labels, CASES[case])
        assert abs(losses.mean() - swapped) > 1e-3


@pytest.mark.parametrize(
    ("fields", "case"),
    [(PAIR, "hard, alpha"), (PAIR, "soft, smoothed"), ({}, "soft")],
    ids=["token, hard", "token, soft", "plain, soft"],
)
def test_gradient_is_that_of_deit(fields, case):
    """A step of SGD moves the head by the gradient that torch computes for DeiT's formula."""
    vit, teacher, (images, labels) = student(**fields), convnet(), toy()
    features = torch.tensor(vit.features().predict(images, verbose=0))
    taught = teacher.predict(images, verbose=0)
    before = {k: v for k, v in values(vit).items() if k.startswith("head/")}
    objective = compiled(Distillation(vit, teacher, **CASES[case]))
    y = mixed(labels)
    weights = {k: torch.tensor(v, requires_grad=True) for k, v in before.items()}
    if fields:
        parts = zip(features.chunk(2, dim=1), ("class", "distillation"), strict=True)
        z = [x @ weights[f"head/{p}/kernel"] + weights[f"head/{p}/bias"] for x, p in parts]
    else:
        z = [features @ weights["head/kernel"] + weights["head/bias"]] * 2
    expected = expected_loss(*z, taught, y, CASES[case])
    expected.backward()
    assert objective.train_on_batch(images, y) == pytest.approx(expected.item(), abs=2e-6)
    after = values(vit)
    for path, weight in weights.items():
        step = (before[path] - after[path]) / 0.1
        np.testing.assert_allclose(step, weight.grad, atol=5e-6, err_msg=path)
        assert weight.grad.abs().max() > 1e-3


def test_values_worked_out_by_hand():
    objective = Distillation(student(num_classes=2), convnet(2), kind="soft", temperature=2.0)
    zeros = np.zeros((1, 2), "float32")
    # softmax(t / 2) = (3/4, 1/4); the student says (1/2, 1/2).
    taught = np.array([[2 * np.log(3), 0]], "float32")
    outputs = {"class_logits": zeros, "distillation_logits": zeros, "teacher_logits": taught}
    divergence = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)  # 0.1308
    loss = objective.image_losses(None, np.array([1]), outputs)
    expected = 0.5 * np.log(2) + 0.5 * divergence * 4 / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(loss), [expected], atol=1e-6)
    hard = Distillation(student(num_classes=2), convnet(2), alpha=0.25)
    outputs["distillation_logits"] = np.array([[np.log(3), 0]], "float32")
    loss = hard.image_losses(None, np.array([1]), outputs)
    expected = 0.75 * np.log(2) + 0.25 * np.log(4 / 3)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(loss), [expected], atol=1e-6)


def test_labels_may_be_ints_columns_or_rows():
    vit, teacher, (images, labels) = student(), convnet(), toy()
    losses = [
        compiled(Distillation(vit, teacher)).evaluate(images, y, verbose=0)
        for y in (labels, labels[:, None], np.eye(3)[labels], mixed(labels))
    ]
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])
    assert abs(losses[3] - losses[0]) > 1e-3


def test_sample_weight_hides_padding():
    objective, (images, labels) = compiled(Distillation(student(), convnet())), toy(6)
    loss = objective.evaluate(images, labels, verbose=0)
    noise = np.random.default_rng(5).normal(size=images.shape).astype("float32")
    padded = np.concatenate([images, noise]), np.concatenate([labels, labels])
    weights = np.repeat([2.0, 0.0], 6)  # Keras divides by all 12
    assert objective.evaluate(*padded, sample_weight=weights, verbose=0) == pytest.approx(loss)
    assert abs(objective.evaluate(*padded, verbose=0) - loss) > 1e-3


def test_without_labels_only_the_teacher_teaches():
    images, _ = toy()
    objective = compiled(Distillation(student(**PAIR), convnet(), alpha=1.0))
    losses = objective.fit(images, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="alpha must be 1"):
        compiled(Distillation(student(), convnet())).evaluate(images, verbose=0)


# -- the teacher


def test_teacher_runs_for_inference_and_never_learns():
    vit, teacher, (images, labels) = student(dropout=0.1), convnet(), toy()
    logits, before = teacher.predict(images, verbose=0), values(teacher)
    objective = Distillation(vit, teacher)
    heard = numbers(objective(images, training=True))["teacher_logits"]
    np.testing.assert_allclose(heard, logits, atol=1e-5)
    trained = keras.ops.convert_to_numpy(keras.ops.stop_gradient(teacher(images, training=True)))
    assert np.abs(trained - logits).max() > 1e-2
    frozen = {id(w) for w in teacher.weights}
    for flag in (None, False, True):
        if flag is not None:
            objective.trainable = flag
        trained = {id(w) for w in objective.trainable_weights}
        assert trained == {id(w) for w in vit.trainable_weights}
        assert frozen <= {id(w) for w in objective.non_trainable_weights}
    assert trained
    for path, value in before.items():  # its own training call moved the averages
        next(w for w in teacher.weights if w.path == path).assign(value)
    objective.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.1))
    objective.fit(images, labels, epochs=2, verbose=0)
    for path, value in values(teacher).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_vit_as_teacher_sees_its_own_pixels():
    vit = student()
    teacher = student(
        **dict(pixel_mean=(0.485, 0.456, 0.406), pixel_std=(0.2, 0.3, 0.25)),
        **dict(classifier_activation="softmax"),
    )
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), "uint8")
    ours, theirs = (preprocessing.preprocess(pixels, m.config) for m in (vit, teacher))
    expected = teacher.predict(theirs, verbose=0)
    heard = numbers(Distillation(vit, teacher)(ours))["teacher_logits"]
    np.testing.assert_allclose(_softmax(heard), expected, atol=2e-6)
    assert np.abs(_softmax(heard) - teacher.predict(ours, verbose=0)).max() > 1e-3


def test_vit_of_another_size_as_teacher_sees_resized_images():
    vit = student(pixel_mean=0.5, pixel_std=0.5)
    teacher = student(image_size=24, pixel_mean=0.4, pixel_std=0.25, resize_method="bicubic")
    pixels = np.random.default_rng(0).uniform(0, 1, (4, 16, 16, 3)).astype("float32")
    larger = keras.ops.image.resize(pixels, (24, 24), interpolation="bicubic", antialias=True)
    larger = keras.ops.convert_to_numpy(larger)
    expected = teacher.predict((larger - 0.4) / 0.25, verbose=0)
    heard = numbers(Distillation(vit, teacher)((pixels - 0.5) / 0.5))["teacher_logits"]
    np.testing.assert_allclose(heard, expected, atol=2e-5)


def test_teacher_preprocessing_is_applied_and_saved(tmp_path):
    images, labels = toy()
    resize = keras.Sequential([keras.layers.Resizing(8, 8), keras.layers.Rescaling(127.5, 127.5)])
    teacher = convnet(size=8)
    objective = Distillation(student(), teacher, teacher_preprocessing=resize)
    seen = keras.ops.convert_to_numpy(resize(images))
    heard = numbers(objective(images))["teacher_logits"]
    np.testing.assert_allclose(heard, teacher.predict(seen, verbose=0), rtol=1e-5, atol=1e-3)
    compiled(objective).save(tmp_path / "objective.keras")
    loaded = keras.saving.load_model(tmp_path / "objective.keras")
    loss = objective.evaluate(images, labels, verbose=0)
    assert loaded.evaluate(images, labels, verbose=0) == pytest.approx(loss, abs=1e-5)


def test_probabilities_teach_as_their_logits_do():
    vit, (images, labels) = student(), toy()
    says, thinks = convnet(activation="softmax"), convnet()
    arguments = dict(kind="soft", temperature=2.0)
    expected = compiled(Distillation(vit, thinks, **arguments)).evaluate(images, labels, verbose=0)
    objective = Distillation(vit, says, teacher_from_logits=False, **arguments)
    loss = compiled(objective).evaluate(images, labels, verbose=0)
    assert loss == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="teacher_from_logits must be False"):
        Distillation(vit, says)


class Subclassed(keras.Model):
    """A model without a graph, whose `call` does not take `training`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.drop = keras.layers.Dropout(0.5)
        self.built = True

    def call(self, images):
        return self.drop(self.inner(images))


def test_subclassed_teacher_runs_for_inference_too():
    images, inner = toy()[0], convnet()
    logits = inner.predict(images, verbose=0)
    objective = Distillation(student(), Subclassed(inner))
    heard = numbers(objective(images, training=True))["teacher_logits"]
    np.testing.assert_allclose(heard, logits, atol=1e-5)


# -- features


def features_of(model, layer, images):
    part = keras.Model(model.inputs, model.get_layer(layer).output)
    return part.predict(images, verbose=0)


def test_features_are_projected_to_the_teacher_s_width():
    vit, teacher, (images, labels) = student(), convnet(), toy()
    feature = FeatureDistillation("mse", "vector", "pooling")
    plain = compiled(Distillation(vit, teacher)).evaluate(images, labels, verbose=0)
    objective = compiled(Distillation(vit, teacher, features=feature, feature_weights=0.7))
    (dense,) = objective.projections
    kernel, bias = (keras.ops.convert_to_numpy(w) for w in (dense.kernel, dense.bias))
    assert kernel.shape == (12, 5)
    ours = features_of(vit, "pooling", images) @ kernel + bias
    theirs = features_of(teacher, "vector", images)
    expected = plain + 0.7 * ((ours - theirs) ** 2).mean()
    loss = objective.evaluate(images, labels, verbose=0)
    assert loss == pytest.approx(expected, abs=1e-5) and loss > plain + 1e-2
    objective.train_on_batch(images, labels)
    assert np.abs(keras.ops.convert_to_numpy(dense.kernel) - kernel).max() > 1e-5


def test_features_of_tokens_are_compared_on_the_grid_of_patches():
    """The student's 2 x 2 patches with a map of 4 x 4, and with the 2 x 2 patches of a ViT."""
    vit, (images, labels) = student(**PAIR), toy()
    plain = compiled(Distillation(vit, convnet())).evaluate(images, labels, verbose=0)
    teacher = convnet()
    feature = FeatureDistillation(keras.losses.MeanAbsoluteError(), "map", "encoder_block_0")
    objective = compiled(Distillation(vit, teacher, features=[feature]))
    outputs = numbers(objective(images))
    tokens = features_of(vit, "encoder_block_0", images)[:, 2:].reshape(12, 2, 2, 12)
    (dense,) = objective.projections
    kernel, bias = (keras.ops.convert_to_numpy(w) for w in (dense.kernel, dense.bias))
    np.testing.assert_allclose(outputs["student_features_0"], tokens @ kernel + bias, atol=1e-5)
    small = keras.ops.image.resize(features_of(teacher, "map", images), (2, 2), antialias=True)
    small = keras.ops.convert_to_numpy(small)
    np.testing.assert_allclose(outputs["teacher_features_0"], small, atol=1e-5)
    expected = plain + np.abs(tokens @ kernel + bias - small).mean()
    assert objective.evaluate(images, labels, verbose=0) == pytest.approx(expected, abs=1e-5)

    other = student(num_registers=1)
    feature = FeatureDistillation("cosine_similarity", "encoder_block_0", "encoder_block_0")
    objective = compiled(Distillation(vit, other, features=feature))
    assert objective.projections == [None]
    outputs = numbers(objective(images))
    theirs = features_of(other, "encoder_block_0", images)[:, 2:].reshape(12, 2, 2, 12)
    np.testing.assert_allclose(outputs["teacher_features_0"], theirs, atol=1e-5)
    ours = outputs["student_features_0"]
    norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    cosine = ((ours * theirs).sum(-1) / norms).mean()
    bare = compiled(Distillation(vit, other)).evaluate(images, labels, verbose=0)
    loss = objective.evaluate(images, labels, verbose=0)
    assert loss == pytest.approx(bare - cosine, abs=1e-5)


# -- as any Keras model


def test_fit_reports_the_student_s_accuracy_and_the_loss_falls():
    vit, (images, labels) = student(**PAIR), toy()
    objective = compiled(Distillation(vit, convnet()), 0.05, metrics=["accuracy"])
    history = objective.fit(
        images, labels, epochs=6, verbose=0, validation_data=(images, labels)
    ).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    accuracy = (vit.predict(images, verbose=0).argmax(1) == labels).mean()
    assert history["val_accuracy"][-1] == pytest.approx(accuracy)
    outputs = objective.predict(images, verbose=0)
    np.testing.assert_allclose(outputs["logits"], vit.predict(images, verbose=0), atol=1e-5)
    both = outputs["class_logits"], outputs["distillation_logits"]
    assert np.abs(both[0] - both[1]).max() > 1e-2


def test_saved_objective_trains_on(tmp_path):
    images, labels = toy()
    feature = FeatureDistillation("mse", "vector", "pooling")
    objective = Distillation(
        *(student(**PAIR), convnet()),
        **dict(kind="soft", alpha=0.3, temperature=2.0, label_smoothing=0.1, features=feature),
    )
    compiled(objective).fit(images, labels, verbose=0)
    objective.save(tmp_path / "objective.keras")
    loaded = keras.saving.load_model(tmp_path / "objective.keras")
    assert isinstance(loaded, Distillation)
    configs = [{**m.get_config(), "teacher": None} for m in (objective, loaded)]
    assert configs[0] == configs[1]
    assert len(loaded.trainable_weights) == len(objective.trainable_weights)
    losses = [m.train_on_batch(images, labels) for m in (objective, loaded)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for ours, theirs in zip(loaded.weights, objective.weights, strict=True):
        ours, theirs = (keras.ops.convert_to_numpy(w) for w in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    objective.vit.save(tmp_path / "vit.keras")
    vit = keras.saving.load_model(tmp_path / "vit.keras")
    np.testing.assert_allclose(
        vit.predict(images, verbose=0), objective.vit.predict(images, verbose=0), atol=1e-6
    )


def test_restored_variables_resume_the_run():
    data = dict(zip("xy", toy(), strict=True), batch_size=4, shuffle=False, verbose=0)
    whole, resumed = (
        compiled(Distillation(student(depth=2, drop_path=0.5), convnet())) for _ in range(2)
    )
    start = _state(whole)
    whole.fit(**data)
    middle = _state(whole)
    whole.fit(**data)
    expected = values(whole.vit)
    for seeds, same in ((middle, True), (start, False)):
        for i, (variable, value) in enumerate(zip(resumed.variables, middle, strict=True)):
            variable.assign(seeds[i] if "seed" in variable.path else value)
        resumed.fit(**data)
        differences = [np.abs(v - expected[k]).max() for k, v in values(resumed.vit).items()]
        assert (max(differences) < 1e-6) == same


def _state(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]


def test_mixed_precision_computes_the_loss_in_float32():
    images, labels = toy()
    vit, teacher = student(dtype="mixed_bfloat16", **PAIR), convnet()
    objective = compiled(
        Distillation(vit, teacher, features=FeatureDistillation("mse", "vector", "pooling"))
    )
    outputs = objective(images)
    assert {keras.backend.standardize_dtype(v.dtype) for v in outputs.values()} == {"float32"}
    # The teacher's pixels are not rounded to bfloat16.
    heard = numbers(outputs)["teacher_logits"]
    np.testing.assert_allclose(heard, teacher.predict(images, verbose=0), atol=1e-5)
    losses = objective.fit(images, labels, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


# -- what is refused


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="warm"), "kind must be"),
        (dict(alpha=1.5), "alpha must be"),
        (dict(temperature=0), "temperature must be"),
        (dict(label_smoothing=1.0), "label_smoothing must be"),
        (dict(teacher_preprocessing=3), "teacher_preprocessing must be None or callable"),
        (dict(features="mse"), "features must be one or more"),
        (dict(features=FeatureDistillation("mse", "none", "pooling")), "teacher_layer_name must"),
        (dict(features=FeatureDistillation("mse", "vector", "none")), "student_layer_name must"),
        (dict(features=FeatureDistillation("mse", "map", "pooling")), "vectors of both models"),
        (dict(features=(), feature_weights=[1.0]), "feature_weights must"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Distillation(student(), convnet(), **arguments)


@pytest.mark.backend_free
def test_models_that_cannot_teach_or_learn_are_refused():
    vit = student()
    with pytest.raises(ValueError, match="vit must be a keras_vit.ViT"):
        Distillation(convnet(), convnet())
    with pytest.raises(ValueError, match="teacher must be a built"):
        Distillation(vit, keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(ValueError, match="share no weights"):
        Distillation(vit, vit)
    with pytest.raises(ValueError, match=r"teacher must return \(None, 3\)"):
        Distillation(vit, convnet(classes=4))
    with pytest.raises(ValueError, match="teacher_preprocessing must convert"):
        Distillation(vit, convnet(size=8))
    named = student(labels=("ant", "bee", "cat"))
    Distillation(named, student(labels=("ant", "bee", "cat")))
    with pytest.raises(ValueError, match="teacher must have its classes in the order.*ant, bee"):
        Distillation(named, student(labels=("bee", "ant", "cat")))
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        Distillation(student(num_classes=0), convnet())
    with pytest.raises(ValueError, match="pooling must"):
        Distillation(student(pooling=None), convnet())
    tokens = FeatureDistillation("mse", "map", "encoder_block_0")
    with pytest.raises(ValueError, match="patch_dropout must be 0"):
        Distillation(student(patch_dropout=0.25), convnet(), features=tokens)
    adapted = student()
    adapted.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA"):
        Distillation(adapted, convnet())
    with pytest.raises(ValueError, match="loss must be None"):
        compiled(Distillation(vit, convnet()), loss="mse").evaluate(*toy(), verbose=0)


def _softmax(logits):
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)

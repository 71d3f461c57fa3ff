"""Training by a recipe: the model that is built, the number of steps, and the run folder."""

import fcntl
import json
import shutil
import zipfile
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.train import build, finish, fit, recipe
from keras_vit.train.data import batching
from keras_vit.train.distribution import devices
from keras_vit.train.distribution.devices import jit_compile
from keras_vit.train.recipe import override
from keras_vit.train.run import trained_model

SOURCE = SimpleNamespace(num_classes=3, labels=("a", "b", "c"), shape=(24, 16, 1))
TINY = {"patch_size": 8, "width": 20, "depth": 1, "num_heads": 5, "mlp_dim": 28}
DIGITS = recipe.Recipe(
    name="tiny",
    data=recipe.Data("digits"),
    model=recipe.Model(
        config={"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 24}
    ),
    run=recipe.Run(batch_size=50, steps=3),
    optimizer=recipe.Optimizer(learning_rate=0.01),
    evaluation=recipe.Evaluation(batch_size=100),
)


def tiny(**changes):
    model = recipe.Model(**{"config": TINY, **changes})
    return recipe.Recipe("tiny", recipe.Data("digits"), model, recipe.Run(4, steps=10))


def values(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


@pytest.fixture
def without_figures(monkeypatch):
    """A run without the figures of its report, which `finished` has; JAX compiles them for long."""
    monkeypatch.setattr(finish.report_figures, "draw", lambda *_: [])


# -- the model


@pytest.mark.backend_free
def test_data_determines_classes_labels_channels_and_size():
    config = build.build_model(tiny(), SOURCE).config
    assert (config.num_classes, config.labels) == (3, ("a", "b", "c"))
    assert config.input_shape == (24, 16, 1) and config.width == 20
    config = build.build_model(tiny(config={**TINY, "image_size": 32}), SOURCE).config
    assert config.input_shape == (32, 32, 1)
    varied = SimpleNamespace(num_classes=3, labels=None, shape=(None, None, 3))
    config = build.build_model(tiny(), varied).config
    assert config.input_shape == (224, 224, 3) and config.labels is None


@pytest.mark.backend_free
def test_variant_keeps_its_size_and_accepts_fields():
    wanted = tiny(variant="vit_ti16", config={"patch_size": 8, "depth": 1})
    model = build.build_model(wanted, SOURCE)
    assert (model.config.width, model.config.depth) == (192, 1)
    assert model.config.image_size == (24, 16)
    with pytest.raises(ValueError, match=r"model\.variant must be one of vit_ti16.*vit_b61"):
        build.build_model(tiny(variant="vit_b61"), SOURCE)


@pytest.mark.backend_free
def test_pretrained_weights_keep_their_size_and_get_a_new_head(tmp_path):
    start = keras_vit.ViT(keras_vit.ViTConfig(**TINY, image_size=(16, 24), num_classes=7))
    path = keras_vit.save_pretrained(start, tmp_path / "start", format="huggingface")
    model = build.build_model(tiny(weights=str(path), config={}), SOURCE)
    assert model.config.input_shape == (16, 24, 1) and model.config.num_classes == 3
    assert model.config.labels == ("a", "b", "c")
    name = "encoder_block_0/mlp/dense_1/kernel"
    np.testing.assert_array_equal(values(model)[name], values(start)[name])
    scratch = build.build_model(tiny(), SOURCE)
    assert np.abs(values(scratch)[name] - values(start)[name]).max() > 0.01


@pytest.mark.backend_free
def test_precision_becomes_the_dtype_policy():
    bfloat16 = override(tiny(), ["run.precision=mixed_bfloat16"])
    assert build.build_model(bfloat16, SOURCE).dtype_policy.name == "mixed_bfloat16"
    assert build.build_model(tiny(), SOURCE).dtype_policy.name == "float32"


def test_build_model_can_compute_blocks_again():
    for setting, again in (("run.remat=true", True), ("run.remat=false", False)):
        model = build.build_model(override(tiny(), [setting]), SOURCE)
        assert all(("call" in block.__dict__) == again for block in model.blocks)


def test_each_method_trains_its_own_weights():
    full, probe, lora = (
        {w.path for w in build.build_model(tiny(method=m, lora_rank=2), SOURCE).trainable_weights}
        for m in ("full", "linear_probe", "lora")
    )
    assert probe == {"head/kernel", "head/bias"}
    assert len(full) > 10 and probe < full
    # Keras' LoRA keeps the bias of an adapted layer trainable.
    names = {path.rsplit("/", 2)[-1] for path in lora - probe}
    assert names == {"lora_kernel_a", "lora_kernel_b", "bias"} and probe < lora
    assert all("/query/" in path or "/value/" in path for path in lora - probe)


# -- the loss and compile


def by_hand(y, z, smoothing=0.0):
    y = y * (1 - smoothing) + smoothing / y.shape[-1]
    return -(y * -np.log1p(np.exp(-z)) + (1 - y) * -np.log1p(np.exp(z))).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sigmoid_loss_is_the_sum_over_classes(smoothing):
    rng = np.random.default_rng(0)
    y, z = np.eye(7)[[0, 3, 6]].astype("float32"), rng.normal(size=(3, 7)).astype("float32")
    loss = build.SigmoidCrossentropy(smoothing)
    got = float(loss(y, z))
    np.testing.assert_allclose(got, by_hand(y, z, smoothing).mean(), rtol=1e-5)
    keras_mean = float(keras.losses.BinaryCrossentropy(from_logits=True)(y, z))
    assert (abs(got - 7 * keras_mean) < 1e-4) == (smoothing == 0)
    again = build.SigmoidCrossentropy.from_config(loss.get_config())
    assert again.label_smoothing == smoothing


def test_compile_follows_the_recipe():
    model = build.build_model(tiny(), SOURCE)
    build.compile_model(model, override(tiny(), ["loss.label_smoothing=0.1"]), 10)
    assert isinstance(model.loss, keras.losses.CategoricalCrossentropy)
    assert model.loss.get_config()["label_smoothing"] == 0.1
    y = np.eye(3, dtype="float32")
    logs = model.evaluate(np.zeros((3, 24, 16, 1), "float32"), y, return_dict=True, verbose=0)
    assert set(logs) == {"loss", "accuracy"}  # no top 5 of three classes
    seven = SimpleNamespace(num_classes=7, labels=None, shape=(24, 16, 1))
    model = build.build_model(tiny(), seven)
    build.compile_model(model, override(tiny(), ["loss.name=sigmoid", "run.jit_compile=false"]), 10)
    assert isinstance(model.loss, build.SigmoidCrossentropy) and model.jit_compile is False
    y = np.eye(7, dtype="float32")
    logs = model.evaluate(np.zeros((7, 24, 16, 1), "float32"), y, return_dict=True, verbose=0)
    assert set(logs) == {"loss", "accuracy", "top5"}


def test_jit_compile_is_off_only_where_it_is_slower(monkeypatch):
    assert jit_compile(True) is True and jit_compile(False) is False
    monkeypatch.setattr(devices, "accelerators", lambda: [])
    on_tensorflow = keras.backend.backend() == "tensorflow"
    assert jit_compile() == (False if on_tensorflow else "auto")
    monkeypatch.setattr(devices, "accelerators", lambda: ["GPU:0"])
    assert jit_compile() == "auto"


# -- the length


@pytest.mark.backend_free
def test_epochs_add_up_to_the_steps():
    for steps in (1, 2, 7, 10, 269, 1796):
        for examples, batch in ((1437, 32), (10, 10), (50, 7), (1_281_167, 1024)):
            epochs, each = fit.epochs_of(steps, examples, batch)
            assert (epochs - 1) * each < steps <= epochs * each
    assert fit.epochs_of(1796, 1437, 32) == (40, 45)  # 40 epochs
    assert fit.epochs_of(12, 50, 7, multiple=4) == (2, 8)
    with pytest.raises(ValueError, match="must divide the 13 steps.*run.steps be set to 12"):
        fit.epochs_of(13, 50, 7, multiple=4)


class Count(keras.callbacks.Callback):
    """Records after each epoch the steps so far, whether it was evaluated, and the weights."""

    def __init__(self):
        super().__init__()
        self.steps, self.evaluated, self.weights = [], [], []

    def on_epoch_end(self, epoch, logs=None):
        self.steps.append(int(self.model.optimizer.iterations))
        self.evaluated.append("val_loss" in logs)
        self.weights.append(values(self.model))


@pytest.mark.usefixtures("without_figures")
def test_steps_and_evaluations_follow_the_recipe(tmp_path):
    count = Count()
    wanted = override(DIGITS, ["run.batch_size=600", "run.steps=9", "evaluation.every=3"])
    fit.train(wanted, tmp_path, verbose=0, callbacks=[count])
    assert count.steps == [3, 6, 9]  # 2.4 batches an epoch are rounded up to three
    assert count.evaluated == [False, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_steps_per_execution_and_a_short_last_epoch(tmp_path):
    count = Count()
    wanted = override(DIGITS, ["run.batch_size=500", "run.steps=10", "run.steps_per_execution=2"])
    fit.train(wanted, tmp_path, verbose=0, callbacks=[count])
    assert count.steps == [4, 8, 10] and all(count.evaluated)


# -- the run folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run with every file, its recipe, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "new" / "run"
    wanted = override(
        DIGITS, ["run.steps=60", "run.batch_size=48", "evaluation.few_shot=[5]", "data.path=null"]
    )
    return folder, wanted, fit.train(wanted, folder, verbose=0)


def test_run_writes_its_folder(finished):
    folder, wanted, reached = finished
    names = {p.name for p in folder.iterdir()}
    files = {"recipe.json", "log.jsonl", "report.md", "curves.png", "confusion.png"}
    files |= {f"{name}.png" for name in ("rollout", "features", "distance", "filters", "positions")}
    assert names == files | {"model.keras", "results.json", "logs", "checkpoints", "lock"}
    assert recipe.Recipe.from_file(folder / "recipe.json") == wanted
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert len(log) == 2 and {"learning_rate", "images_per_second", "val_top5"} < set(log[0])
    assert log[-1]["learning_rate"] == pytest.approx(0, abs=1e-6)
    assert log[-1]["val_accuracy"] == pytest.approx(reached["top1"], abs=1e-6)
    assert log[-1]["val_top5"] == pytest.approx(reached["top5"], abs=0.01)
    assert 0.1 < reached["few_shot"]["few_shot_5"] <= 1
    text = (folder / "report.md").read_text()
    assert f"{reached['top1']:.2%}" in text and "5 images a class" in text
    assert list((folder / "logs").rglob("events.*"))


def test_saved_model_does_not_need_the_training_library(finished):
    folder, _, reached = finished
    with zipfile.ZipFile(folder / "model.keras") as archive:
        assert b"training." not in archive.read("config.json")
    model = keras.saving.load_model(folder / "model.keras")
    assert type(model) is keras_vit.ViT and model.dtype_policy.name == "float32"
    assert model.config.labels == tuple("0123456789")
    tests = batching.test_batches(fit.open_source(recipe.Data("digits")).test, model.config, 77, 10)
    logs = model.evaluate(tests, return_dict=True, verbose=0)
    assert logs["accuracy"] == pytest.approx(reached["top1"], abs=1e-6)
    untrained = keras_vit.ViT(model.config)
    assert np.abs(values(untrained)["head/kernel"] - values(model)["head/kernel"]).max() > 1e-3


@pytest.mark.usefixtures("without_figures")
def test_average_is_evaluated_and_saved(tmp_path):
    """Each epoch is one step, so every step's weights are known; NumPy averages them again."""
    count = Count()
    settings = ["run.batch_size=1437", "run.steps=4", "optimizer.ema_momentum=0.6"]
    fit.train(override(DIGITS, settings), tmp_path, verbose=0, callbacks=[count])
    assert count.steps == [1, 2, 3, 4]
    average = count.weights[0]
    for later in count.weights[1:]:
        average = {k: 0.6 * average[k] + 0.4 * later[k] for k in average}
    model = keras.saving.load_model(tmp_path / "model.keras")
    for path, value in values(model).items():
        np.testing.assert_allclose(value, average[path], atol=2e-6, err_msg=path)
    moved = [np.abs(average[k] - count.weights[-1][k]).max() for k in average]
    assert max(moved) > 1e-3
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    tests = batching.test_batches(
        fit.open_source(recipe.Data("digits")).test, model.config, 100, 10
    )
    loss = model.evaluate(tests, return_dict=True, verbose=0)["loss"]
    assert last["val_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("method", ["lora", pytest.param("linear_probe", marks=pytest.mark.slow)])
def test_frozen_weights_stay_and_adapters_are_merged(method, tmp_path):
    trained = []

    class Keep(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.before = values(self.model)

        def on_train_end(self, logs=None):
            trained.append(self.model)

    keep = Keep()
    settings = ["run.steps=3", f"model.method={method}", "run.precision=mixed_bfloat16"]
    wanted = override(DIGITS, [*settings, "model.config.head_init=truncated_normal"])
    fit.train(wanted, tmp_path, verbose=0, callbacks=[keep])
    model = keras.saving.load_model(tmp_path / "model.keras")
    after = values(model)
    changed = {k for k, v in after.items() if np.abs(v - keep.before[k]).max() > 0}
    adapted = {
        f"encoder_block_0/attention/{layer}/{weight}"
        for layer in ("query", "value")
        for weight in ("kernel", "bias")
    }
    assert changed == {"head/kernel", "head/bias"} | (adapted if method == "lora" else set())
    assert model.dtype_policy.name == "float32" and not any("lora" in k for k in after)
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype("float32")
    wanted, got = (keras.ops.convert_to_numpy(m(x)) for m in (trained[0], model))
    np.testing.assert_allclose(got, wanted, atol=0.05)  # bfloat16 against float32
    assert np.abs(got).max() > 0.1


def test_file_with_other_predictions_does_not_replace_the_old_one(tmp_path, monkeypatch):
    model = build.build_model(tiny(config={**TINY, "head_init": "truncated_normal"}), SOURCE)
    other = build.build_model(tiny(config={**TINY, "head_init": "truncated_normal"}), SOURCE)
    batches = [(np.ones((2, 24, 16, 1), "float32"), None)]
    again = trained_model.save_model(model, tmp_path / "m.keras", "sigmoid", batches)
    assert again.loss.name == "binary_crossentropy"
    before = (tmp_path / "m.keras").read_bytes()
    monkeypatch.setattr(keras.saving, "load_model", lambda path: other)
    with pytest.raises(RuntimeError, match="outputs differ from the trained one's"):
        trained_model.save_model(model, tmp_path / "m.keras", "softmax", batches)
    assert [p.name for p in tmp_path.iterdir()] == ["m.keras"]
    assert (tmp_path / "m.keras").read_bytes() == before


# -- checks before training


@pytest.mark.backend_free
def test_folder_with_other_contents_is_refused(tmp_path):
    (tmp_path / "model.keras").write_text("precious")
    with pytest.raises(FileExistsError, match=r"workdir must be .* which holds model\.keras"):
        fit.train(DIGITS, tmp_path)
    assert (tmp_path / "model.keras").read_text() == "precious"


@pytest.mark.backend_free
def test_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="workdir must be a folder that can be written"):
        fit.train(DIGITS, tmp_path / "file" / "run")


@pytest.mark.backend_free
def test_batch_larger_than_the_data_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="1 to the 1437 training samples.*batch_size=2000"):
        fit.train(override(DIGITS, ["run.batch_size=2000"]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "name",
    [
        "run.steps",
        "run.steps_per_execution",
        "evaluation.batch_size",
        "evaluation.every",
        "evaluation.few_shot",
    ],
)
def test_zero_is_an_error(name, tmp_path):
    value = "[5,0]" if name == "evaluation.few_shot" else "0"
    with pytest.raises(ValueError, match=f"{name} must be at least 1. Received: {name}=0"):
        fit.train(override(DIGITS, [f"{name}={value}"]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
def test_full_disk_is_detected_before_training(tmp_path, monkeypatch):
    usage = SimpleNamespace(total=10**9, used=10**9, free=1000)
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="MB of free space"):
        fit.train(DIGITS, tmp_path)
    assert not list(tmp_path.iterdir())


# -- resuming


@pytest.mark.usefixtures("without_figures")
def test_extended_run_that_is_interrupted_at_once_is_not_finished(finished, tmp_path):
    folder, wanted, _ = finished
    copy = shutil.copytree(folder, tmp_path / "copy")
    longer = override(wanted, ["run.steps=90"])

    class Cut(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit.train(longer, copy, accept_changes=True, verbose=0, callbacks=[Cut()])
    assert not (copy / "results.json").exists()
    count = Count()
    assert fit.train(longer, copy, verbose=0, callbacks=[count])["steps"] == 90
    assert count.steps[-1] == 90


def test_other_batch_size_is_refused_and_changes_nothing(finished):
    folder, wanted, reached = finished
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    other = override(wanted, ["run.batch_size=24", "run.steps=120"])
    with pytest.raises(ValueError, match=r"run\.batch_size must stay 48 .*run\.batch_size=24"):
        fit.train(other, folder, accept_changes=True, verbose=0)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    for lock in (folder / "lock", folder / "checkpoints" / "lock"):
        with lock.open() as file:  # released, although the run ended with an error
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert fit.train(wanted, folder)["top1"] == reached["top1"]

"""Runs by recipes whose objective is another than labels: what they train, log, save and report."""

import dataclasses
import json
import zipfile
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from PIL import Image

import keras_vit
from keras_vit.train import DINO, MAE, Distillation, build, evaluate_knn, fit, recipe
from keras_vit.train.data import batching
from keras_vit.train.data.multi_crop_batching import multi_crop_batches
from keras_vit.train.data.sources import open_source
from keras_vit.train.recipe import override
from keras_vit.train.run import objective_figures

CONFIG = {"patch_size": 2, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 24}
MAE_RUN = recipe.Recipe(
    name="tiny_mae",
    data=recipe.Data("digits"),
    model=recipe.Model(config={**CONFIG, "pooling": "mean", "class_token": False}),
    run=recipe.Run(batch_size=100, steps=28),
    optimizer=recipe.Optimizer(learning_rate=0.01, weight_decay=0.05),
    objective=recipe.Objective(
        "mae", {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
    ),
    evaluation=recipe.Evaluation(batch_size=100, knn=300),
)
VIEWS = {"local_size": 8, "local_crops": 2, "num_prototypes": 12, "hidden_dim": 16}
DINO_RUN = dataclasses.replace(
    MAE_RUN,
    name="tiny_dino",
    model=recipe.Model(config={**MAE_RUN.model.config, "image_size": 16, "patch_size": 4}),
    run=recipe.Run(batch_size=50, steps=4),
    objective=recipe.Objective("dino", {**VIEWS, "bottleneck_dim": 8}),
)


def values(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


def digits():
    return open_source(recipe.Data("digits"))


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def without_figures(monkeypatch):
    monkeypatch.setattr(fit.finish.report_figures, "draw", lambda *_: [])
    monkeypatch.setattr(fit.finish.objective_figures, "draw", lambda *_: [])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of MAE, its results, and what it said."""
    folder, said = tmp_path_factory.mktemp("run"), []
    with pytest.MonkeyPatch.context() as patch:  # of its figures, those of objectives alone
        patch.setattr(fit.finish.report_figures, "draw", lambda *_: [])
        reached = fit.train(MAE_RUN, folder, verbose=0, say=said.append)
    return folder, reached, "\n".join(said)


def test_run_without_labels_reports_loss_and_neighbors(finished):
    folder, reached, said = finished
    assert json.loads((folder / "results.json").read_text()) == reached
    assert reached["steps"] == 28 and "top1" not in reached
    lines = log(folder)
    assert len(lines) == 2 and "accuracy" not in lines[0]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert lines[-1]["val_loss"] == pytest.approx(reached["val_loss"], rel=1e-4)
    assert 0.2 < lines[-1]["val_knn"] <= 1 and 0.2 < reached["knn"] <= 1
    assert f"k-NN accuracy {reached['knn']:.2%}" in said and "objective.keras" in said
    text = (folder / "report.md").read_text()
    assert f"{reached['knn']:.2%}" in text and f"{reached['val_loss']:.5g}" in text
    assert "Mistakes" not in text and f"model.weights={folder}/model.keras" in text
    assert "![Loss, k-NN accuracy and learning rate](curves.png)" in text
    for name in ("curves", "reconstructions", "neighbors"):
        assert f"({name}.png)" in text
        picture = np.asarray(Image.open(folder / f"{name}.png").convert("L"))
        assert picture.shape[0] > 200 and len(np.unique(picture)) > 20


def test_saved_files_are_the_plain_vit_and_the_objective(finished):
    folder, reached, _ = finished
    with zipfile.ZipFile(folder / "model.keras") as archive:
        assert b"train" not in archive.read("config.json").replace(b"trainable", b"")
    vit = keras.saving.load_model(folder / "model.keras")
    assert type(vit) is keras_vit.ViT and vit.config.num_classes == 0 and vit.config.labels is None
    mae = keras.saving.load_model(folder / "objective.keras")
    assert type(mae) is MAE and mae.decoder_width == 16
    for path, value in values(vit).items():
        np.testing.assert_array_equal(value, values(mae.vit)[path])
    source = digits()
    train, test = (
        batching.test_batches(split, vit.config, 100, 10) for split in (source.train, source.test)
    )
    mae.compile()
    loss = mae.evaluate(test, return_dict=True, verbose=0)["loss"]
    assert loss == pytest.approx(reached["val_loss"], rel=1e-5)
    assert evaluate_knn(vit, train, test) == pytest.approx(reached["knn"])
    # The negative control: a ViT that was not trained.
    assert evaluate_knn(keras_vit.ViT(vit.config), train, test) != pytest.approx(reached["knn"])


@pytest.mark.usefixtures("without_figures")
def test_fine_tuning_starts_from_the_run_folder(finished, tmp_path):
    folder, _, _ = finished
    settings = [f"model.weights={folder}/model.keras", "run.steps=1", "optimizer.learning_rate=0"]
    labels = dataclasses.replace(MAE_RUN, objective=recipe.Objective(), name="fine")
    labels = override(labels, [*settings, "model.config={}", "optimizer.weight_decay=0"])
    reached = fit.train(labels, tmp_path, verbose=0)
    assert 0 <= reached["top1"] <= 1
    before, after = (
        values(keras.saving.load_model(path / "model.keras")) for path in (folder, tmp_path)
    )
    assert after.keys() - before.keys() == {"head/kernel", "head/bias"}
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value)


@pytest.mark.sampled(cases=0)  # the data is TensorFlow's on every backend
@pytest.mark.usefixtures("without_figures")
def test_folder_of_images_without_classes(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(30):
        path = tmp_path / "pictures" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 8 + i % 3, 3), dtype=np.uint8)).save(path)
    settings = ["data.source=folder", "data.train=.[:80%]", "data.test=.[80%:]", "run.steps=2"]
    settings += ["run.batch_size=5", "model.config.image_size=8"]
    wanted = override(MAE_RUN, settings)
    reached = fit.train(wanted, tmp_path / "run", data=tmp_path / "pictures", verbose=0)
    assert reached["val_loss"] > 0 and "knn" not in reached
    assert "val_knn" not in log(tmp_path / "run")[-1]
    with pytest.raises(ValueError, match=r"evaluation\.few_shot must be \(\) for images without"):
        fit.train(
            override(wanted, ["evaluation.few_shot=[1]"]),
            tmp_path / "other",
            data=tmp_path / "pictures",
        )


@pytest.mark.sampled(cases=0)  # test_masked.py trains both on every backend
@pytest.mark.parametrize("name", ["simmim", "masked_patches"])
def test_other_masked_objectives(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fit.finish.report_figures, "draw", lambda *_: [])
    settings = [f"objective.name={name}", "objective.options={}", "run.steps=2", "evaluation.knn=0"]
    reached = fit.train(override(MAE_RUN, settings), tmp_path, verbose=0)
    assert reached["val_loss"] > 0 and "knn" not in reached and "val_knn" not in log(tmp_path)[0]
    text = (tmp_path / "report.md").read_text()
    assert "![Loss and learning rate](curves.png)" in text and "(neighbors.png)" in text
    assert ("(reconstructions.png)" in text) == (name == "simmim")  # the other predicts colors


@pytest.mark.sampled(cases=0)  # MAE is run on every backend, and test_dino.py trains on each
@pytest.mark.usefixtures("without_figures")
def test_dino_trains_on_views_and_saves_the_teacher(tmp_path):
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            kept.append(self.model)

    reached = fit.train(DINO_RUN, tmp_path, verbose=0, callbacks=[Keep()])
    assert type(kept[0]) is DINO and kept[0].steps == 4
    teacher = values(kept[0].update_teacher())
    vit = keras.saving.load_model(tmp_path / "model.keras")
    saved = values(vit)
    for path, value in teacher.items():
        np.testing.assert_allclose(saved[path], value, atol=1e-7)
    student = values(kept[0].vit)
    assert max(np.abs(student[path] - saved[path]).max() for path in saved) > 1e-4
    assert 0 < reached["knn"] <= 1 and reached["val_loss"] > 0
    source = digits()
    tests = dataclasses.replace(source, train=source.test)
    views = multi_crop_batches(tests, vit.config, 100, 0, local_size=8, local_crops=2).take(3)
    loss = kept[0].evaluate(views, return_dict=True, verbose=0)["loss"]
    assert reached["val_loss"] == pytest.approx(loss, rel=1e-4)
    # The run logs it before the last update of the teacher.
    assert log(tmp_path)[-1]["val_loss"] == pytest.approx(loss, rel=0.3)
    with pytest.raises(ValueError, match="augment must be left out for objective.name='dino'"):
        fit.train(override(DINO_RUN, ["augment.flip=true"]), tmp_path / "other")


@pytest.mark.backend_free
def test_the_best_epoch_of_views_is_told_by_neighbors_alone():
    def monitor(run, replicas=1, settings=()):
        run, devices = override(run, settings), SimpleNamespace(replicas=replicas)
        return fit.RunPlan(run, digits(), devices, None, 1, 1, 1).monitor

    assert monitor(DINO_RUN) == "val_knn" and monitor(MAE_RUN) == "val_loss"
    assert monitor(DINO_RUN, replicas=2) is None  # no neighbors are sought on several devices
    assert monitor(DINO_RUN, settings=["evaluation.knn=0"]) is None
    assert monitor(MAE_RUN, replicas=2) == "val_loss"


@pytest.mark.sampled(cases=0)  # test_distillation.py trains on every backend
@pytest.mark.usefixtures("without_figures")
def test_distillation_reads_its_teacher_and_reports_accuracy(tmp_path):
    teacher = keras_vit.ViT(
        keras_vit.ViTConfig(**CONFIG, image_size=8, in_channels=1, num_classes=10)
    )
    teacher.save(tmp_path / "teacher.keras")
    settings = [f"objective.teacher={tmp_path}/teacher.keras", "objective.options={}"]
    settings += ["objective.name=distillation", "objective.options.kind=soft", "run.steps=3"]
    wanted = override(MAE_RUN, [*settings, "objective.options.alpha=0.3"])
    wanted = override(wanted, ["loss.label_smoothing=0.1"])
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kept.append(self.model)
            kept.append(values(self.model.vit))

    reached = fit.train(wanted, tmp_path / "run", verbose=0, callbacks=[Keep()])
    assert type(kept[0]) is Distillation
    assert (kept[0].kind, kept[0].alpha, kept[0].label_smoothing) == ("soft", 0.3, 0.1)
    line = log(tmp_path / "run")[-1]
    assert line["val_accuracy"] == pytest.approx(reached["top1"], abs=1e-6)
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert type(model) is keras_vit.ViT and model.config.num_classes == 10
    still = [path for path, value in values(model).items() if np.array_equal(value, kept[1][path])]
    assert not still  # the head is trained too
    assert not (tmp_path / "run" / "objective.keras").exists()


def test_weights_of_decoder_and_head_decay_as_those_of_the_vit():
    source = digits()
    for one, parts in ((MAE_RUN, {"decoder"}), (DINO_RUN, {"head"})):
        model = build.build_objective(build.build_model(one, source), one, 10)
        build.compile_model(model, one, 10)
        decayed = {
            v.path for v in model.trainable_variables if model.optimizer._use_weight_decay(v)
        }
        kernels = {v.path for v in model.trainable_variables if "kernel" in v.name}
        others = {v.path for v in model.trainable_variables} - kernels
        assert decayed == kernels and others
        for part in parts:
            assert any(part in path.split("/") for path in kernels), sorted(kernels)


def test_layer_decay_leaves_the_decoder_as_it_is():
    wanted = override(MAE_RUN, ["optimizer.layer_decay=0.5"])
    model = build.build_objective(build.build_model(wanted, digits()), wanted, 10)
    build.compile_model(model, wanted, 10)
    factors = model.optimizer.factors
    assert {factors[w.path] for w in model.decoder.weights} == {1.0}
    assert factors[model.vit.get_layer("patches").weights[0].path] == 0.25
    block = model.vit.blocks[0].weights[0].path
    assert factors[block] == 0.5


@pytest.mark.backend_free
def test_objectives_train_all_weights():
    wanted = override(MAE_RUN, ["model.method=lora"])
    with pytest.raises(ValueError, match=r"model\.method must be 'full' for objective\.name='mae'"):
        build.build_model(wanted, digits())


@pytest.mark.backend_free
def test_gallery_is_read_twice_and_gives_the_pictures_that_were_found():
    """A picture of the gallery is its own nearest neighbor."""
    source = digits()
    vit = keras_vit.ViT(
        keras_vit.ViTConfig(
            **CONFIG, image_size=8, in_channels=1, num_classes=0, pooling="mean", class_token=False
        )
    )
    train = objective_figures.subset(source.train, 70)
    found = objective_figures._pick(train, {3, 60}, vit.config)
    assert set(found) == {3, 60}
    np.testing.assert_array_equal(found[60].pixels[..., 0], train.images.numpy()[60, ..., 0])

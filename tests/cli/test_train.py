"""`keras-vit train` as a user calls it, on the digits with a tiny model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from keras_vit import train
from keras_vit.train.run import run_folder, run_status

ROOT = Path(__file__).parents[2]


def test_train_prints_its_progress_and_its_files(trained, printed):
    out = printed
    assert "1,437 training and 360 test images of 10 classes" in out
    assert "4 steps of 700 in 2 epochs" in out and keras.backend.backend() in out
    assert "Test: top-1" in out and f"{trained}/model.keras" in out
    assert "\x08" not in out and "━" not in out  # no progress bar outside a terminal
    assert sum("val_accuracy" in line for line in out.splitlines()) == 2


@pytest.mark.backend_free
def test_quiet_train_prints_nothing(call, digits, tmp_path):
    code, out, _ = call(*digits(tmp_path / "run", "--quiet"))
    assert (code, out) == (0, "") and (tmp_path / "run" / "report.md").is_file()


@pytest.mark.backend_free
def test_preview_draws_and_ends(call, tmp_path):
    path = tmp_path / "digits.png"
    code, out, _ = call("train", "--recipe", "digits", "--preview", path)
    assert (code, out) == (0, f"wrote {path}\n") and path.stat().st_size > 1000
    code, _, err = call("train", "--preview", path)
    assert code == 2 and "--recipe or --data is required" in err


@pytest.mark.backend_free
def test_list_has_every_recipe(call):
    code, out, _ = call("train", "--list")
    lines = out.splitlines()
    files = {path.stem for path in (ROOT / "training").glob("recipes/*.py")}
    assert code == 0
    assert {line.split()[0] for line in lines} == files and len(files) > 10
    (line,) = (line for line in lines if line.startswith("digits "))
    assert line.split(maxsplit=1)[1].startswith("Handwritten digits")


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--recipe", "digit"], "near: digits"),
        (["--recipe", "none.py"], "recipe must be a file that exists. Received: 'none.py'"),
        (["--set", "optimizer.learning_rat=1"], "near: learning_rate"),
        (["--set", "run.batch_size=9999"], "1 to the 1437 training samples"),
        (["--set", "data.source=digit"], "data.source must be"),
        (["--set", "model.config.width=15"], "num_heads must divide width=15"),
        (["--set", "data.source=folder", "--data", "/no/such/place"], "/no/such/place"),
    ],
)
def test_train_refuses_in_one_line(call, digits, change, words, tmp_path):
    code, out, err = call(*digits(tmp_path / "run", *change))
    assert (code, out) == (1, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("keras-vit: error: ") and words in last
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.backend_free
def test_unknown_recipe_lists_all(call, tmp_path):
    code, _, err = call("train", "--recipe", "zzz", "--workdir", tmp_path)
    assert code == 1 and all(name in err for name in train.list_recipes())


@pytest.mark.backend_free
def test_recipe_may_be_a_file(call, tmp_path):
    source = (ROOT / "training/recipes/digits.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("def digits(", "def mine("))
    options = ("--recipe", tmp_path / "mine.py", "--workdir", tmp_path / "run")
    code, _, err = call("train", *options, "--set", "run.batch_size=9999")
    assert code == 1 and "1 to the 1437 training samples" in err


@pytest.mark.backend_free
def test_finished_run_is_not_changed(call, digits, trained):
    folder = trained
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    code, out, _ = call(*digits(folder))
    assert code == 0
    assert "top-1" in out and "finished before" in out
    code, _, err = call(*digits(folder, "--no-resume"))
    assert code == 1 and "which holds checkpoints, confusion.png, curves.png" in err
    code, _, message = call(*digits(folder, "--set", "run.seed=5"))
    assert code == 1
    assert "--accept-changes" in message and "run.seed: 0 -> 5" in message
    fewer = ["--set", "run.steps=3", "--accept-changes"]
    code, _, err = call(*digits(folder, *fewer))
    assert code == 1 and "run.steps must be at least 4, where 4 are done" in err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.sampled(cases=0)  # test_fit.py extends a run on every backend
def test_finished_run_can_be_extended(call, trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    log = (copy / "log.jsonl").read_text()
    # A new run of 9 steps would have epochs of 3 steps; this one keeps its epochs of 2.
    more = ["--workdir", str(copy), "--set", "run.steps=9", "--accept-changes"]
    code, out, _ = call("train", *more)  # the folder has the recipe
    assert code == 0
    assert "9 steps of 700 in 5 epochs" in out and "resumes at step 4, in epoch 3" in out
    assert "finished before" not in out
    longer = (copy / "log.jsonl").read_text()
    assert longer.startswith(log) and len(longer.splitlines()) == 5
    assert json.loads((copy / "recipe.json").read_text())["run"]["steps"] == 9
    assert json.loads((copy / "results.json").read_text())["steps"] == 9
    assert run_status.read_run(copy)["position"]["steps_per_epoch"] == 2


@pytest.mark.backend_free
def test_finished_run_restores_missing_files(call, trained, tmp_path, caplog, monkeypatch):
    copy = shutil.copytree(trained, tmp_path / "copy")
    log, results = (copy / "log.jsonl").read_bytes(), (copy / "results.json").read_text()
    wanted = run_folder.read_results(copy)
    (copy / "results.json").write_text(results[:9])
    assert run_folder.read_results(copy) is None and "results.json cannot be read" in caplog.text
    (copy / "results.json").write_text(results)
    (copy / "model.keras").unlink()
    monkeypatch.setenv("COLUMNS", "400")
    code, out, err = call("train", "--workdir", copy)
    assert code == 0 and "resumes at step 4" in out
    created = "model.keras is missing, and is created again"
    assert created in err and created not in caplog.text  # nor does the root logger print it
    got = run_folder.read_results(copy)
    assert got.keys() == wanted.keys() and got["seconds"] > 0
    assert wanted == {**got, "seconds": wanted["seconds"]}
    assert (copy / "log.jsonl").read_bytes() == log
    models = (keras.saving.load_model(one / "model.keras") for one in (trained, copy))
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.backend_free
def test_damaged_recipe_is_restored_from_the_newest_checkpoint(
    call, trained, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    copy = shutil.copytree(trained, tmp_path / "copy")
    wanted = (copy / "recipe.json").read_text()
    (copy / "recipe.json").write_text(wanted[:50])
    (copy / "results.json").unlink()
    code, _, err = call("train", "--workdir", copy)
    assert code == 0
    assert "recipe.json cannot be read as a recipe" in err and "ckpt-00" in err
    assert (copy / "recipe.json").read_text() == wanted
    (copy / "recipe.json").write_text("[]")
    shutil.rmtree(copy / "checkpoints")
    code, _, err = call("train", "--workdir", copy)
    assert code == 1 and "copy/recipe.json cannot be read as a recipe" in err


@pytest.mark.backend_free
@pytest.mark.parametrize("options", [["--recipe", "digits"], ["--workdir", "x"], ["--nonsense"]])
def test_usage_error_of_train_is_exit_code_2(call, options):
    code, out, err = call("train", *options)
    assert (code, out) == (2, "") and "Usage: keras-vit train" in err


@pytest.mark.backend_free
def test_interrupted_train_is_exit_code_130(call, digits, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupt)
    code, out, err = call(*digits(tmp_path / "run"))
    assert (code, out, err) == (130, "", "\nkeras-vit: stopped\n")


@pytest.mark.backend_free
def test_programs_of_a_checkout_are_the_commands():
    for name, text in (("train", "Train a model by a recipe"), ("evaluate", "Measure top-1")):
        command = [sys.executable, "-m", f"training.{name}", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert f"Usage: keras-vit {name}" in done.stdout and text in done.stdout


MAE = ("objective.name=mae", "model.config.patch_dropout=0", "model.config.patch_size=2") + tuple(
    f"objective.options.decoder_{field}" for field in ("width=16", "depth=1", "heads=2")
)


@pytest.mark.sampled(cases=0)  # test_objective_runs.py does it on every backend
def test_train_without_labels_evaluate_and_fine_tune(call, digits, tmp_path):
    """MAE on the digits, its features, and a classifier that begins with them."""
    sets = [part for setting in MAE for part in ("--set", setting)]
    run = tmp_path / "mae"
    code, out, err = call(*digits(run, *sets, "--set", "objective.options.mask_ratio=0.6"))
    assert code == 0, err
    assert "digits (mae): " in out and "Test: loss " in out and "k-NN accuracy" in out
    assert (
        json.loads((run / "recipe.json").read_text())["objective"]["options"]["mask_ratio"] == 0.6
    )
    reached = json.loads((run / "results.json").read_text())
    for name in ("report.md", "reconstructions.png", "neighbors.png", "objective.keras"):
        assert (run / name).is_file()
    code, out, err = call("evaluate", run, "--json")
    assert code == 0, err
    assert json.loads(out)["knn"] == pytest.approx(reached["knn"])
    code, out, err = call("evaluate", run, "--knn", 3)
    assert code == 0 and "360 samples of digits:test" in out and "knn " in out, err
    tuned = tmp_path / "tuned"
    weights = ("--set", "model.config.patch_size=2", "--set", f"model.weights={run}/model.keras")
    code, out, err = call(*digits(tuned, *weights))
    assert code == 0 and "Test: top-1" in out, err
    code, out, err = call(*digits(tmp_path / "x", *sets, "--set", "objective.options.ratio=1"))
    assert code == 1 and "no field 'ratio'; near: mask_ratio" in err


@pytest.mark.backend_free
def test_data_alone_means_the_recipe_folder(call, tmp_path):
    rng = np.random.default_rng(0)
    for label in ("daisy", "rose"):
        (tmp_path / "flowers" / label).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (20 + i, 24, 3), dtype="uint8")
            Image.fromarray(pixels).save(tmp_path / "flowers" / label / f"{i}.png")
    tiny = (
        '{"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 8}'
    )
    settings = ["model.variant=null", "model.weights=null", f"model.config={tiny}", "run.epochs=1"]
    settings += ["data.train=.[:70%]", "data.test=.[70%:]", "run.batch_size=4"]
    sets = [part for setting in settings for part in ("--set", setting)]
    run = tmp_path / "runs" / "flowers"
    code, out, err = call(
        "train", "--data", tmp_path / "flowers", "--workdir", run, *sets, "--quiet"
    )
    assert code == 0, err
    code, out, _ = call("train", "--workdir", run)  # finished
    assert f"keras-vit predict {run} IMAGE" in out and f"keras-vit export {run}" in out
    code, _, err = call("train", "--workdir", tmp_path / "none")
    assert code == 2 and "--data or --recipe is required" in err


@pytest.mark.backend_free
def test_missing_weights_name_the_option(call, tmp_path, monkeypatch):
    (tmp_path / "flowers" / "daisy").mkdir(parents=True)
    for i in range(12):
        Image.fromarray(np.zeros((8, 8, 3), "uint8")).save(tmp_path / f"flowers/daisy/{i}.png")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "x"
    code, _, err = call("train", "--data", tmp_path / "flowers", "--workdir", run)
    assert code == 1 and "--set model.weights=FILE" in err
    assert not (tmp_path / "runs").exists()  # nothing of the failed run is left

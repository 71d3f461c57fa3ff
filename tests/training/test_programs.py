"""The two commands as a user calls them, on the digits with a tiny model."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import keras
import pytest

import keras_vit
from keras_vit import runs
from keras_vit.train import list_recipes
from keras_vit.train.run import run_folder
from training import evaluate, train

TINY = [
    "model.config.patch_size=4",
    "model.config.width=16",
    "model.config.depth=1",
    "model.config.num_heads=2",
    "model.config.mlp_dim=24",
    "schedule.warmup_steps=1",
    "run.steps=4",
    "run.batch_size=700",
]

SMALL = keras_vit.ViTConfig(
    image_size=8, patch_size=4, in_channels=1, width=16, depth=1, num_heads=2, mlp_dim=24
)


def arguments(folder, *more, settings=TINY):
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["--recipe", "digits", "--workdir", str(folder), *sets, *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder, made in silence."""
    folder = tmp_path_factory.mktemp("commands") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train.main(arguments(folder, "--quiet")) == 0
    assert printed.getvalue() == "" and (folder / "report.md").is_file()
    return folder


def test_train_says_what_it_does_and_where_things_are(tmp_path, capsys):
    assert train.main(arguments(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "1,437 training and 360 test images of 10 classes" in out
    assert "4 steps of 700 in 2 epochs" in out and keras.backend.backend() in out
    assert "Test: top-1" in out and f"{tmp_path}/run/model.keras" in out
    assert "\x08" not in out and "━" not in out  # no bar where nobody watches
    assert sum("val_accuracy" in line for line in out.splitlines()) == 2


def test_list_shows_every_recipe_there_is(capsys):
    assert train.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.stem for path in Path(train.__file__).parent.glob("recipes/*.py")}
    assert {line.split()[0] for line in lines} == files and len(files) > 10
    (digits,) = (line for line in lines if line.startswith("digits "))
    assert digits.split(maxsplit=1)[1].startswith("Handwritten digits")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--recipe", "digit"], "near: digits"),
        (["--set", "optimizer.learning_rat=1"], "near: learning_rate"),
        (["--set", "run.batch_size=9999"], "1 to the 1437 training samples"),
        (["--set", "data.source=digit"], "data.source must be"),
        (["--set", "model.config.width=15"], "num_heads must divide width=15"),
        (["--set", "data.source=folder", "--data", "/no/such/place"], "/no/such/place"),
    ],
)
def test_train_refuses_in_one_line(change, words, tmp_path, capsys):
    assert train.main(arguments(tmp_path / "run", *change)) == 1
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("training.train: error: ") and words in last
    assert "Traceback" not in printed.err and printed.out == ""


def test_an_unknown_recipe_shows_all(tmp_path, capsys):
    assert train.main(["--recipe", "zzz", "--workdir", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert all(name in printed for name in list_recipes())


def test_a_finished_run_is_left_alone(folder, capsys):
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert train.main(arguments(folder)) == 0
    out = capsys.readouterr().out
    assert "top-1" in out and "finished before" in out
    assert train.main(arguments(folder, "--no-resume")) == 1
    assert "which holds checkpoints, confusion.png, curves.png" in capsys.readouterr().err
    assert train.main(arguments(folder, "--set", "run.seed=5")) == 1
    message = capsys.readouterr().err
    assert "--accept-changes" in message and "run.seed: 0 -> 5" in message
    fewer = ["--set", "run.steps=3", "--accept-changes"]
    assert train.main(arguments(folder, *fewer)) == 1
    assert "run.steps must be at least 4, where 4 are done" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_finished_run_can_be_made_longer(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    log = (copy / "log.jsonl").read_text()
    # A run of 9 steps would have epochs of 3, and this one keeps those it had, of 2.
    more = ["--workdir", str(copy), "--set", "run.steps=9", "--accept-changes"]
    assert train.main(more) == 0  # it knows its recipe
    out = capsys.readouterr().out
    assert "9 steps of 700 in 5 epochs" in out and "resumes at step 4, in epoch 3" in out
    assert "finished before" not in out
    longer = (copy / "log.jsonl").read_text()
    assert longer.startswith(log) and len(longer.splitlines()) == 5
    assert json.loads((copy / "recipe.json").read_text())["run"]["steps"] == 9
    assert json.loads((copy / "results.json").read_text())["steps"] == 9
    assert runs.read(copy)["position"]["steps_per_epoch"] == 2


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the same on all")
def test_a_finished_run_makes_again_what_is_gone(folder, tmp_path, capsys, caplog):
    copy = shutil.copytree(folder, tmp_path / "copy")
    log, results = (copy / "log.jsonl").read_bytes(), (copy / "results.json").read_text()
    wanted = run_folder.read_results(copy)
    (copy / "results.json").write_text(results[:9])
    assert run_folder.read_results(copy) is None and "results.json cannot be read" in caplog.text
    (copy / "results.json").write_text(results)
    (copy / "model.keras").unlink()
    assert train.main(["--workdir", str(copy)]) == 0
    assert "resumes at step 4" in capsys.readouterr().out
    assert "model.keras is missing, and is created again" in caplog.text
    got = run_folder.read_results(copy)
    got["seconds"] = pytest.approx(wanted["seconds"], abs=1)
    assert wanted == got and (copy / "log.jsonl").read_bytes() == log
    models = (keras.saving.load_model(one / "model.keras") for one in (folder, copy))
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_damaged_recipe_is_taken_from_the_newest_checkpoint(folder, tmp_path, capsys, caplog):
    copy = shutil.copytree(folder, tmp_path / "copy")
    wanted = (copy / "recipe.json").read_text()
    (copy / "recipe.json").write_text(wanted[:50])
    (copy / "results.json").unlink()
    assert train.main(["--workdir", str(copy)]) == 0
    assert "recipe.json cannot be read as a recipe" in caplog.text and "ckpt-00" in caplog.text
    assert (copy / "recipe.json").read_text() == wanted
    (copy / "recipe.json").write_text("[]")
    shutil.rmtree(copy / "checkpoints")
    assert train.main(["--workdir", str(copy)]) == 1
    assert "copy/recipe.json cannot be read as a recipe" in capsys.readouterr().err


def test_an_error_with_a_list_is_one_line():
    error = ValueError("a and b must be those of c. Received others:\n  a: 1\n  b: 2")
    assert train._one_line(error) == "a and b must be those of c. Received others: a: 1; b: 2"


def test_debug_shows_where_an_error_comes_from(tmp_path):
    with pytest.raises(ValueError, match="near: digits"):
        train.main(["--recipe", "digit", "--workdir", str(tmp_path), "--debug"])


@pytest.mark.parametrize("command", [["--recipe", "digits"], ["--workdir", "x"], ["--nonsense"]])
def test_a_wrong_call_is_code_2(command, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(command)
    assert end.value.code == 2 and "usage:" in capsys.readouterr().err


def ask(capsys, *options):
    assert evaluate.main([*map(str, options), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_evaluate_reaches_what_the_run_reached(folder, capsys):
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    for options in ([folder], [folder / "model.keras", "--data", "digits"]):
        for batch in (7, 360, 1000):
            found = ask(capsys, *options, "--batch", batch)
            assert found["samples"] == 360
            assert found["top1"] == pytest.approx(last["val_accuracy"], abs=1e-6)
            assert found["top5"] == pytest.approx(last["val_top5"], abs=0.01)
    train_split = ask(capsys, folder, "--split", "train")
    assert train_split["samples"] == 1437 and train_split["top1"] != found["top1"]


def test_evaluate_prints_and_takes_few_shots(folder, capsys):
    assert evaluate.main([str(folder), "--few-shot", "1", "10"]) == 0
    out = capsys.readouterr().out
    assert "360 samples of digits:test" in out and "top1 " in out and "top5 " in out
    one, ten = (
        float(line.split()[-1].rstrip("%")) for line in out.splitlines() if "few_shot" in line
    )
    assert 0 < one < ten < 100


def test_evaluate_takes_any_checkpoint(tmp_path, capsys):
    model = keras_vit.ViT(SMALL.replace(num_classes=10, head_init="truncated_normal"))
    model.save(tmp_path / "model.keras")
    path = keras_vit.save_pretrained(model, tmp_path / "hf", format="huggingface")
    wanted, got = (ask(capsys, m, "--data", "digits") for m in (tmp_path / "model.keras", path))
    assert got["top1"] == wanted["top1"] and got["top5"] == wanted["top5"]
    other = keras_vit.ViT(model.config)
    other.save(tmp_path / "other.keras")
    assert ask(capsys, tmp_path / "other.keras", "--data", "digits")["top5"] != wanted["top5"]


def test_evaluate_refuses_in_one_line(folder, tmp_path, capsys):
    keras_vit.ViT(SMALL.replace(num_classes=3)).save(tmp_path / "three.keras")
    mixed = SMALL.replace(num_classes=10, labels=tuple("1023456789"))
    keras_vit.ViT(mixed).save(tmp_path / "mixed.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(tmp_path / "other.keras")
    for options, words in (
        ([folder / "model.keras"], "data (--data) must be given"),
        ([folder / "no.keras", "--data", "digits"], "no.keras"),
        ([tmp_path / "three.keras", "--data", "digits"], "the model's 3 classes"),
        ([tmp_path / "mixed.keras", "--data", "digits"], "classes in the model's order: 1, 0, 2"),
        ([tmp_path / "other.keras", "--data", "digits"], "model must be a ViT"),
        ([folder, "--data", tmp_path / "nowhere"], "nowhere"),
    ):
        assert evaluate.main([str(option) for option in options]) == 1
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_evaluate_wants_positive_numbers(folder, capsys):
    for option in (["--batch", "0"], ["--few-shot", "x"]):
        with pytest.raises(SystemExit) as end:
            evaluate.main([str(folder), *option])
        assert end.value.code == 2 and "positive number" in capsys.readouterr().err

"""`keras-vit evaluate` as a user calls it, on the digits with a tiny model."""

import json

import keras
import pytest

import keras_vit

SMALL = keras_vit.ViTConfig(
    image_size=8, patch_size=4, in_channels=1, width=16, depth=1, num_heads=2, mlp_dim=24
)


@pytest.fixture
def ask(call):
    """What `keras-vit evaluate --json` prints."""

    def ask(*options):
        code, out, err = call("evaluate", *options, "--json")
        assert code == 0, err
        return json.loads(out)

    return ask


def test_evaluate_agrees_with_the_run(ask, trained):
    last = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    for options in ([trained], [trained / "model.keras", "--data", "digits"]):
        for batch in (7, 360, 1000):
            found = ask(*options, "--batch", batch)
            assert found["samples"] == 360
            assert found["top1"] == pytest.approx(last["val_accuracy"], abs=1e-6)
            assert found["top5"] == pytest.approx(last["val_top5"], abs=0.01)
    train_split = ask(trained, "--split", "train")
    assert train_split["samples"] == 1437 and train_split["top1"] != found["top1"]


@pytest.mark.sampled(cases=0)  # test_few_shot.py measures on every backend
def test_evaluate_prints_results_and_few_shot_accuracy(call, trained):
    code, out, _ = call("evaluate", trained, "--few-shot", 1, 10)
    assert code == 0
    assert "360 samples of digits:test" in out and "top1 " in out and "top5 " in out
    one, ten = (
        float(line.split()[-1].rstrip("%")) for line in out.splitlines() if "few_shot" in line
    )
    assert 0 < one < ten < 100


@pytest.mark.backend_free
def test_evaluate_accepts_several_few_shots_in_any_order(call, monkeypatch):
    given = []

    def evaluate(model, **options):
        given.append((model, options["few_shot"], options["split"]))
        return {"samples": 1, "data": "digits:test", "seconds": 1}

    monkeypatch.setattr(keras_vit.train, "evaluate", evaluate)
    for options in (
        ("runs", "--few-shot", 1, 5, 10),
        ("--few-shot", 1, 5, "--few-shot", 10, "--split", "a", "runs"),
        ("runs", "--few-shot=1", "--few-shot", 5, 10, "--split=a"),
    ):
        assert call("evaluate", *options)[0] == 0
    assert given == [("runs", [1, 5, 10], split) for split in (None, "a", "a")]


@pytest.mark.sampled(cases=0)  # the weights' tests read both on every backend
def test_evaluate_accepts_any_checkpoint(ask, tmp_path):
    model = keras_vit.ViT(SMALL.replace(num_classes=10, head_init="truncated_normal"))
    model.save(tmp_path / "model.keras")
    path = keras_vit.save_pretrained(model, tmp_path / "hf", format="huggingface")
    wanted, got = (ask(m, "--data", "digits") for m in (tmp_path / "model.keras", path))
    assert got["top1"] == wanted["top1"] and got["top5"] == wanted["top5"]
    other = keras_vit.ViT(model.config)
    other.save(tmp_path / "other.keras")
    assert ask(tmp_path / "other.keras", "--data", "digits")["top5"] != wanted["top5"]


@pytest.mark.backend_free
def test_evaluate_refuses_in_one_line(call, trained, tmp_path):
    keras_vit.ViT(SMALL.replace(num_classes=3)).save(tmp_path / "three.keras")
    keras_vit.ViT(SMALL.replace(num_classes=1)).save(tmp_path / "one.keras")
    mixed = SMALL.replace(num_classes=10, labels=tuple("1023456789"))
    keras_vit.ViT(mixed).save(tmp_path / "mixed.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(tmp_path / "other.keras")
    for options, words in (
        ([trained / "model.keras"], "(--data) must be given"),
        ([trained / "no.keras", "--data", "digits"], "no.keras"),
        ([tmp_path / "three.keras", "--data", "digits"], "the model's 3 classes"),
        ([tmp_path / "mixed.keras", "--data", "digits"], "classes in the model's order: 1, 0, 2"),
        ([tmp_path / "other.keras", "--data", "digits"], "model must be a ViT"),
        ([trained, "--data", tmp_path / "nowhere"], "nowhere"),
        ([trained, "--path", tmp_path], "(--path) must be left out for digits"),
        ([trained, "--data", "digits", "--path", tmp_path], "(--path) must be left out for digits"),
        ([trained, "--data", tmp_path, "--path", tmp_path], "where data (--data) is a folder"),
        ([tmp_path / "one.keras", "--data", "digits"], "must have two classes or more"),
    ):
        code, out, err = call("evaluate", *options)
        assert (code, out) == (1, "") and words in err and err.count("\n") == 1


@pytest.mark.backend_free
@pytest.mark.parametrize("option", [("--batch", 0), ("--few-shot", "x"), ("--few-shot", 1, 0)])
def test_evaluate_requires_positive_numbers(call, option):
    code, out, err = call("evaluate", "runs", *option)
    assert (code, out) == (2, "") and f"Invalid value for '{option[0]}'" in err

"""The report of a run: counts compared with counts by hand, the page and its figures."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from keras_vit.train.recipe import Data, Loss, Model, Recipe, Run
from keras_vit.train.run import report

pytestmark = pytest.mark.backend_free

RECIPE = Recipe("mine", Data("digits"), Model(), Run(batch_size=4, epochs=1))


def model_of(logits):
    """A model that returns these rows of logits; its "images" are row numbers."""
    return SimpleNamespace(predict_on_batch=lambda rows: logits[rows])


def batches_of(labels, num_classes, size):
    one_hot = np.eye(num_classes, dtype="float32")[labels]
    return [
        (np.arange(i, min(i + size, len(labels))), one_hot[i : i + size])
        for i in range(0, len(labels), size)
    ]


def random_predictions(num_classes, count=500, right=0.7, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, num_classes, count)
    guess = np.where(rng.random(count) < right, truth, rng.integers(0, num_classes, count))
    return report.Predictions(truth, guess, truth == guess, num_classes)


@pytest.mark.parametrize("size", [1, 4, 11, 23, 50])
def test_every_sample_counts_once_at_any_batch_size(size):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(23, 7)), rng.integers(0, 7, 23)
    got = report.predict(model_of(logits), batches_of(labels, 7, size))
    order = np.argsort(-logits, -1)
    assert len(got.truth) == 23 and got.num_classes == 7
    assert got.top1 == pytest.approx((order[:, 0] == labels).mean())
    assert got.top5 == pytest.approx((order[:, :5] == labels[:, None]).any(-1).mean())
    assert 0 < got.top1 < got.top5 < 1


def test_top5_is_zero_for_equal_logits_and_absent_for_few_classes():
    labels = np.arange(8) % 8
    untrained = report.predict(model_of(np.zeros((8, 8))), batches_of(labels, 8, 3))
    assert untrained.top5 == 0.0 and untrained.top1 == 1 / 8
    broken = report.predict(model_of(np.full((8, 8), np.nan)), batches_of(labels, 8, 3))
    assert broken.top5 == 0.0 and broken.top1 <= 1 / 8
    few = report.predict(model_of(np.eye(5)), batches_of(np.arange(5), 5, 2))
    assert few.top5 is None and few.top1 == 1.0


def test_no_batches_is_an_error():
    with pytest.raises(ValueError, match="at least one sample"):
        report.predict(model_of(np.zeros((1, 2))), [])


def test_confusion_and_worst_agree_with_counts_by_hand():
    truth, guess = np.array([0, 0, 0, 1, 1, 2, 2, 2]), np.array([0, 1, 1, 1, 0, 2, 2, 1])
    got = report.Predictions(truth, guess, truth == guess, 4)
    expected = [[1, 2, 0, 0], [1, 1, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(got.confusion(), expected)
    worst = got.worst(2)
    assert worst[0] == (0, 1, 2, pytest.approx(2 / 3))
    assert worst[1][2] == 1 and len(worst) == 2
    perfect = report.Predictions(truth, truth, truth == truth, 4)
    assert perfect.worst() == []


def write_log(folder, epochs=3):
    lines = [
        {
            "epoch": i + 1,
            "loss": 2.0 / (i + 1),
            "accuracy": 0.2 * i,
            "val_loss": None if i == 0 else 1.5,
            "learning_rate": 1e-3,
        }
        for i in range(epochs)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("num_classes", [3, 100])
def test_report_has_the_results_and_the_next_commands(num_classes, tmp_path):
    write_log(tmp_path)
    predictions = random_predictions(num_classes)
    labels = [f"class|{i}" for i in range(num_classes)]
    mistakes = report.mistakes(predictions, labels, tmp_path, "mine")
    page = report.write(tmp_path, RECIPE, {"machine": "a | b"}, mistakes)
    text = page.read_text()
    assert text.startswith("# mine\n") and "a \\| b" in text
    assert "![Loss, accuracy and learning rate](curves.png)" in text
    a, b, times, share = predictions.worst(1)[0]
    assert f"| class\\|{a} | class\\|{b} | {times} | {share:.1%} |" in text
    assert f"keras-vit evaluate {tmp_path}" in text
    assert "keras.saving.load_model" in text and "keras.ops.softmax" in text
    for name in ("curves.png", "confusion.png"):
        assert f"({name})" in text
        picture = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        assert picture.shape[0] > 300 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


def test_report_without_labels_mistakes_or_drawing(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DRAWN", 2)
    folder = tmp_path / "a run"
    folder.mkdir()
    write_log(folder, 0)
    sigmoid = Recipe("s", Data("digits"), Model(), Run(4, epochs=1), loss=Loss("sigmoid"))
    mistakes = report.mistakes(random_predictions(3, right=1.0), None, folder, "s")
    page = report.write(folder, sigmoid, {}, mistakes)
    text = page.read_text()
    assert "None." in text and "keras.ops.sigmoid" in text
    assert f"keras-vit evaluate '{folder}'\n" in text  # quoted for a shell
    assert not list(folder.glob("*.png"))

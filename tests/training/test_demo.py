"""The digits: a tiny ViT must learn them with plain `model.fit`, on every backend."""

import json

import numpy as np
from PIL import Image

import keras_vit
from keras_vit import train
from training import demo


def test_digits_reach_95_percent(tmp_path):
    recipe = train.load_recipe("digits")
    reached = train.train(recipe, tmp_path / "run", verbose=0)
    assert reached["top1"] > 0.95
    # The negative control: an untrained model.
    source = train.open_source(recipe.data)
    untrained = keras_vit.ViT(train.build_model(recipe, source).config)
    train.compile_model(untrained, recipe, 1000)
    batches = train.test_batches(source.test, untrained.config, 32, 10)
    assert untrained.evaluate(batches, verbose=0, return_dict=True)["accuracy"] < 0.2


def test_demo_writes_a_model_figures_and_exports(tmp_path, capsys):
    run, exports = tmp_path / "run", tmp_path / "exports"
    assert demo.main(["--epochs", "1", "--out", str(run), "--export", str(exports)]) == 0
    printed = capsys.readouterr().out
    assert "Test accuracy" in printed and "model.keras" in printed
    assert f"{exports}/1" in printed and "reads what the model reads in 100.0%" in printed
    assert json.loads((run / "recipe.json").read_text())["run"]["epochs"] == 1
    assert "the model " in printed and str(run / "digits.tflite") in printed
    phone = keras_vit.runtime.open(run / "digits.tflite")
    page = (run / "seen.html").read_text(encoding="utf-8")
    assert "A handwritten" in page and "<script" in page
    assert "![How far each head looks" in (run / "report.md").read_text(encoding="utf-8")
    assert (run / "positions.png").stat().st_size > 5000
    sheet = np.asarray(Image.open(run / "predictions.png"))
    assert sheet.shape[0] > 300 and len(np.unique(sheet)) > 10
    served = keras_vit.runtime.open(exports)
    assert served.labels == tuple("0123456789")
    kept = keras_vit.runtime.open(run)
    pixels = np.random.default_rng(0).integers(0, 256, (3, *kept.config.input_shape), "uint8")
    assert phone.labels == served.labels
    assert np.abs(phone.probabilities(pixels) - kept.probabilities(pixels)).max() < 0.1
    np.testing.assert_allclose(served.logits(pixels), kept.logits(pixels), atol=1e-4)
    assert np.abs(served.logits(pixels) - kept.logits(pixels[::-1])).max() > 1e-2

"""The digits: a tiny ViT must learn them with nothing but `model.fit`, on every backend."""

import numpy as np
from PIL import Image

from training import demo


def test_digits_reach_95_percent():
    model, accuracy = demo.train_digits(verbose=0)
    assert accuracy > 0.95
    assert model.count_params() < 500_000
    # The negative control: the same pictures mean nothing to a model that was never trained.
    untrained = type(model)(model.config)
    _, (x, y), _ = demo.load_data(model.config)
    assert (untrained.predict(x, verbose=0).argmax(-1) == y).mean() < 0.2


def test_demo_leaves_a_model_and_a_picture(tmp_path, capsys):
    assert demo.main(["--epochs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Test accuracy" in printed and "model.keras" in printed
    sheet = np.asarray(Image.open(tmp_path / "predictions.png"))
    assert sheet.shape[0] > 300 and len(np.unique(sheet)) > 10

"""`make demo`: a tiny ViT must learn the digits with plain `model.fit`, on every backend."""

import json
import sys

import numpy as np
import pytest
from PIL import Image
from processes import run_together

import keras_vit
from keras_vit import train
from keras_vit.train.recipe import Recipe, override
from training import demo

pytestmark = [
    pytest.mark.timeout(1200),  # a whole training, on a machine of any speed
    pytest.mark.sampled(cases=0),  # test_fit.py has short runs on every backend
]


LEAST = {12: 0.8, 40: 0.95}
"""Accuracy by epochs; 40 are the demo's."""


@pytest.fixture(scope="module", params=[12, pytest.param(40, marks=pytest.mark.slow)])
def finished(request, tmp_path_factory):
    """The run folder of the demo, the folder of its exports, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    run, exports = folder / "run", folder / "exports"
    command = [sys.executable, "-m", "training.demo", "--out", str(run), "--export", str(exports)]
    command += [] if request.param == 40 else ["--epochs", str(request.param)]
    # XLA optimizes here, which pays off in a whole training.
    ((code, printed),) = run_together([command], [{"XLA_FLAGS": ""}], timeout=1000)
    assert code == 0, printed
    return run, exports, printed


def test_digits_are_learned(finished):
    run, _, printed = finished
    recipe = Recipe.from_file(run / "recipe.json")
    assert train.load_recipe("digits").run.epochs == 40
    assert recipe.run.epochs < 40 or recipe == train.load_recipe("digits")
    reached = json.loads((run / "results.json").read_text())["top1"]
    assert reached > LEAST[recipe.run.epochs]
    assert f"Test accuracy {reached:.1%} on 360 images" in printed
    # The negative control: an untrained model.
    source = train.open_source(recipe.data)
    untrained = keras_vit.ViT(train.build_model(recipe, source).config)
    train.compile_model(untrained, recipe, 1000)
    batches = train.test_batches(source.test, untrained.config, 32, 10)
    assert untrained.evaluate(batches, verbose=0, return_dict=True)["accuracy"] < 0.2


def test_demo_writes_a_model_figures_and_exports(finished):
    run, exports, printed = finished
    assert str(run / "model.keras") in printed and f"{exports}/1" in printed
    assert "its top class is the model's in 100.0%" in printed
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


@pytest.mark.backend_free
def test_demo_passes_the_number_of_epochs(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(recipe, folder, overrides):
        raise Stop(override(train.load_recipe(recipe), overrides))

    monkeypatch.setattr(train, "train", stop)
    with pytest.raises(Stop) as stopped:
        demo.main(["--epochs", "1", "--out", str(tmp_path / "run")])
    (recipe,) = stopped.value.args
    assert recipe.run.epochs == 1 and recipe.schedule.warmup_steps == 1

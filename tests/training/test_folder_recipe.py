"""The recipe for your own images, on image files: its report has all figures."""

import json

import numpy as np
import pytest
from PIL import Image

from keras_vit.train import load_recipe, train
from keras_vit.train.recipe import override

TINY = {
    "image_size": 16,
    "patch_size": 8,
    "width": 20,
    "depth": 1,
    "num_heads": 5,
    "mlp_dim": 28,
}


def write_folder(root):
    """Writes JPEG and PNG files of two classes and many sizes, one gray, one transparent."""
    rng = np.random.default_rng(0)
    for number in range(10):
        pixels = rng.integers(0, 256, (40 + 7 * number, 90 - 6 * number, 3), dtype="uint8")
        image = Image.fromarray(pixels)
        if number in (6, 9):
            image = image.convert("L" if number == 6 else "RGBA")
        part, label = ("train", "test")[number > 5], ("daisy", "rose")[number % 2]
        (root / part / label).mkdir(parents=True, exist_ok=True)
        image.save(root / part / label / f"{number}.{'png' if number % 3 == 0 else 'jpg'}")


@pytest.mark.backend_free
def test_folder_recipe_writes_every_figure_of_the_report(tmp_path):
    write_folder(tmp_path / "flowers")
    config = json.dumps(TINY)
    settings = [f"model.config={config}", "model.variant=null", "model.weights=null"]
    settings += ["run.batch_size=3", "run.epochs=1", "schedule.warmup_steps=1"]  # two steps
    settings += [f"data.path={tmp_path / 'flowers'}"]
    train(override(load_recipe("folder"), settings), tmp_path / "run", verbose=0)
    text = (tmp_path / "run" / "report.md").read_text()
    assert "cannot be drawn" not in text and "4 test images" in text
    for name in "curves confusion rollout features distance filters positions".split():
        assert f"]({name}.png)" in text
        with Image.open(tmp_path / "run" / f"{name}.png") as image:
            assert np.ptp(np.asarray(image.convert("L"))) > 100

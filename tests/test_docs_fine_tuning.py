"""The blocks of docs/fine-tuning.md, run in order for each way to train, on tiny images."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

PAGE = Path(__file__).parent.parent / "docs" / "fine-tuning.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
WAYS = {"lora": BLOCKS[5], "full": BLOCKS[3], "head": BLOCKS[4]}
TINY = "image_size=16, patch_size=8, width=20, depth=1, num_heads=2, mlp_dim=12"
SMALLER = {
    "(224, 224)": "(24, 24)",
    "validation_split=0.1": "validation_split=0.5",
    'weights="augreg_in21k"': TINY,  # no network
    "epochs=5": "epochs=1, verbose=0",
}


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for label in ("daisy", "rose"):
        (tmp_path / "flowers" / label).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (30, 40, 3), dtype="uint8")
            Image.fromarray(pixels).save(tmp_path / "flowers" / label / f"{i}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(names, blocks):
    text = "".join(blocks)
    for there, smaller in SMALLER.items():
        assert there in PAGE.read_text(encoding="utf-8")
        text = text.replace(there, smaller)
    exec(compile(text, str(PAGE), "exec"), names)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
def test_page_runs(way, flowers):
    names = {}
    run(names, [*BLOCKS[:3], WAYS[way], *BLOCKS[6:8]])
    vit, model = names["vit"], names["model"]
    trained = {w.path.split("/")[0] for w in vit.trainable_weights}
    assert trained == {"head"} if way == "head" else len(trained) > 1
    found = model.classify("flowers/rose/1.jpg", top_k=2)
    assert [label for label, _ in found[0]] in (["daisy", "rose"], ["rose", "daisy"])
    if keras.backend.backend() == "tensorflow" and way == "lora":
        run(names, BLOCKS[8:])
        assert (flowers / "savedmodels/flowers/1").is_dir() and (
            flowers / "flowers.tflite"
        ).exists()
        raw = np.full((1, 16, 16, 3), 99, "uint8")
        logits = names["keras_vit"].runtime.open("flowers.tflite").logits(raw)
        assert np.isfinite(logits).all()
    assert len(BLOCKS) == 9

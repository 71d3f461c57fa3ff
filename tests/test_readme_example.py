"""The first example of README.md: what it reaches, and that its exports run."""

import os
import re
import time
from pathlib import Path

import keras
import numpy as np
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
TRAIN, DEPLOY, *_ = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_first_example_reaches_its_accuracy(tmp_path, monkeypatch):
    """Prints the figures of the page: pytest -m slow -s tests/test_readme_example.py."""
    monkeypatch.chdir(tmp_path)
    names = {}
    before = time.process_time()
    exec(compile(TRAIN, "README.md", "exec"), names)
    spent = time.process_time() - before
    model, x_test, y_test = names["model"], names["x_test"], names["y_test"]
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"{keras.backend.backend()}: {accuracy:.1%} after {spent:.0f} s of CPU time")
    assert accuracy > 0.95
    found = model.classify(list(x_test[:20]))
    right = [row[0][0] == names["names"][k] for row, k in zip(found, y_test, strict=False)]
    assert np.mean(right) > 0.8
    if keras.backend.backend() == "tensorflow":
        exec(compile(DEPLOY, "README.md", "exec"), names)
        assert {"digits.onnx", "digits.tflite", "savedmodels"} <= set(os.listdir())

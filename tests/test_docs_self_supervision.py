"""docs/self-supervision.md: the page's Python runs from top to bottom, with fewer epochs."""

import re
from pathlib import Path

import numpy as np
import pytest

import keras_vit

pytestmark = [
    pytest.mark.backend_free,  # the objectives have tests on each backend
    pytest.mark.timeout(1200),  # five trainings, on a machine of any speed
]

PAGE = Path(__file__).parent.parent / "docs" / "self-supervision.md"
TEXT = PAGE.read_text(encoding="utf-8")
NETWORK = "# needs a network"


def blocks(text=TEXT):
    """The page's Python that runs without a network."""
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if not block.startswith(NETWORK)]


def short(block):
    """The same code, eager and with one epoch: compiling a step takes longer than running it."""
    block = re.sub(r"epochs=\d+", "epochs=1, verbose=0", block).replace(":1400", ":200")
    eager = r".compile(\1, run_eagerly=True)\n"
    return re.sub(r"\.compile\((.*?),?\s*\)\n(?=\S|$)", eager, block, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names():
    found: dict = {}
    for block in blocks():
        exec(compile(short(block), PAGE.name, "exec"), found)
    return found


def test_code_of_the_page_runs(names):
    assert len(blocks()) == 8
    classes = {
        "mae": "MAE",
        "simmim": "SimMIM",
        "mpp": "MaskedPatchPrediction",
        "dino": "DINO",
        "distillation": "Distillation",
    }
    assert {name: type(names[name]).__name__ for name in classes} == classes
    assert all(names[name].vit is names["vit"] for name in ("mae", "simmim", "mpp"))
    assert names["distillation"].teacher.model is names["vit"] and names["teacher"].built


def test_page_says_what_the_code_gives(names):
    assert names["history"].history.keys() == {"loss", "val_loss"}
    for name in ("original", "masked", "reconstruction"):
        assert names[name].shape == (8, 8, 8, 1) and np.ptp(names[name]) > 0.1
    assert isinstance(names["vit"], keras_vit.ViT) and names["mpp"].colors.units == 8


def test_wrong_code_fails():
    with pytest.raises(ValueError, match="hidden_ratio"):
        exec(short(blocks()[0].replace("mask_ratio", "hidden_ratio")), {})


PRETRAINING = re.compile(r"^mae = train\.MAE.*?\n(mae\.compile.*\n)(mae\.fit.*\n)", re.M | re.S)


def score(seed, objective=None):
    """What the first script of the page reaches, in percent, with another step 1 or none."""
    code = blocks()[0]
    if objective is not None:
        made = f"mae = {objective}\n\\1\\2" if objective else ""
        code, count = PRETRAINING.subn(made, code)
        assert count == 1
    code = code.replace("set_random_seed(0)", f"set_random_seed({seed})")
    code = code.replace("seed=0)", f"seed={seed})").replace("epochs=60", "epochs=60, verbose=0")
    found: dict = {}
    exec(code.replace("vit.evaluate(", "reached = vit.evaluate("), found)
    return round(100 * found["reached"][1], 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_pretraining_helps_as_the_page_says():
    """Prints the figures of the page, which are those of JAX."""
    after, scratch = ([score(seed, step) for seed in range(3)] for step in (None, ""))
    print(f"after MAE {after}, from scratch {scratch}")
    assert min(after) > max(scratch) + 10
    for objective in ("SimMIM(vit, block_size=1, seed=0)", "MaskedPatchPrediction(vit, seed=0)"):
        print(f"after {objective}: {score(0, f'train.{objective}')}")

"""The wheel without a checkout: train, kill, resume, predict, export."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend_free,
]

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "model.config.patch_size=4",
    "model.config.width=16",
    "model.config.depth=1",
    "model.config.num_heads=2",
    "model.config.mlp_dim=24",
    "schedule.warmup_steps=1",
    "run.steps=6",
    "run.batch_size=500",
]
BEGIN = """
import os, signal, time, keras, keras_vit
from pathlib import Path

assert Path(keras_vit.__file__).parts[-3] == "wheel", keras_vit.__file__

class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        until = time.monotonic() + 60  # while the first epoch's checkpoint is written
        while epoch == 1 and time.monotonic() < until:
            if Path("run/checkpoints/ckpt-000003").exists():
                os.kill(os.getpid(), signal.SIGKILL)

keras_vit.train.train("digits", "run", overrides={settings}, verbose=0, callbacks=[Kill()])
"""
RESUME = """
import json, keras, keras_vit, numpy as np

said = []
results = keras_vit.train.train(None, "run", verbose=0, say=said.append)
pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), "uint8")
kept = keras_vit.runtime.open("run").logits(pixels)
model = keras.saving.load_model("run/model.keras")
export = keras_vit.export_saved_model(model, "exports", images="uint8")
served = keras_vit.runtime.open(export.path).logits(pixels)
print(json.dumps({
    "said": said,
    "steps": results["steps"],
    "top1": [results["top1"], keras_vit.train.evaluate("run")["top1"]],
    "apart": float(np.abs(kept - served).max()),
    "mixed_up": float(np.abs(kept - served[::-1]).max()),
    "recipes": list(keras_vit.train.list_recipes()),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel, without the checkout: KERAS_VIT_WHEEL, or one built here."""
    folder = tmp_path_factory.mktemp("built")
    given = os.environ.get("KERAS_VIT_WHEEL")
    file = Path(given) if given else build(folder)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "wheel")
    assert not (folder / "wheel" / "training").exists()
    return folder / "wheel"


def build(folder):
    isolated = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolated, "-w", str(folder)]
    built = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    if built.returncode and "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("hatchling is not installed and cannot be fetched")
    assert built.returncode == 0, built.stderr[-2000:]
    (file,) = folder.glob("*.whl")
    return file


def run(wheel, folder, code):
    environment = {**os.environ, "PYTHONPATH": str(wheel), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_run_is_killed_resumes_predicts_and_is_exported(wheel, tmp_path):
    killed = run(wheel, tmp_path, BEGIN.format(settings=SETTINGS))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not (tmp_path / "run" / "model.keras").exists()
    done = run(wheel, tmp_path, RESUME)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "resumes at step 3, in epoch 2" in found["said"][0] and found["steps"] == 6
    assert found["top1"][0] == found["top1"][1]
    assert found["apart"] < 1e-4 < 1e-2 < found["mixed_up"]
    assert found["recipes"] == sorted(p.stem for p in (ROOT / "training/recipes").glob("*.py"))

"""The SavedModel and other processes: one that has no keras_vit, a kill, another backend."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance import images, run, tiny_model

from keras_vit import runtime
from keras_vit.export.saved_model.export import export_saved_model

ROOT = Path(__file__).parents[3]
LABELS = ("cat", "dog", "élan vital")


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=LABELS)


@pytest.fixture(scope="module")
def export(model, tmp_path_factory):
    return export_saved_model(model, tmp_path_factory.mktemp("savedmodels") / "tiny")


FOREIGN = """
import json, sys
import numpy as np
import tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
inputs = np.load(sys.argv[2])
found = loaded.signatures["serving_default"](images=tf.constant(inputs))["logits"].numpy()
file = tf.io.encode_png(np.full((30, 20, 3), 99, "uint8"))
labels = loaded.signatures["classify"](bytes=file[None])["labels"].numpy()
ours = [name for name in sys.modules if name.startswith(("keras_vit", "training"))]
print(json.dumps([found.tolist(), labels[0, 0].decode(), ours]))
"""


@pytest.mark.only_on("tensorflow")
@pytest.mark.slow
def test_process_without_keras_vit_runs_it(model, export, tmp_path):
    x = images(model.config)
    np.save(tmp_path / "x.npy", x)
    done = subprocess.run(
        [sys.executable, "-I", "-c", FOREIGN, str(export.path), str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, label, ours = json.loads(done.stdout.splitlines()[-1])
    assert ours == [] and label in LABELS
    np.testing.assert_allclose(found, run(model, x), atol=1e-4)


@pytest.mark.only_on("tensorflow")
@pytest.mark.slow
def test_saved_model_cli_shows_and_runs_it(model, export, tmp_path):
    tool = "from tensorflow.python.tools.saved_model_cli import main; main()"
    x = images(model.config)
    np.save(tmp_path / "x.npy", x)
    base = [sys.executable, "-c", tool]
    chosen = ["--dir", str(export.path), "--tag_set", "serve"]
    shown = subprocess.run(
        [*base, "show", "--dir", str(export.path), "--all"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    for text in ("signature_def['classify']", "shape: (-1, 24, 16, 3)", "inputs['bytes']"):
        assert text in shown.stdout, shown.stderr[-2000:]
    subprocess.run(
        [*base, "run", *chosen, "--signature_def", "serving_default"]
        + ["--inputs", f"images={tmp_path / 'x.npy'}", "--outdir", str(tmp_path)],
        check=True,
        timeout=200,
    )
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), run(model, x), atol=1e-4)


KILLED = """
import os, sys, time
from keras_vit.export.saved_model import export as saved_model
from conformance import tiny_model
model = tiny_model()
print("ready", flush=True)
while True:
    print(saved_model.export_saved_model(model, sys.argv[1]).version, flush=True)
"""


@pytest.mark.only_on("tensorflow")
@pytest.mark.slow
def test_kill_leaves_no_version_that_is_not_complete(tmp_path):
    """Killed at many moments of an export, and each version that is there can be opened."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    rng = np.random.default_rng(0)
    left = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for line in child.stdout:
                if line.strip() != "ready":
                    break
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.1, 2))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        left += len(list(tmp_path.glob(".tmp-*")))
    names = sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".tmp-"))
    assert names and all(name.isdigit() for name in names) and left
    for name in names:
        files = json.loads((tmp_path / name / "MANIFEST.json").read_text("utf-8"))["files"]
        for file, entry in files.items():
            content = (tmp_path / name / file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == entry["sha256"], (name, file)
    opened = runtime.open(tmp_path)  # the highest, and no leftover
    assert opened.path.name == max(names, key=int)


@pytest.mark.only_on("jax", "torch")
def test_export_from_another_backend(tmp_path):
    """In one process: an export, its logits on this backend, and an error that comes back."""
    model = tiny_model(labels=LABELS)
    x = images(model.config, 5)
    export = export_saved_model(model, tmp_path / "tiny", verify=x)
    assert (export.path, export.verification.images) == (tmp_path / "tiny" / "1", 5)
    opened = runtime.open(tmp_path / "tiny")
    assert opened.labels == LABELS
    logits = run(model, x)
    assert np.abs(opened.logits(x) - logits).max() < 1e-5 * max(np.ptp(logits), 1)
    assert np.abs(opened.logits(x) - logits[::-1]).max() > 0.1


@pytest.mark.only_on("jax", "torch")
@pytest.mark.slow
def test_error_in_the_export_s_process_comes_back(tmp_path):
    with pytest.raises(ValueError, match="logits must be the model's within 1e-30") as caught:
        export_saved_model(tiny_model(), tmp_path / "x", bound=1e-30)
    assert "in export_here" in caught.value.__notes__[0]
    assert not (tmp_path / "x").exists()

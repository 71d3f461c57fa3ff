"""The same weights on TensorFlow, JAX and PyTorch, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import QUICK_JAX

BACKENDS = ("tensorflow", "jax", "torch")
# Of a stem, of positions and of pooling. test_reference.py computes each kind on each backend.
COMPUTED = ("paper", "rope_mixed", "map", "conv_stem")

# Each backend saves a part of the kinds, and the next one loads them.
WORK = """
import sys, time, numpy as np, keras
from pathlib import Path
sys.path.insert(0, "tests")
from conformance import KINDS, arrays, images, tiny_model, to_numpy
folder, backends, computed = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split()
backend = keras.backend.backend()
source = backends[backends.index(backend) - 1]
parts = {name: list(KINDS)[number :: len(backends)] for number, name in enumerate(backends)}
for kind in parts[backend]:
    tiny_model(kind).save_weights(folder / f"{backend}.{kind}.weights.h5")
(folder / f"{backend}.saved").touch()
for kind in computed:
    model = tiny_model(kind)
    np.save(folder / f"{backend}.{kind}.npy", to_numpy(model(images(model.config))))
while not (folder / f"{source}.saved").exists():
    time.sleep(0.05)
for kind in parts[source]:
    model = tiny_model(kind)
    saved = arrays(model)
    for v in model.weights:
        v.assign(np.zeros(v.shape, v.dtype))
    model.load_weights(folder / f"{source}.{kind}.weights.h5")
    for path, value in arrays(model).items():
        np.testing.assert_array_equal(value, saved[path])
"""


def start(backend, folder, backends):
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": "."}
    environment |= QUICK_JAX if backend == "jax" else {}
    with (folder / f"{backend}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", WORK, folder, " ".join(backends), " ".join(COMPUTED)],
            env=environment,
            cwd=Path(__file__).parent.parent,
            stdout=log,
            stderr=log,
        )


@pytest.mark.backend_free
@pytest.mark.timeout(1200)  # three processes with many models, on a machine of any speed
def test_backends_agree(tmp_path):
    """Logits agree within 1e-5. Each kind's weights load bit for bit on the next backend."""
    backends = [b for b in BACKENDS if importlib.util.find_spec(b)]
    if len(backends) < 2:
        pytest.skip("only one backend is installed")
    running = {b: start(b, tmp_path, backends) for b in backends}
    try:
        while any(process.poll() is None for process in running.values()):
            for backend, process in running.items():  # a process that failed is waited for in vain
                said = (tmp_path / f"{backend}.log").read_text(errors="replace")
                assert not process.poll(), f"{backend}: {said[-3000:]}"
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for backend, process in running.items():
        said = (tmp_path / f"{backend}.log").read_text(errors="replace")
        assert process.returncode == 0, f"{backend}: {said[-3000:]}"
    for kind in COMPUTED:
        first, *others = (np.load(tmp_path / f"{b}.{kind}.npy") for b in backends)
        for other in others:
            np.testing.assert_allclose(other, first, atol=1e-5 * max(1, np.abs(first).max()))
        assert np.abs(first).max() > 0.1

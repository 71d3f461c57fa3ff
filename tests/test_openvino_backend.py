"""Keras' OpenVINO backend, which only predicts: a model of ours gives the same logits there."""

import os
import subprocess
import sys

import numpy as np
import pytest
from conformance import images, run, tiny_model

pytestmark = pytest.mark.only_on("tensorflow")
PREDICT = """
import sys, numpy as np, keras, keras_vit
assert keras.backend.backend() == "openvino"
model = keras.saving.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
"""


def test_model_predicts_on_the_openvino_backend(tmp_path):
    pytest.importorskip("openvino")
    model = tiny_model("registers")
    x = images(model.config)
    model.save(tmp_path / "tiny.keras")
    np.save(tmp_path / "x.npy", x)
    paths = [str(tmp_path / name) for name in ("tiny.keras", "x.npy", "y.npy")]
    command = [sys.executable, "-c", PREDICT, *paths]
    subprocess.run(command, check=True, env={**os.environ, "KERAS_BACKEND": "openvino"})
    found, wanted = np.load(paths[2]), run(model, x)
    # The backend leaves the precision to OpenVINO, which takes bfloat16 where the processor can.
    assert np.abs(found - wanted).max() < 0.05 * np.ptp(wanted)
    # Negative control: the images in another order.
    assert np.abs(found[::-1] - wanted).max() > 0.1 * np.ptp(wanted)

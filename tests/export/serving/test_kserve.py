"""kserve, an independent server with the same REST shape, in an environment of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_export

from keras_vit_cli import client

HERE = Path(__file__).parent
IMAGES = tiny_export.images(2)
FILES = [tiny_export.picture(1), tiny_export.picture(2, "PNG", (50, 20))]

pytestmark = [pytest.mark.backend_free, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def kserve(exported, tmp_path_factory):
    """The address of the model behind kserve; its own virtual environment, without TensorFlow."""
    folder = tmp_path_factory.mktemp("kserve")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", "kserve>=0.21,<0.22", "numpy>=2"]
    subprocess.run(install, check=True, timeout=1200)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = str(Path(find_spec("tensorflow").origin).parent)
    # -P and no PYTHONPATH: nothing of this environment comes in, but for the two files here.
    command = [python, HERE / "kserve_server.py", exported / "1", "flowers", str(port)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["TENSORFLOW_FOLDER"] = where
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}/v1/models/flowers"
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(url, timeout=5) as response:
                    assert json.load(response) == {"name": "flowers", "ready": True}
                    break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        else:
            raise TimeoutError(log.read_text()[-3000:])
        yield SimpleNamespace(url=url, python=python)
    finally:
        process.terminate()
        process.wait(60)


def test_kserve_gives_what_the_model_gives(kserve, loaded):
    asked = client.connect(kserve.url, timeout=60)
    for signature, value in (
        ("serving_default", IMAGES),
        ("features", IMAGES),
        ("serve_bytes", FILES),
        ("classify", FILES),
    ):
        expected = loaded(signature, value)
        found = asked.predict(value, signature)
        assert set(found) == set(expected)
        for name, array in expected.items():
            if array.dtype == object:
                assert found[name].tolist() == [[v.decode() for v in row] for row in array]
                continue
            atol = 1e-6 * np.ptp(array)
            np.testing.assert_allclose(found[name], array, rtol=0, atol=atol)
            assert abs(found[name] - array[::-1]).max() > atol


def test_kserve_refuses_and_goes_on(kserve):
    asked = client.connect(kserve.url, timeout=60)
    before = asked.predict(IMAGES, "features")["features"]
    for wrong in (IMAGES[:, :8], IMAGES[0]):
        with pytest.raises(ValueError, match="The server refused the request: .*must have shape"):
            asked.predict(wrong, "features")
    with pytest.raises(ValueError, match="expected a JSON value"):  # its JSON knows no NaN
        asked.predict(IMAGES * np.nan, "features")
    with pytest.raises(ValueError, match="The server refused the request"):
        asked.predict([FILES[0][:300]], "classify")
    with pytest.raises(ValueError, match="Model with name trees does not exist"):
        client.connect(kserve.url.replace("flowers", "trees"), timeout=60).predict(IMAGES)
    assert (asked.predict(IMAGES, "features")["features"] == before).all()


def test_kserve_has_no_tensorflow(kserve):
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('tensorflow', 'keras')])"
    done = subprocess.run([kserve.python, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[None, None]"
    assert kserve.python != Path(sys.executable)

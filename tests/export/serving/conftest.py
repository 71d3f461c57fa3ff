"""One export and one stand-in server for all the tests here, which run on TensorFlow only."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

HERE = Path(__file__).parent
NAME = "flowers"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """savedmodels/flowers with version 1, the files of `serve-config` beside it."""
    import tiny_export

    from keras_vit.export.serving import config as serving

    folder = tmp_path_factory.mktemp("savedmodels") / NAME
    tiny_export.export(folder)
    serving.write_serving_config(folder, max_batch_size=16)
    return folder


@pytest.fixture(scope="session")
def loaded(exported):
    """The export's signatures through TensorFlow's own Python loader."""
    import tensorflow as tf

    model = tf.saved_model.load(str(exported / "1"))

    def run(signature, value):
        (name,) = model.signatures[signature].structured_input_signature[1]
        answer = model.signatures[signature](**{name: tf.constant(value)})
        return {key: tensor.numpy() for key, tensor in answer.items()}

    run.model = model
    return run


@pytest.fixture(scope="session")
def server(exported):
    """The stand-in, started with the flags and the volume of docker-compose.yml."""
    pytest.importorskip("tensorflow_serving")
    compose = yaml.safe_load((exported.parent / "docker-compose.yml").read_text())
    service = compose["services"]["serving"]
    (volume,) = service["volumes"]
    where, inside, mode = volume.split(":")
    assert (where, mode) == (".", "ro")
    flags = [flag for flag in service["command"] if "port=" not in flag]
    command = [sys.executable, "standin.py", f"--volume={exported.parent}:{inside}", *flags]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, f"the stand-in ended with {process.wait()}"
            yield SimpleNamespace(**json.loads(line), service=service, process=process)
        finally:
            process.kill()

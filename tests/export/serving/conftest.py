"""One export and two servers for the tests here: gRPC on the C API, REST by `keras-vit serve`."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import running_server
import yaml

from keras_vit.serve import Limits

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
def rest(exported):
    """`keras-vit serve`, in this process; its port."""
    with running_server.running({NAME: exported}, limits=Limits(max_batch=16)) as server:
        yield server.port


@pytest.fixture(scope="session")
def server(exported, rest):
    """The gRPC server, started with the flags and the volume of docker-compose.yml, and REST."""
    pytest.importorskip("tensorflow_serving")
    compose = yaml.safe_load((exported.parent / "docker-compose.yml").read_text())
    service = compose["services"]["serving"]
    (volume,) = service["volumes"]
    where, inside, mode = volume.split(":")
    assert (where, mode) == (".", "ro")
    flags = [flag for flag in service["command"] if "port=" not in flag]
    command = [sys.executable, "grpc_server.py", f"--volume={exported.parent}:{inside}", *flags]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait()}"
            ports = {**json.loads(line), "rest": rest}
            yield SimpleNamespace(**ports, service=service, process=process)
        finally:
            process.kill()

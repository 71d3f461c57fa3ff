"""A plain client over real sockets: REST of `keras-vit serve`, gRPC of grpc_server."""

import ast
import base64
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_export

pytestmark = pytest.mark.backend_free

plain = pytest.importorskip("plain_client", reason="tensorflow-serving-api is not installed")

NAME = "flowers"
IMAGES = tiny_export.images(3)
FILES = [tiny_export.picture(1), tiny_export.picture(2, "PNG", (50, 20))]
B64 = [{"b64": base64.b64encode(data).decode()} for data in FILES]


def same(found, expected):
    """Equal to the last digits of float32, labels exactly."""
    found, expected = np.asarray(found), np.asarray(expected)
    if expected.dtype == object:
        text = [v.decode() if isinstance(v, bytes) else v for v in found.ravel()]
        assert text == [v.decode() for v in expected.ravel()]
    else:
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.ptp(expected))


def test_client_knows_nothing_of_the_package():
    for name in ("plain_client.py", "grpc_server.py", "c_loader.py"):
        tree = ast.parse(Path(__file__).with_name(name).read_text())
        imported = {
            module.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in [getattr(node, "module", None) or node.names[0].name]
        }
        assert "numpy" in imported
        assert not imported & {"keras", "keras_vit", "tiny_export"}, name


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        ("serving_default", IMAGES),
        ("features", IMAGES),
        ("serve_bytes", plain.batch(*FILES)),
        ("classify", plain.batch(*FILES)),
    ],
)
def test_predict_gives_the_same_in_every_form(server, loaded, signature, value):
    expected = loaded(signature, list(value) if value.dtype == object else value)
    name = "bytes" if value.dtype == object else "images"
    found = plain.predict(server.grpc, NAME, {name: value}, signature)
    assert set(found) == set(expected)
    for key, array in expected.items():
        same(found[key], array)

    items = B64 if value.dtype == object else value.tolist()
    ask = {"signature_name": signature}
    code, rows = plain.rest(server.rest, f"{NAME}:predict", {**ask, "instances": items})
    assert code == 200, rows
    for key, array in expected.items():
        # A single output stands without its name.
        same([row[key] if len(expected) > 1 else row for row in rows["predictions"]], array)
    named = {**ask, "instances": [{name: item} for item in items]}
    assert plain.rest(server.rest, f"{NAME}/versions/1:predict", named) == (200, rows)
    for inputs in (items, {name: items}):
        code, columns = plain.rest(server.rest, f"{NAME}:predict", {**ask, "inputs": inputs})
        assert code == 200, columns
        for key, array in expected.items():
            same(columns["outputs"][key] if len(expected) > 1 else columns["outputs"], array)


@pytest.mark.parametrize("count", [1, 7])
def test_batch_is_dynamic(server, loaded, count):
    images = tiny_export.images(count, seed=count)
    found = plain.predict(server.grpc, NAME, {"images": images})
    expected = loaded("serving_default", images)
    same(found["logits"], expected["logits"])


def test_predict_gives_only_what_is_asked_for(server):
    found = plain.predict(server.grpc, NAME, {"images": IMAGES}, outputs=["logits"])
    assert set(found) == {"logits"}
    refused = plain.predict(server.grpc, NAME, {"images": IMAGES}, outputs=["lojits"])
    assert refused[0] == "INVALID_ARGUMENT"
    assert "output tensor alias not found in signature: lojits" in refused[1]


def test_metadata_is_that_of_the_file(server, loaded):
    found = plain.metadata(server.grpc, NAME)
    assert set(found) == {"serving_default", "serve_bytes", "classify", "features"}
    assert found["serving_default"][0] == {"images": ("float32", [-1, 24, 16, 3])}
    assert found["classify"][0] == {"bytes": ("string", [-1])}
    assert found["classify"][1]["labels"][0] == "string"
    code, answer = plain.rest(server.rest, f"{NAME}/metadata")
    assert code == 200
    assert answer["model_spec"]["name"] == NAME and answer["model_spec"]["version"] == "1"
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert signatures["serving_default"]["inputs"]["images"]["dtype"] == "DT_FLOAT"
    sizes = signatures["serving_default"]["inputs"]["images"]["tensor_shape"]["dim"]
    assert [dim["size"] for dim in sizes] == ["-1", "24", "16", "3"]


def test_status(server):
    assert plain.status(server.grpc, NAME) == {1: "AVAILABLE"}
    code, answer = plain.rest(server.rest, NAME)
    assert code == 200
    (version,) = answer["model_version_status"]
    assert (version["version"], version["state"]) == ("1", "AVAILABLE")
    assert version["status"]["error_code"] == "OK"


def test_what_is_not_there(server):
    said = "Servable not found for request: Latest(trees)"
    assert plain.predict(server.grpc, "trees", {"images": IMAGES}) == ("NOT_FOUND", said)
    assert plain.rest(server.rest, "trees:predict", {"instances": [1]}) == (404, {"error": said})
    said = f"Servable not found for request: Specific({NAME}, 9)"
    assert plain.predict(server.grpc, NAME, {"images": IMAGES}, version=9) == ("NOT_FOUND", said)
    said = "Could not find any versions of model trees"
    assert plain.status(server.grpc, "trees") == ("NOT_FOUND", said)
    assert plain.rest(server.rest, "trees") == (404, {"error": said})
    said = 'Serving signature key "no" not found.'
    found = plain.predict(server.grpc, NAME, {"images": IMAGES}, "no")
    assert found == ("FAILED_PRECONDITION", said)
    body = {"signature_name": "no", "instances": [1]}
    code, answer = plain.rest(server.rest, f"{NAME}:predict", body)
    assert code == 400 and 'Serving signature name: "no" not found' in answer["error"]


def test_warm_up_requests_are_what_the_server_replays(exported):
    """The gRPC server has run them by now; one that fails would have kept it from starting.

    A server refuses what is more than its `max_batch_size`, which may be 1.
    """
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    file = exported / "1" / "assets.extra" / "tf_serving_warmup_requests"
    records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
    seen = set()
    for record in records:
        log = prediction_log_pb2.PredictionLog.FromString(record)
        assert log.WhichOneof("log_type") == "predict_log"
        assert log.SerializeToString(deterministic=True) and log.ByteSize() == len(record)
        request = log.predict_log.request
        ((name, proto),) = request.inputs.items()
        assert request.model_spec.name == NAME
        seen.add((request.model_spec.signature_name, name, len(tf.make_ndarray(proto))))
    assert {(signature, name) for signature, name, _ in seen} == {
        ("serving_default", "images"),
        ("features", "images"),
        ("serve_bytes", "bytes"),
        ("classify", "bytes"),
    }
    assert {size for *_, size in seen} == {1} and len(records) == len(seen)


def test_health_check_of_the_compose_file(server):
    command = server.service["healthcheck"]["test"]
    assert command[0] == "CMD"

    def run(text):
        here = [part.replace("/8501", f"/{server.rest}") for part in [*command[1:-1], text]]
        return subprocess.run(here, capture_output=True, timeout=60).returncode

    assert run(command[-1]) == 0
    assert run(command[-1].replace(NAME, "trees")) != 0
    # What it looks for in the answer, of a model that is not there yet.
    (look,) = re.findall(r"grep [^<]*", command[-1])
    for state, code in (("AVAILABLE", 0), ("UNAVAILABLE", 1), ("LOADING", 1)):
        done = subprocess.run(["bash", "-c", look], input=f'"state": "{state}",\n'.encode())
        assert done.returncode == code, state


def test_curl_of_the_readme(server, exported, tmp_path):
    text = (exported.parent / "README.md").read_text()
    (block,) = [part for part in text.split("```sh\n") if part.startswith("base64")]
    script = block.partition("```")[0].replace(":8501", f":{server.rest}")
    (tmp_path / "cat.jpg").write_bytes(FILES[0])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert '"labels"' in done.stdout, done.stdout + done.stderr
    assert any(label in done.stdout for label in tiny_export.LABELS)

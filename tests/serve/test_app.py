"""The server over real sockets, with a tiny model that Keras runs."""

import base64
import hashlib
import http.client
import io
import json
import re
import socket
import zlib

import numpy as np
import pytest
import running_server
from conformance import tiny_model
from PIL import Image

from keras_vit import preprocessing, runtime
from keras_vit.serve import Limits, Server, Settings, playground

LABELS = ("cat", "<b>dog</b>", "élan")
MOST = 1_000_000  # bytes of a body


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = tiny_model(labels=LABELS)
    file = tmp_path_factory.mktemp("serve") / "tiny.keras"
    model.save(file)
    return file


@pytest.fixture(scope="module")
def opened(path):
    return runtime.open(path)


@pytest.fixture(scope="module")
def server(path):
    settings = {"engine": "keras", "max_body": MOST, "read_timeout": 0.5}
    with running_server.running({"tiny": path}, limits=Limits(max_batch=4), **settings) as server:
        yield server


def ask(server, path, body=None, method=None, **headers):
    """The status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=250)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    found = dict((name.lower(), value) for name, value in response.getheaders())
    is_json = found.get("content-type") == "application/json"
    return response.status, found, json.loads(content) if is_json else content


def photo(kind="PNG", size=(40, 30), mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def b64(data):
    return {"b64": base64.b64encode(data).decode()}


def expected(opened, data):
    image = Image.open(io.BytesIO(data))
    return opened.scores(preprocessing.preprocess(image, opened.config))


def test_predict_gives_what_the_model_gives(server, opened):
    images = np.random.default_rng(1).normal(size=(3, *opened.config.input_shape)).astype("float32")
    status, _, answer = ask(server, "/v1/models/tiny:predict", {"instances": images.tolist()})
    assert status == 200, answer
    for name, array in opened.scores(images).items():
        found = np.array([row[name] for row in answer["predictions"]])
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-5 * np.ptp(array))
        assert abs(found - array[::-1]).max() > 1e-3 * np.ptp(array)
    data = photo()
    scores = expected(opened, data)["probabilities"][0]
    body = {"signature_name": "classify", "inputs": {"bytes": [b64(data)]}}
    status, _, answer = ask(server, "/v1/models/tiny/versions/1:predict", body)
    order = np.argsort(-scores)
    assert answer["outputs"]["labels"] == [[LABELS[i] for i in order]]
    np.testing.assert_allclose(answer["outputs"]["scores"], [scores[order]], atol=1e-5)
    body = {"examples": [{"bytes": b64(data)}, {"bytes": [b64(data)]}]}
    status, _, results = ask(server, "/v1/models/tiny:classify", body)
    assert [label for label, _ in results["results"][0]] == answer["outputs"]["labels"][0]
    assert len(results["results"]) == 2
    body = {"signature_name": "features", "inputs": images.tolist()}
    status, _, answer = ask(server, "/v1/models/tiny:predict", body)
    np.testing.assert_allclose(answer["outputs"], opened.features(images), rtol=0, atol=1e-4)


@pytest.mark.backend_free
def test_status_and_metadata(server, opened):
    status, _, answer = ask(server, "/v1/models/tiny")
    assert (status, answer["model_version_status"][0]["state"]) == (200, "AVAILABLE")
    status, _, answer = ask(server, "/v1/models/tiny/versions/1/metadata")
    assert answer["model_spec"] == {"name": "tiny", "signature_name": "", "version": "1"}
    found = answer["metadata"]["signature_def"]["signature_def"]
    assert set(found) == {"serving_default", "serve_bytes", "classify", "features"}
    dims = found["serving_default"]["inputs"]["images"]["tensor_shape"]["dim"]
    assert [int(dim["size"]) for dim in dims] == [-1, *opened.config.input_shape]


@pytest.mark.backend_free
def test_operators_see_health_and_metrics(server):
    assert ask(server, "/healthz")[::2] == (200, b"ok\n")
    assert ask(server, "/readyz")[::2] == (200, b"ready\n")
    ask(server, "/v1/models/<script>:predict", {"instances": [1]})
    _, headers, text = ask(server, "/metrics")
    assert headers["content-type"].startswith("text/plain") and b"<script>" not in text
    assert ask(server, "/monitoring/prometheus/metrics")[0] == 200
    for line in (
        rb'keras_vit_requests_total\{route="/v1/",status="404"\} [1-9]',
        rb'keras_vit_version_available\{model="tiny",version="1"\} 1.0',
        rb'keras_vit_queue_images\{model="tiny"\} 0.0',
    ):
        assert re.search(line, text), line


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("place", "body", "status", "message"),
    [
        (":predict", {"instances": [[0.0] * 4]}, 400, r"must have shape \(batch, .*shape \(1, 4\)"),
        (":predict", {"inputs": 1}, 400, "must have at least one dimension"),
        (":predict", {"signature_name": "no", "instances": [1]}, 400, '"no" not found in sign'),
        (":regress", {"examples": [1]}, 400, "Expected regression signature method_name"),
        (":classify", {"examples": []}, 400, "'examples' is expected to be a non-empty list"),
        (":classify", {"examples": [{"b": 1}]}, 400, "the feature bytes"),
        (":guess", {"instances": [1]}, 400, "Malformed request: POST /v1/models/tiny:guess"),
        ("/versions/9:predict", {"instances": [1]}, 404, r"Specific\(tiny, 9\)"),
        ("/labels/new:predict", {"instances": [1]}, 400, "Unrecognized servable version label"),
        (":predict", b" " * (MOST + 1), 413, f"at most {MOST} bytes"),
        (":predict", b"{", 400, "JSON Parse error"),
    ],
)
def test_wrong_requests_have_serving_s_words(server, place, body, status, message):
    found, headers, answer = ask(server, f"/v1/models/tiny{place}", body)
    assert found == status and list(answer) == ["error"]
    assert re.search(message, answer["error"])
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.backend_free
def test_wrong_pictures_are_named_and_fail_alone(server):
    good, cut = photo("JPEG"), photo("JPEG", (200, 200))[:900]
    huge = bytearray(photo())
    huge[16:24] = (40_000).to_bytes(4, "big") * 2  # its header alone claims the pixels
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    for files, message in (
        ([good, b"GIF89a"], "image 1: it is neither a JPEG nor a PNG file"),
        ([cut, good], "image 0: its data is cut off or damaged"),
        ([good, bytes(huge)], "image 1: .*too many; at most 33554432"),
        ([good] * 5, "Task size 5 is larger than maximum input batch size 4"),
    ):
        body = {"signature_name": "classify", "instances": [b64(file) for file in files]}
        status, _, answer = ask(server, "/v1/models/tiny:predict", body)
        assert status == 400 and re.search(message, answer["error"]), answer
    assert ask(server, "/v1/models/tiny:predict", {**body, "instances": [b64(good)]})[0] == 200


@pytest.mark.backend_free
def test_images_that_are_no_numbers_or_not_normalized(server, opened):
    images = np.full((2, *opened.config.input_shape), 255.0)
    status, _, answer = ask(server, "/v1/models/tiny:predict", {"instances": images.tolist()})
    assert status == 400 and "not normalized" in answer["error"]
    images = images * 0
    images[1, 0, 0, 0] = np.nan
    status, _, answer = ask(server, "/v1/models/tiny:predict", {"instances": images.tolist()})
    assert status == 400 and answer["error"].endswith("NaN or infinite ones in image 1")


@pytest.mark.backend_free
def test_slow_and_cut_requests_end(server):
    head = b"POST /v1/models/tiny:predict HTTP/1.1\r\nHost: a\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
        slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
        answer = b""
        while part := slow.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 s" in answer
    with socket.create_connection(("127.0.0.1", server.port), 60) as chunked:
        chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunked.sendall(b"100000\r\n" + b" " * 0x100000)
        assert chunked.recv(4096).startswith(b"HTTP/1.1 413")
    for part in (head, head + b"Content-Length: 100\r\n\r\n{", b"\0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 60) as cut:
            cut.sendall(part)
    with socket.create_connection(("127.0.0.1", server.port), 60) as silent:
        silent.sendall(head[:20])
        assert silent.recv(10) == b""  # closed after 0.5 s
    assert ask(server, "/healthz")[0] == 200


@pytest.mark.backend_free
def test_connections_are_bounded(path):
    with running_server.running({"tiny": path}, engine="keras", max_connections=1) as server:
        first = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        first.request("GET", "/healthz")
        assert first.getresponse().read() == b"ok\n"
        status, headers, _ = ask(server, "/healthz")
        assert (status, headers["retry-after"]) == (503, "1")
        first.request("GET", "/healthz")  # who is connected is not disturbed
        assert first.getresponse().status == 200
        first.close()


# -- the playground


@pytest.mark.backend_free
def test_page_loads_nothing_and_repeats_nothing(server):
    status, headers, page = ask(server, "/?model=<script>alert(1)</script>")
    assert status == 200 and b"alert(1)" not in page and b"{{" not in page
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in (b"style", b"script"):
        (text,) = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.S)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in policy
    assert not re.search(rb"(src|href)=\"(?!data:)", page) and b"http" not in page
    assert ask(server, "/none")[0] == 404 and ask(server, "/", b"x")[0] == 405


def test_playground_looks_at_a_picture(server, opened):
    status, _, answer = ask(server, "/playground/models")
    (model,) = answer["models"]
    assert (model["name"], model["version"], model["explains"]) == ("tiny", 1, True)
    data = photo(size=(300, 200))
    status, _, answer = ask(server, "/playground/look?model=tiny&version=1", data)
    assert status == 200 and answer["why"] is None
    scores = expected(opened, data)["probabilities"][0]
    found = {one["class"]: one["score"] for one in answer["classes"]}
    np.testing.assert_allclose([found[i] for i in range(3)], scores, atol=1e-5)
    names = [one["name"] for one in answer["maps"]]
    best = LABELS[int(scores.argmax())]
    assert names[:3] == ["Attention rollout", "Attention, last layer", f"Grad-CAM: {best}"]
    patches = np.prod(answer["grid"])
    assert {len(base64.b64decode(one["levels"])) for one in answer["maps"]} == {patches}
    for query, body, status, message in (
        ("model=tiny", b"text", 400, "The picture cannot be used: its data is cut off"),
        ("model=tiny", b"", 400, "The picture cannot be used"),
        ("model=no", data, 404, "Servable not found"),
        ("model=tiny&version=x", data, 400, "version must be a number"),
        ("model=../../etc/passwd", data, 404, "Servable not found"),
    ):
        found, _, answer = ask(server, f"/playground/look?{query}", body)
        assert found == status and message in answer["error"]


def test_playground_explains_a_model_that_merges_tokens(tmp_path, monkeypatch):
    path = tmp_path / "m.keras"
    tiny_model(labels=LABELS, token_merging=1).save(path)
    with running_server.running({"m": path}, engine="keras") as server:
        status, _, answer = ask(server, "/playground/look?model=m", photo())
        assert status == 200 and answer["why"] is None and len(answer["maps"]) == 5
        scores = expected(runtime.open(path), photo())["probabilities"][0]
        found = {one["class"]: one["score"] for one in answer["classes"]}
        np.testing.assert_allclose([found[i] for i in range(3)], scores, atol=1e-5)

        def refuse(model, images, classes):
            raise ValueError("model must be another. Received: this one")

        monkeypatch.setattr(playground, "_maps", refuse)
        status, _, answer = ask(server, "/playground/look?model=m", photo())
        assert status == 200 and answer["maps"] == [] and len(answer["classes"]) == 3
        assert answer["why"].endswith("no maps: model must be another. Received: this one")


# -- starting and stopping


@pytest.mark.backend_free
def test_port_in_use_is_named(path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port must be free. Received: .*port={port}: another"):
            Server({"tiny": path}, Settings(port=port))
    with pytest.raises(ValueError, match="host and port must be an address of this machine"):
        Server({"tiny": path}, Settings(host="no.such.host.invalid"))


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "settings", [{"max_body": 0}, {"read_timeout": 0}, {"poll": -1}, {"max_connections": 1.5}]
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Settings(**settings)


@pytest.mark.backend_free
def test_full_queue_refuses_and_stop_answers_what_was_accepted(path):
    """A request that waits when the server is told to stop still gets its answer."""
    limits = Limits(max_batch=4, max_wait=100, max_queue=4, timeout=200)  # it waits for 3 others
    with running_server.running({"tiny": path}, engine="keras", limits=limits) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"signature_name": "classify", "instances": [b64(photo())]}
        connection.request("POST", "/v1/models/tiny:predict", json.dumps(body))
        while not next(iter(server.models)).versions[1].batcher.waiting:
            assert ask(server, "/healthz")[0] == 200
        more = {**body, "instances": body["instances"] * 4}
        status, headers, answer = ask(server, "/v1/models/tiny:predict", more)
        assert (status, headers["retry-after"]) == (429, "1") and "queue" in answer["error"]
        server.stop()
        assert connection.getresponse().status == 200

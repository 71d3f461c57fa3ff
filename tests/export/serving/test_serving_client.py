"""keras_vit's own client and its command, against both servers."""

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import tiny_export
from typer.testing import CliRunner

from keras_vit_cli import client
from keras_vit_cli.main import app

pytestmark = pytest.mark.backend_free

pytest.importorskip("tensorflow_serving", reason="tensorflow-serving-api is not installed")

IMAGES = tiny_export.images(2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two pictures on disk."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.jpg").write_bytes(tiny_export.picture(1))
    (folder / "b.png").write_bytes(tiny_export.picture(2, "PNG", (50, 20)))
    return [folder / "a.jpg", folder / "b.png"]


@pytest.fixture(params=["http", "grpc"])
def url(request, server):
    """The model's address in either protocol."""
    return {
        "http": f"http://127.0.0.1:{server.rest}/v1/models/flowers",
        "grpc": f"grpc://127.0.0.1:{server.grpc}/flowers",
    }[request.param]


def run(*arguments):
    """What the command prints, or the error it ends with."""
    done = CliRunner().invoke(app, ["request", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_client_gives_what_the_model_gives(url, files, loaded):
    asked = client.connect(url, timeout=60)
    assert asked.signatures() == ["classify", "features", "serve_bytes", "serving_default"]
    assert asked.status() == {1: "AVAILABLE"}
    data = [path.read_bytes() for path in files]
    for signature, value in (
        ("classify", data),
        ("serve_bytes", data),
        ("serving_default", IMAGES),
        ("features", IMAGES),
    ):
        expected = loaded(signature, value)
        found = asked.predict(files if value is data else value, signature)
        assert set(found) == set(expected)
        for name, array in expected.items():
            if array.dtype == object:
                assert found[name].tolist() == [[v.decode() for v in row] for row in array]
            else:
                atol = 1e-6 * np.ptp(array)
                np.testing.assert_allclose(found[name], array, rtol=0, atol=atol)
                assert abs(found[name] - array[::-1]).max() > atol
    double = asked.predict(IMAGES.astype("float64"), "features")
    np.testing.assert_allclose(double["features"], loaded("features", IMAGES)["features"], 1e-5)
    again = asked.predict(data, "classify")
    assert again["labels"].tolist() == asked.predict(files)["labels"].tolist()
    assert client.connect(f"{url}/versions/1/", timeout=60).status() == {1: "AVAILABLE"}
    asked.close()


def test_command_prints_the_best_classes(url, files, loaded):
    expected = loaded("classify", [path.read_bytes() for path in files])
    best = [row[0].decode() for row in expected["labels"]]
    rows = [line.split("\t") for line in run(*files, "--url", url, "--top", 2).splitlines()]
    assert [row[0] for row in rows] == [str(path) for path in files for _ in range(2)]
    assert [row[1] for row in rows[::2]] == best
    found = json.loads(run(*files, "--url", url, "--json"))
    assert [row["classes"][0]["label"] for row in found] == best
    scores = [[c["score"] for c in row["classes"]] for row in found]
    np.testing.assert_allclose(scores, expected["scores"], atol=1e-6)
    # Without names, the numbers of the classes.
    rows = run(*files, "--url", url, "--signature", "serve_bytes", "--top", 1).splitlines()
    assert [tiny_export.LABELS[int(row.split("\t")[1])] for row in rows] == best


def test_command_shows_bars_on_a_terminal(server, files, monkeypatch):
    from rich.console import Console

    from keras_vit_cli import output

    console = Console(force_terminal=True, width=200, record=True)
    monkeypatch.setattr(output, "out", console)
    run(*files, "--url", f"http://127.0.0.1:{server.rest}/v1/models/flowers")
    text = console.export_text()
    assert "━" in text and all(str(path) in text for path in files)
    assert all(label in text for label in tiny_export.LABELS)


def test_classes_of_tokens_are_none():
    tokens = np.zeros((1, 7, 3), "float32")
    assert client.top_classes({"probabilities": tokens, "logits": tokens}, 2) is None
    scores = np.array([[0.1, 0.7, 0.2]])
    assert client.top_classes({"probabilities": scores}, 1) == [[("1", 0.7)]]


def test_command_sends_arrays(url, tmp_path, loaded):
    np.save(tmp_path / "x.npy", IMAGES)
    found = json.loads(run(tmp_path / "x.npy", "--url", url, "--signature", "features"))
    expected = loaded("features", IMAGES)["features"]
    np.testing.assert_allclose([row["features"] for row in found], expected, rtol=1e-5, atol=1e-6)
    np.save(tmp_path / "y.npy", IMAGES[0, 0, 0])
    with pytest.raises(ValueError, match="must hold a batch"):
        run(tmp_path / "y.npy", "--url", url)


def test_errors_say_what_is_wrong(url, files, tmp_path):
    with pytest.raises(ValueError, match="url must name a model that is served.*Latest.trees"):
        run(files[0], "--url", url.replace("flowers", "trees"))
    with pytest.raises(ValueError, match="Specific.flowers, 7"):
        run(files[0], "--url", f"{url}/versions/7")
    with pytest.raises(ValueError, match="Unrecognized servable version label: new"):
        run(files[0], "--url", f"{url}/labels/new")
    with pytest.raises(ValueError, match='"guess.*" not found'):
        run(files[0], "--url", url, "--signature", "guess")
    with pytest.raises(ValueError, match="The server refused the request: .*finite"):
        client.connect(url, timeout=60).predict(IMAGES * np.nan, "features")
    (tmp_path / "cut.jpg").write_bytes(files[0].read_bytes()[:300])
    with pytest.raises(ValueError, match="The server refused the request"):
        run(tmp_path / "cut.jpg", "--url", url)
    (tmp_path / "text.jpg").write_text("no picture")
    with pytest.raises(ValueError, match="must be JPEG or PNG.*text.jpg.*b'no pictu'"):
        run(tmp_path / "text.jpg", "--url", url)
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ValueError, match="must be JPEG or PNG.*an empty file"):
        run(tmp_path / "empty.jpg", "--url", url)
    with pytest.raises(ValueError, match="IMAGE must be a file.*none.jpg, which does not exist"):
        run(tmp_path / "none.jpg", "--url", url)
    run(files[0], "--url", url)


def test_a_server_that_is_down(files):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/v1/models/m", f"grpc://127.0.0.1:{port}/m"):
            with pytest.raises(ConnectionError, match=f"a server that answers.*{port}.*refused"):
                run(files[0], "--url", url, "--timeout", 30)


def test_a_server_that_says_nothing(files):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/v1/models/m", f"grpc://127.0.0.1:{port}/m"):
            with pytest.raises((TimeoutError, ConnectionError), match=str(port)):
                run(files[0], "--url", url, "--timeout", 0.3)


@pytest.mark.parametrize(
    ("code", "body", "error", "text"),
    [
        (200, None, ConnectionError, "a server that answers"),
        (200, b"<html>hello", OSError, "did not answer with a JSON object"),
        (200, b"{}", OSError, "one prediction an image"),
        (200, b'{"predictions": []}', OSError, "one prediction an image"),
        (503, b'{"error": "full"}', ConnectionError, "The server is busy: full"),
        (429, b'{"error": "full"}', ConnectionError, "The server is busy: full"),
        (500, b"<html>oh", OSError, "The server failed: <html>oh"),
    ],
)
def test_a_server_that_is_something_else(files, code, body, error, text):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(code)
            if body is None:  # it dies in the middle
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(body or b"{")

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.handle_request)
        thread.start()
        with pytest.raises(error, match=text):
            run(files[0], "--url", f"http://127.0.0.1:{http.server_address[1]}/v1/models/m")
        thread.join()


@pytest.mark.parametrize("body", [b'{"name": "m", "ready": true}', b'{"metadata": 3}', b"[]"])
def test_a_server_that_describes_models_otherwise(body):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=lambda: [http.handle_request() for _ in range(2)])
        thread.start()
        asked = client.connect(f"http://127.0.0.1:{http.server_address[1]}/v1/models/m")
        for question, what in ((asked.status, "its versions"), (asked.signatures, "its sign")):
            with pytest.raises(OSError, match=f"did not answer with {what}"):
                question()
        thread.join()


def test_a_grpc_server_that_is_busy(files):
    import grpc
    from tensorflow_serving.apis import prediction_service_pb2_grpc as service

    class Busy(service.PredictionServiceServicer):
        def Predict(self, request, context):
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "The batch scheduling queue to which this task was submitted is full",
            )

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_PredictionServiceServicer_to_server(Busy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ConnectionError, match="The server is busy: .*is full"):
            run(files[0], "--url", f"grpc://127.0.0.1:{port}/m", "--timeout", 60)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    "url",
    [
        "flowers",
        "http://host:8501",
        "http://host:8501/v1/models/",
        "http://host:8501/v1/models/m:predict",
        "http://host:8501/v1/models/m/versions/new",
        "grpc://host:8500",
        "grpc://host:8500/m/2",
        "file:///v1/models/m",
    ],
)
def test_url_must_name_a_model(url):
    with pytest.raises(ValueError, match="url must be"):
        client.connect(url)


def test_rest_needs_neither_keras_nor_tensorflow(server, files):
    """The command as it is installed: no backend is imported for one request."""
    code = f"""
import sys
from keras_vit_cli.main import app
try:
    app(["request", {str(files[0])!r}, "--url",
         "http://127.0.0.1:{server.rest}/v1/models/flowers"])
except SystemExit as end:
    assert not end.code
print([m for m in ("keras", "tensorflow", "grpc", "jax", "torch") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
    assert str(files[0]) in done.stdout


def test_grpc_without_its_packages_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving", None)
    with pytest.raises(ImportError, match=r"pip install 'keras3-vit\[serving\]'"):
        client.connect("grpc://host:8500/m")
    client.connect("http://host:8501/v1/models/m")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "IMAGE must be a file. Received: .*folder, a folder"),
        ("none.jpg", "IMAGE must be a file. Received: .*none.jpg, which does not exist"),
        ("none.npy", "IMAGE must be a file. Received: .*none.npy, which does not exist"),
        ("file.npy", "IMAGE must be a whole .npy file of numbers. Received: .*file.npy, "),
    ],
)
def test_request_names_what_is_no_file(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / name, "--url", "http://127.0.0.1:1/v1/models/x")

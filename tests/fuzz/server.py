"""The server as a door: damaged requests, sent over a socket to one that runs in this process.

A seed is a whole request as it goes over the wire. The property: the answer is one of HTTP, is none
of the 500s that mean a fault of the server, and every error is JSON that says why. A request that
is refused counts as a file that is refused.
"""

import base64
import functools
import http.client
import io
import json
import socket
import tempfile
import threading
from pathlib import Path

import mutations
import numpy as np
from conformance import TINY, tiny_model
from mutations import Random
from PIL import Image
from seeds import Seed

FILE = "request.http"
END = b"\r\n\r\n"
MODEL = "tiny"
PATIENCE = 60.0
"""Seconds that a client waits for an answer."""
BUSY = (429, 503)
"""The server cannot take more now, and says so."""


def requests() -> list[Seed]:
    """A request of every kind that the server answers."""
    image = np.random.default_rng(0).integers(0, 256, TINY.input_shape, "uint8")
    Image.fromarray(image).save(data := io.BytesIO(), "PNG")
    picture = data.getvalue()
    pixels = (image / 255.0).round(2).tolist()
    file = {"b64": base64.b64encode(picture).decode()}
    example = {"bytes": file}
    model = f"/v1/models/{MODEL}"
    posts = {
        f"{model}:predict": [
            {"instances": [pixels]},
            {"inputs": {"images": [pixels]}},
            {"signature_name": "serve_bytes", "instances": [file, file]},
            {"signature_name": "features", "instances": [{"images": pixels}]},
        ],
        f"{model}/versions/1:predict": [{"instances": [pixels]}],
        f"{model}:classify": [{"examples": [example]}],
    }
    found = [_wire("GET", path) for path in (model, f"{model}/metadata", "/", "/metrics")]
    for path, bodies in posts.items():
        found += [_wire("POST", path, json.dumps(body).encode()) for body in bodies]
    found.append(_wire("POST", f"/playground/look?model={MODEL}", picture))
    return [{FILE: request} for request in found]


def _wire(method: str, path: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + END + body


def damage(data: bytes, random: Random) -> bytes:
    """A request with another body of the right length, or with any bytes changed."""
    head, _, body = data.partition(END)
    if not body or random.random() < 0.3:
        return mutations.damage_bytes(data, random)
    whole = body.startswith(b"{")
    body = (mutations.damage_json if whole else mutations.damage_bytes)(body, random)
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + END + body


def send(folder: Path) -> None:
    """Sends a request and checks the answer; raises ValueError if it was refused."""
    status, body, kind = _answer((folder / FILE).read_bytes())
    if not status:
        raise ValueError(f"{folder}: the connection was closed")
    if status < 400:
        return
    if status >= 500 and status not in BUSY:
        raise AssertionError(f"{status}: {body[:300]!r}")
    if kind == "application/json" and not json.loads(body)["error"]:
        raise AssertionError(f"{status} without a reason")
    raise ValueError(f"{folder}: {status}")


def _answer(request: bytes) -> tuple[int, bytes, str | None]:
    """The status, the body and its type; a status of 0 if the server closed the connection."""
    with socket.create_connection(("127.0.0.1", _port()), PATIENCE) as client:
        answer = http.client.HTTPResponse(client)
        try:
            client.sendall(request)
            answer.begin()
            return answer.status, answer.read(), answer.headers["Content-Type"]
        except (ConnectionError, http.client.HTTPException):  # before all of it was read
            return 0, b"", None


@functools.cache
def _port() -> int:
    """The port of a server that runs as long as this process."""
    from keras_vit.serve import Server, Settings

    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "tiny.keras"
    tiny_model(labels=("cat", "dog", "frog")).save(file)
    listening = threading.Event()
    # A length that promises more than there is ends by the timeout.
    settings = Settings(port=0, engine="keras", read_timeout=0.3, poll=0)
    server = Server({MODEL: file}, settings, lambda _: listening.set())

    def run() -> None:
        with folder:
            server.run()

    threading.Thread(target=run, daemon=True).start()
    if not listening.wait(PATIENCE):
        raise AssertionError("the server does not listen")
    return server.port
